"""Detectors fitted at the layers of a target, and what they make of activations that they are shown."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.detection.noise import DOSES, KINDS, Noise, drawn_rows, folds
from hf_stitch.analysis.detection.recording import View, recorded
from hf_stitch.data import Samples
from hf_stitch.data.overlap import MOST_SHARED, ContentSketch
from hf_stitch.data.samples import Id
from hf_stitch.detectors import Detector, Scorer
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.tasks.base import Task

Array = NDArray[np.float64]
FITTED = "the data to which detectors are fitted"
Seen = Mapping[str, NDArray[np.floating]]
"""What is kept of activations: label of a detector -> ``(n,)`` scores; ``rows.<reads>`` -> ``(n, positions, d)`` rows,
for detectors that learn from stitched activations."""


@dataclass(frozen=True)
class Layer:
    """The detectors of one layer."""

    noise: Noise  # noise for the target's own activations
    scorers: Mapping[str, Scorer]  # label -> fitted detector
    known: Seen  # what is kept of the samples to which the detectors were fitted
    far: Seen = field(default_factory=dict)  # what is kept of far samples


@dataclass(frozen=True)
class Watch:
    """Detectors at the layers of a target."""

    detectors: Mapping[str, Detector]  # label -> detector
    seed: int  # seed of drawn positions, of noise and of halves
    layers: dict[str, Layer] = field(default_factory=dict)  # layer -> its fitted detectors
    kinds: Sequence[str] = KINDS
    known_ids: Sequence[Id] = ()  # ids of the samples to which the detectors were fitted
    far_ids: Sequence[Id] = ()  # ids of far samples

    def kinds_at(self, layer: str) -> tuple[str, ...]:
        """Return the kinds of noise at a layer."""
        return tuple(kind for kind in self.kinds if kind in self.layers[layer].noise.kinds)

    @property
    def fingerprint(self) -> bytes:
        """Hash of the scores of the samples to which the detectors were fitted; empty if none were fitted."""
        scores = [
            f"{layer} {label}".encode() + np.ascontiguousarray(fitted.known[label]).tobytes()
            for layer, fitted in self.layers.items()
            for label in fitted.scorers
        ]
        return hashlib.sha256(b"".join(scores)).digest() if scores else b""

    def see(self, layer: str, activations: Representation, ids: Sequence[Id]) -> dict[str, NDArray[np.floating]]:
        """Show activations to the detectors of a layer."""
        return self.shown(self.layers[layer].scorers, activations, ids)

    def shown(
        self, scorers: Mapping[str, Scorer], activations: Representation, ids: Sequence[Id]
    ) -> dict[str, NDArray[np.floating]]:
        """Return what fitted detectors make of activations, and rows for those that learn from stitched ones."""
        found: dict[str, NDArray[np.floating]] = {
            label: scorer.score(activations).cpu().numpy() for label, scorer in scorers.items()
        }
        for reads in dict.fromkeys(d.reads for d in self.detectors.values() if d.auxiliary == "stitched"):
            found[f"rows.{reads}"] = drawn_rows(activations, ids, self.seed, reads).numpy()
        return found

    def see_doses(self, layer: str, activations: Representation, ids: Sequence[Id]) -> dict[str, NDArray[np.floating]]:
        """Show the target's own activations with noise to the detectors of a layer."""
        found: dict[str, NDArray[np.floating]] = {}
        for kind in self.kinds_at(layer):
            noise = self.layers[layer].noise.draw(kind, activations, ids, self.seed)
            for number, dose in enumerate(DOSES):
                noisy = activations.replace(values=activations.values + dose**0.5 * noise)
                found |= {f"{kind}.{number}.{key}": values for key, values in self.see(layer, noisy, ids).items()}
        return found

    def compare(
        self, label: str, strange: Seen, own: Seen, ids: Sequence[Id], others: Sequence[Id] | None = None
    ) -> tuple[Array, Array]:
        """Return the scores of strange activations and of the target's own.

        A detector of stitched activations is fitted to one half of the samples and scores the other, twice. The strange
        and the own activations of a sample are in the same half.
        """
        detector = self.detectors[label]
        if detector.auxiliary != "stitched":
            return np.asarray(strange[label], np.float64), np.asarray(own[label], np.float64)
        key = f"rows.{detector.reads}"
        split = folds(ids, self.seed), folds(ids if others is None else others, self.seed)
        return crossfitted(detector, own[key], strange[key], split)


