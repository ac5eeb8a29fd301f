"""What detectors make of the activations that stitches hand over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.data import Samples
from hf_stitch.detectors import Detector, Scorer
from hf_stitch.representation import Pooling, Representation
from hf_stitch.statistics import LayerMoments
from hf_stitch.stitches.layer import POOLED

Array = NDArray[np.float64]
DOSES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Relative residuals ``‖noise‖² / ‖g‖²`` of the target's own activations g with noise, with which detectors are
calibrated. The noise has the covariance of the activations."""


class Activations:
    """Batches of a network's activations at one layer, computed anew whenever they are iterated.

    Args:
        network: The network.
        layer: The layer.
        samples: Raw samples.
        pooling: Pooling of the stitches: with one vector per sample, the batches contain these vectors.
        batch_size: Number of samples per forward pass.
    """

    def __init__(self, network: Adapter, layer: str, samples: Samples, pooling: Pooling, batch_size: int) -> None:
        self._network, self._layer, self._samples = network, layer, samples
        self._pooling, self._batch_size = pooling, batch_size

    @torch.no_grad()
    def __iter__(self) -> Iterator[Representation]:
        """Iterate over the batches, in the order of the samples."""
        for batch in self._samples.batches(self._batch_size):
            found = self._network.encode(self._network.preprocess(batch.samples), self._layer)[self._layer]
            yield received(found, self._pooling)


def received(activations: Representation, pooling: Pooling) -> Representation:
    """Return the target's own activations in the form in which a stitch with this pooling hands over its own.

    Args:
        activations: Activations of the target.
        pooling: Pooling of the stitch.
    """
    if pooling not in POOLED or activations.layout == "bd":
        return activations
    return Representation(activations.rows("cls" if activations.prefix_tokens else pooling), "bd")


def handed_over(mapped: Representation, pooling: Pooling) -> Representation:
    """Return the output of a stitch, as one vector per sample if the pooling leaves one.

    Args:
        mapped: Output of a stitching layer.
        pooling: Its pooling.
    """
    if pooling not in POOLED or mapped.layout == "bd":
        return mapped
    return Representation(mapped.positions()[:, 0], "bd")


@dataclass(frozen=True)
class Watch:
    """A detector, fitted at one layer of the target.

    Attributes:
        scorer: The fitted detector.
        known: ``(n,)`` sorted scores of the samples that it was fitted to.
        root: ``(d, d)`` float64; times standard normal vectors, it gives noise with the covariance of the activations
            and a mean square equal to theirs.
    """

    scorer: Scorer
    known: Array
    root: Tensor

    @classmethod
    def of(cls, detector: Detector, activations: Iterable[Representation]) -> Watch:
        """Fit a detector to activations of the target.

        Args:
            detector: The detector.
            activations: Activations of the target on samples other than the scored ones.

        Raises:
            ValueError: All positions are equal, or the detector cannot be fitted.
        """
        scorer = detector.fit(activations)
        scores: list[Tensor] = []
        kept: LayerMoments | None = None
        for batch in activations:
            scores.append(scorer.score(batch))
            rows = batch.rows("none")
            kept = kept or LayerMoments([rows[:1024].double().mean(0)])
            kept.update([rows])
        assert kept is not None  # the detector was fitted to the same activations
        moments = kept.moments(0, 0)
        values, vectors = torch.linalg.eigh(moments.sxx)
        values = values.clamp(min=0)  # rounding
        if not values.any():
            raise ValueError(f"all {moments.n} positions are equal: is the layer dead?")
        square = moments.sxx.trace() / moments.n + moments.mean_x @ moments.mean_x
        root = vectors * (values * square / values.sum()).sqrt()
        return cls(scorer, np.sort(torch.cat(scores).cpu().numpy()), root)

    def noise(self, activations: Representation, seeds: Sequence[tuple[int, int]]) -> Tensor:
        """Draw noise with the covariance of the target's activations, and a mean square equal to theirs.

        Args:
            activations: Activations of the target. Prefix tokens and padding get no noise.
            seeds: Seed of each sample, whose noise does not depend on the other samples of its batch.

        Returns:
            The noise, in the shape of the values.
        """
        prefix, (batch, length, width) = activations.prefix_tokens, activations.positions().shape
        real = torch.ones(batch, length, dtype=torch.bool, device=self.root.device)
        if activations.mask is not None:
            real = activations.mask[:, prefix:].to(real)
        drawn = [
            np.random.default_rng(seed).standard_normal((count, width))
            for seed, count in zip(seeds, real.sum(1).tolist(), strict=True)
        ]
        noise = self.root.new_zeros(batch, length, width)
        noise[real] = torch.from_numpy(np.concatenate(drawn)).to(self.root) @ self.root.T
        if activations.layout == "bd":
            noise = noise[:, 0]
        elif activations.layout == "bnd":
            noise = torch.nn.functional.pad(noise, (0, 0, prefix, 0))
        else:
            noise = noise.unflatten(1, activations.grid)
            noise = noise if activations.layout == "bhwc" else noise.permute(0, 3, 1, 2)
        return noise.to(activations.values)


