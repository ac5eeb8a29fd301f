"""Detectors fitted at the layers of a target, and their scores of activations."""

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
from hf_stitch.analysis.detection.noise import DOSES, KINDS, Noise, folds, random_rows
from hf_stitch.analysis.detection.recording import View, recorded
from hf_stitch.data import Samples
from hf_stitch.data.overlap import MOST_SHARED, ContentSketch
from hf_stitch.data.samples import Id
from hf_stitch.detectors import Detector, Scorer
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.tasks.base import Task

Array = NDArray[np.float64]
FITTED = "the data that detectors are fitted to"
"""Key of the samples of the fit, and their name in messages."""
Seen = Mapping[str, NDArray[np.floating]]
"""Records of activations: label of a detector -> ``(n,)`` scores; ``rows.<reads>`` -> ``(n, positions, d)`` rows, for
detectors that learn from stitched activations."""


@dataclass(frozen=True)
class Layer:
    """Detectors of one layer."""

    noise: Noise  # noise for the target's own activations
    scorers: Mapping[str, Scorer]  # label -> fitted detector
    known: Seen  # records of the samples that the detectors were fitted to
    far: Seen = field(default_factory=dict)  # records of far samples


@dataclass(frozen=True)
class Watch:
    """Detectors at the layers of a target."""

    detectors: Mapping[str, Detector]  # label -> detector
    seed: int  # seed of random positions, of noise and of halves
    layers: dict[str, Layer] = field(default_factory=dict)  # layer -> its fitted detectors
    kinds: Sequence[str] = KINDS
    known_ids: Sequence[Id] = ()  # ids of the samples that the detectors were fitted to
    far_ids: Sequence[Id] = ()  # ids of far samples

    def kinds_at(self, layer: str) -> tuple[str, ...]:
        """Return the kinds of noise at a layer."""
        return tuple(kind for kind in self.kinds if kind in self.layers[layer].noise.kinds)

    @property
    def fingerprint(self) -> bytes:
        """Hash of the scores of the samples that the detectors were fitted to; empty without fitted detectors."""
        scores = [
            f"{layer} {label}".encode() + np.ascontiguousarray(fitted.known[label]).tobytes()
            for layer, fitted in self.layers.items()
            for label in fitted.scorers
        ]
        return hashlib.sha256(b"".join(scores)).digest() if scores else b""

    def record(self, layer: str, activations: Representation, ids: Sequence[Id]) -> dict[str, NDArray[np.floating]]:
        """Return the records of activations at a layer."""
        return self.records_of(self.layers[layer].scorers, activations, ids)

    def records_of(
        self, scorers: Mapping[str, Scorer], activations: Representation, ids: Sequence[Id]
    ) -> dict[str, NDArray[np.floating]]:
        """Return the scores of fitted detectors, and rows for detectors that learn from stitched activations."""
        records: dict[str, NDArray[np.floating]] = {
            label: scorer.score(activations).cpu().numpy() for label, scorer in scorers.items()
        }
        for reads in dict.fromkeys(d.reads for d in self.detectors.values() if d.auxiliary == "stitched"):
            records[f"rows.{reads}"] = random_rows(activations, ids, self.seed, reads).numpy()
        return records

    def record_doses(
        self, layer: str, activations: Representation, ids: Sequence[Id]
    ) -> dict[str, NDArray[np.floating]]:
        """Return the records of the target's own activations with noise at a layer."""
        records: dict[str, NDArray[np.floating]] = {}
        for kind in self.kinds_at(layer):
            noise = self.layers[layer].noise.sample(kind, activations, ids, self.seed)
            for number, dose in enumerate(DOSES):
                noisy = activations.replace(values=activations.values + dose**0.5 * noise)
                records |= {f"{kind}.{number}.{key}": values for key, values in self.record(layer, noisy, ids).items()}
        return records

    def compare(
        self,
        label: str,
        strange: Seen,
        own_records: Seen,
        own_ids: Sequence[Id],
        strange_ids: Sequence[Id] | None = None,
    ) -> tuple[Array, Array]:
        """Return the scores of strange activations and of the target's own activations.

        A detector of stitched activations is fitted to one half of the samples and scores the second half, and the
        reverse. The strange and the own activations of a sample are in the same half.
        """
        detector = self.detectors[label]
        if detector.auxiliary != "stitched":
            return np.asarray(strange[label], np.float64), np.asarray(own_records[label], np.float64)
        key = f"rows.{detector.reads}"
        split = folds(own_ids, self.seed), folds(own_ids if strange_ids is None else strange_ids, self.seed)
        return crossfitted(detector, own_records[key], strange[key], split)