def crossfitted(
    detector: Detector,
    own: NDArray[np.floating],
    strange: NDArray[np.floating],
    split: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> tuple[Array, Array]:
    """Fit a detector to one half of own and of strange rows, and score the other half, twice."""
    scores = np.empty(len(strange)), np.empty(len(own))
    for half in (False, True):
        fitted_own, fitted_strange = (_as_batch(x[f == half]) for x, f in zip((own, strange), split, strict=True))
        scorer = detector.fit([fitted_own], auxiliary=[fitted_strange])
        for scored, rows, fold in zip(scores, (strange, own), reversed(split), strict=True):
            scored[fold != half] = scorer.score(_as_batch(rows[fold != half])).cpu().numpy()
    return scores


def _as_batch(rows: NDArray[np.floating]) -> Representation:
    values = torch.from_numpy(np.ascontiguousarray(rows))
    return Representation(values[:, 0], "bd") if values.shape[1] == 1 else Representation(values, "bnd")


def fit_watch(
    detectors: Mapping[str, Detector],
    network: Adapter,
    layers: Sequence[str],
    samples: Samples,
    view: View,
    run: Run,
    *,
    task: Task,
    outliers: Samples | None = None,
    far: Samples | None = None,
    residuals: Mapping[str, Sequence[Tensor]] | None = None,
    kinds: Sequence[str] = KINDS,
) -> Watch:
    """Fit each detector at each layer of the target. The activations of a layer are computed once for all of them."""
    watch = Watch(detectors, run.seed, {}, kinds, samples.ids, () if far is None else far.ids)
    if not detectors:
        return watch
    needed = outliers if any(d.auxiliary == "outliers" for d in detectors.values()) else None
    every = {FITTED: samples, "auxiliary_data": needed, "far_data": far}
    data = {name: each for name, each in every.items() if each is not None}
    for layer, of in recorded(network, layers, data, view, run, task):
        batches = dict(zip(data, of, strict=True))
        scorers: dict[str, Scorer] = {}
        try:
            noise = Noise.of(batches[FITTED], samples.ids, run.seed, (residuals or {}).get(layer, ()))
        except ValueError as error:
            raise ValueError(f"layer {layer!r} of the target: {error}") from error
        for label, detector in detectors.items():
            if detector.auxiliary == "stitched":
                continue
            try:
                labels = samples.labels if detector.needs_labels else None
                scorers[label] = detector.fit(batches[FITTED], labels, batches.get("auxiliary_data"))
            except ValueError as error:
                raise ValueError(f"detector {label} at layer {layer!r} of the target: {error}") from error
        seen: dict[str, Seen] = {"far_data": {}}
        for name in data.keys() - {"auxiliary_data"}:
            ids = iter(data[name].ids)
            parts = [watch.shown(scorers, batch, [*islice(ids, batch.batch)]) for batch in batches[name]]
            seen[name] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        watch.layers[layer] = Layer(noise, scorers, seen[FITTED], seen["far_data"])
    return watch


def check_needs(
    detectors: Mapping[str, Detector], samples: Samples, outliers: Samples | None, far: Samples | None
) -> None:
    """Check before any work that detectors get what they need."""
    for label, detector in detectors.items():
        if detector.needs_labels and samples.labels is None:
            raise ValueError(f"detector {label} needs the class of each sample, but the data have no labels")
        if detector.auxiliary == "outliers" and outliers is None:
            raise ValueError(
                f"detector {label} needs samples of other data: pass auxiliary_data=, other samples than far_data="
            )
        if detector.auxiliary == "stitched" and (detector.reads == "whole" or detector.needs_labels):
            raise ValueError(
                f"detector {label} learns from stitched activations, of which only drawn positions are kept, without "
                'labels: it must declare reads = "positions" or "samples", and needs_labels = False'
            )
    if outliers is None:
        return
    if not any(detector.auxiliary == "outliers" for detector in detectors.values()):
        names = ", ".join(detectors) or "no detectors are named, so they"
        raise ValueError(f"auxiliary_data= is for detectors that need samples of other data; {names} do not")
    if far is not None and (shared := ContentSketch.of(outliers).share(far) or 0) > 0:
        raise ValueError(
            f"{shared:.0%} of far_data are also in auxiliary_data, to which detectors are fitted: what they make of "
            "these samples shows nothing. Pass other samples"
        )


def check_far(far: Samples | None, others: Collection[Samples], *, detectors: Collection[str]) -> None:
    """Check that far samples are a control of detectors."""
    if far is None:
        return
    if not detectors:
        raise ValueError("far_data= is a control of detectors, but none are named: pass detectors=, or leave it out")
    share = max(ContentSketch.of(samples).share(far) or 0 for samples in others)
    if share > MOST_SHARED:
        raise ValueError(
            f"{share:.1%} of far_data are also in the data, from which detectors must tell them apart: pass samples "
            "unlike the data (noise, other motifs)"
        )