def auroc(positive: Array, negative: Array, *, paired: bool = True) -> Array:
    """Compute the AUROC of two sets of scores, with its 95% interval (DeLong et al. 1988).

    Args:
        positive: ``(n, …)`` scores that should be higher.
        negative: ``(m, …)`` other scores.
        paired: Whether both are scores of the same samples.

    Returns:
        ``(…, 3)``: the AUROC, where ties count half, and both ends of its interval, which are cut to [0, 1].
    """
    columns = zip(positive.reshape(len(positive), -1).T, negative.reshape(len(negative), -1).T, strict=True)
    found = [_auroc(up, down, paired) for up, down in columns]
    return np.array(found).reshape(*positive.shape[1:], 3)


def _auroc(positive: Array, negative: Array, paired: bool) -> tuple[float, float, float]:
    above = _share_below(np.sort(negative), positive)
    below = 1 - _share_below(np.sort(positive), negative)
    value = float(above.mean())
    if paired:
        error = float((above + below).std(ddof=1)) / len(above) ** 0.5
    else:
        error = float(above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below)) ** 0.5
    margin = NormalDist().inv_cdf(0.975) * error
    return value, max(0.0, value - margin), min(1.0, value + margin)


def _share_below(known: Array, scores: Array) -> Array:
    """Share of sorted values that are below each score; equal ones count half."""
    below, upto = (np.searchsorted(known, scores, side) for side in ("left", "right"))
    return (below + upto) / (2 * len(known))


def sided(scores: Array, known: Array, *, two_sided: bool) -> Array:
    """Return scores in which larger is stranger, also where unusually small scores are strange.

    Args:
        scores: Scores of a detector, of any shape.
        known: Sorted scores of the samples that it was fitted to.
        two_sided: Whether small scores are strange, too. The result is then the distance of the rank among ``known``
            from the middle, from 0 to 0.5.
    """
    return np.abs(_share_below(known, scores) - 0.5) if two_sided else scores


def equivalent_dose(values: Array, doses: Array) -> Array:
    """Return the dose of noise that a detector tells apart as well as it tells apart a stitch.

    Args:
        values: ``(…)`` AUROCs of stitches at one layer of the target.
        doses: ``(doses,)`` AUROCs of :data:`DOSES` at this layer.

    Returns:
        ``(…)`` doses, interpolated on a logarithmic scale. 0 below the AUROC of the smallest dose, infinity above that
        of the largest.
    """
    rising = np.maximum.accumulate(doses)
    found = np.exp(np.interp(values, rising, np.log(DOSES)))
    return np.where(values < rising[0], 0.0, np.where(values > rising[-1], np.inf, found))


def fit_watches(
    detectors: Mapping[str, Detector], network: Adapter, layers: tuple[str, ...], samples: Samples, pooling: Pooling,
    batch_size: int,
) -> dict[tuple[str, str], Watch]:  # fmt: skip
    """Fit each detector at each layer of the target.

    Args:
        detectors: Label -> detector.
        network: The target.
        layers: Its layers.
        samples: Raw samples.
        pooling: Pooling of the stitches.
        batch_size: Number of samples per forward pass.

    Returns:
        (label, layer) -> fitted detector.

    Raises:
        ValueError: A detector cannot be fitted; the message names detector and layer.
    """
    found: dict[tuple[str, str], Any] = {}
    for label, detector in detectors.items():
        for layer in layers:
            try:
                found[label, layer] = Watch.of(detector, Activations(network, layer, samples, pooling, batch_size))
            except ValueError as error:
                raise ValueError(f"detector {label} at layer {layer!r} of the target: {error}") from error
    return found