def crossfitted(
    detector: Detector,
    usual: NDArray[np.floating],
    strange: NDArray[np.floating],
    split: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> tuple[Array, Array]:
    """Fit a detector to one half of usual and of strange rows and score the second half, and the reverse."""
    scores = np.empty(len(strange)), np.empty(len(usual))
    for fit_fold in (False, True):
        fit_usual, fit_strange = (_as_batch(x[f == fit_fold]) for x, f in zip((usual, strange), split, strict=True))
        scorer = detector.fit([fit_usual], auxiliary=[fit_strange])
        for target_scores, rows, sample_folds in zip(scores, (strange, usual), reversed(split), strict=True):
            target_scores[sample_folds != fit_fold] = (
                scorer.score(_as_batch(rows[sample_folds != fit_fold])).cpu().numpy()
            )
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
    """Fit each detector at each layer of the target. All detectors share the activations of a layer."""
    watch = Watch(detectors, run.seed, {}, kinds, samples.ids, () if far is None else far.ids)
    if not detectors:
        return watch
    outliers_used = outliers if any(d.auxiliary == "outliers" for d in detectors.values()) else None
    all_data = {FITTED: samples, "auxiliary_data": outliers_used, "far_data": far}
    data = {name: source for name, source in all_data.items() if source is not None}
    for layer, batches_of_data in recorded(network, layers, data, view, run, task):
        batches = dict(zip(data, batches_of_data, strict=True))
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
        records_of_data: dict[str, Seen] = {"far_data": {}}
        for name in data.keys() - {"auxiliary_data"}:
            ids = iter(data[name].ids)
            records = [watch.records_of(scorers, batch, [*islice(ids, batch.batch)]) for batch in batches[name]]
            records_of_data[name] = {key: np.concatenate([record[key] for record in records]) for key in records[0]}
        watch.layers[layer] = Layer(noise, scorers, records_of_data[FITTED], records_of_data["far_data"])
    return watch


def check_needs(
    detectors: Mapping[str, Detector], samples: Samples, outliers: Samples | None, far: Samples | None
) -> None:
    """Raise an error before any work if a detector lacks labels or auxiliary samples."""
    for label, detector in detectors.items():
        if detector.needs_labels and samples.labels is None:
            raise ValueError(f"detector {label} requires labels, but the data lacks them; pass labelled samples")
        if detector.auxiliary == "outliers" and outliers is None:
            raise ValueError(
                f"detector {label} requires samples of other data; pass auxiliary_data=, different from far_data="
            )
        if detector.auxiliary == "stitched" and (detector.reads == "whole" or detector.needs_labels):
            raise ValueError(
                f"detector {label} learns from stitched activations, stored as random positions without labels: it "
                'must declare reads = "positions" or "samples", and needs_labels = False'
            )
    if outliers is None:
        return
    if not any(detector.auxiliary == "outliers" for detector in detectors.values()):
        names = ", ".join(detectors) or "no detectors"
        raise ValueError(f"auxiliary_data= requires a detector that learns from outliers, got {names}; leave it out")
    if far is not None and (shared := ContentSketch.of(outliers).share(far) or 0) > 0:
        raise ValueError(
            f"far_data must differ from auxiliary_data, which detectors are fitted to, but shares {shared:.0%} of its "
            "samples with it; pass other samples"
        )


def check_far(far: Samples | None, others: Collection[Samples], *, detectors: Collection[str]) -> None:
    """Raise an error if far samples are not a control of detectors."""
    if far is None:
        return
    if not detectors:
        raise ValueError("far_data= requires detectors; pass detectors=, or leave it out")
    share = max(ContentSketch.of(samples).share(far) or 0 for samples in others)
    if share > MOST_SHARED:
        raise ValueError(
            f"far_data must differ from the data, but shares {share:.1%} of its samples with it; pass samples unlike "
            "the data (noise, other motifs)"
        )
