"""Stitched activations compared with the target's own: distances, and the results of detectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.detection.discrimination import (
    BINS,
    FIGURES,
    auroc,
    binned,
    check_scores,
    discrimination,
    equivalent_dose,
    sided,
)
from hf_stitch.analysis.detection.noise import DOSES, halves
from hf_stitch.analysis.detection.recording import View, stitched_view, target_view
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.detection.watching import Seen, Watch, check_far, check_needs, fit_watch
from hf_stitch.data import Samples
from hf_stitch.data.samples import Id
from hf_stitch.detectors import Detector
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.scoring.halves import Predictor
from hf_stitch.scoring.measured import Record
from hf_stitch.stitches import StitchingLayer

Array = NDArray[np.float64]
Cell = tuple[str, str, str]
"""Label of a matcher, layer of the source, layer of the target."""


def views_of(stitch: StitchingLayer) -> dict[str, View]:
    """Return the view of each part of a stitching layer."""
    views: dict[str, View] = {"body": stitch.pooling, "prefix": "prefix"}
    return {part: views[part] for part in stitch.parts}


@dataclass(frozen=True)
class Watchers:
    """:class:`~hf_stitch.scoring.passing.Watch` that compares stitched activations with the target's own.

    It records the squared distance of both, the squared norm of the target's own, and the scores of detectors.
    """

    detectors: Mapping[str, Detector]  # by label
    known: Samples  # the samples that they are fitted to
    outliers: Samples | None = None  # samples of other data, for detectors that learn from outliers
    far: Samples | None = None  # samples that detectors should distinguish
    scored: frozenset[Id] | None = None  # the samples that detectors score; None: all
    views: Mapping[str, Sequence[View]] = field(default_factory=dict)  # name of halves -> views
    layers: Mapping[View, Sequence[str]] = field(default_factory=dict)  # the layers of the target
    watches: Mapping[View, Watch] = field(default_factory=dict)  # fitted detectors

    @classmethod
    def of(
        cls, detectors: Mapping[str, Detector], fit_samples: Samples, test: Samples, auxiliary_data: Any, far_data: Any
    ) -> Self:
        """Read the samples of the detectors and check their requirements."""
        outliers, far = (None if samples is None else Samples.of(samples) for samples in (auxiliary_data, far_data))
        check_needs(detectors, fit_samples, outliers, far)
        check_far(far, (fit_samples, test), detectors=detectors)
        return cls(detectors, fit_samples, outliers, far)

    @property
    def record(self) -> dict[str, Any]:
        """Detectors and fingerprints of their samples, as JSON values for a recipe."""
        others = {"auxiliary_data": self.outliers, "far_data": self.far}
        return {
            "detectors": {label: detector.to_dict() for label, detector in self.detectors.items()},
            **{name: None if samples is None else samples.fingerprint for name, samples in others.items()},
        }

    def fitted(
        self, target: Adapter, views: Mapping[str, Sequence[View]], layers: Mapping[str, Sequence[str]], run: Run,
        **options: Any,
    ) -> Self:  # fmt: skip
        """Return the watchers with detectors fitted to the target's activations at the layers of all halves."""
        by_view: dict[View, dict[str, None]] = {}
        for name, views_of_halves in views.items():
            for view in views_of_halves:
                by_view.setdefault(view, {}).update(dict.fromkeys(layers[name]))
        watches = {
            view: fit_watch(
                self.detectors, target, list(at), self.known, view, run, outliers=self.outliers, far=self.far, **options
            )
            for view, at in by_view.items()
        }
        return replace(self, views=views, layers={view: list(at) for view, at in by_view.items()}, watches=watches)

    # -- the pass ---------------------------------------------------------------------------------------------------
    @property
    def fingerprint(self) -> bytes:
        """Hash of the fitted detectors; empty without detectors."""
        return b"".join(watch.fingerprint for watch in self.watches.values())

    def record_own(self, y: Mapping[str, Representation], ids: Sequence[Id]) -> dict[Record, Array]:
        """Return the records of the target's own activations."""
        records: dict[Record, Any] = {}
        scored_rows, scored_ids = self._chosen(ids)
        for view, watch in self.watches.items():
            for layer in self.layers[view]:
                records[Record("norm", view, layer)] = self._squares(layer, view, target_view(y[layer], view))
                if self.detectors and scored_ids:
                    own_view = target_view(_subset(y[layer], scored_rows), view)
                    by_kind = {
                        "own": watch.record(layer, own_view, scored_ids),
                        "doses": watch.record_doses(layer, own_view, scored_ids),
                    }
                    records |= {
                        Record(kind, view, layer, name=key): values
                        for kind, of_kind in by_kind.items()
                        for key, values in of_kind.items()
                    }
        return records

    def record_stitched(
        self, predictor: Predictor, mapped: Representation, y: Representation, ids: Sequence[Id]
    ) -> dict[Record, Array]:
        """Return the records of stitched activations."""
        records: dict[Record, Any] = {}
        scored_rows, scored_ids = self._chosen(ids)
        layer, where = predictor.layer_b, (predictor.name, predictor.front)
        for view in self.views[predictor.front]:
            activations, stitched = target_view(y, view), stitched_view(mapped, view)
            records[Record("error", view, *where)] = self._squares(layer, view, activations, stitched)
            if self.detectors and scored_ids:
                scores = self.watches[view].record(layer, _subset(stitched, scored_rows), scored_ids)
                records |= {Record("stitched", view, *where, key): values for key, values in scores.items()}
        return records

    def _chosen(self, ids: Sequence[Id]) -> tuple[Tensor | None, Sequence[Id]]:
        """Return the indices and ids of the samples of a batch that detectors score."""
        if self.scored is None:
            return None, ids
        rows = [row for row, id_ in enumerate(ids) if id_ in self.scored]
        return torch.tensor(rows, dtype=torch.long), [ids[row] for row in rows]

    def _squares(self, layer: str, view: View, first: Representation, second: Representation | None = None) -> Array:
        """Return the squared norm of each sample over real positions, or its squared distance from ``second``."""
        values = first.values if second is None else second.values.to(first.values.device) - first.values
        if first.mask is not None:
            values = torch.where(first.mask[..., None], values, 0)
        if view != "prefix" and layer in self.layers.get("prefix", ()):  # prefix tokens have a separate view
            values = values[:, first.prefix_tokens :]
        if values.dim() > 2:  # sum parts in float64: a full norm in float64 is 20 times slower
            values = torch.linalg.vector_norm(values.flatten(2), dim=2)
        squares: Array = values.double().square().sum(1).cpu().numpy()
        return squares

    # -- results ----------------------------------------------------------------------------------------------------
    def residual(self, seen: Mapping[Record, Array], view: View, layer: str, at: tuple[str, str]) -> float:
        """Return the squared distance of stitched activations from the target's own, divided by their squared norm."""
        front, name = at
        return float(seen[Record("error", view, name, front)].sum() / seen[Record("norm", view, layer)].sum())

    def detections(
        self, seen: Mapping[Record, Array], ids: Iterable[Id], cells: Mapping[tuple[str, str], Cell],
        layers_a: Sequence[str], min_auroc: float, *, two_sided: bool = True,
    ) -> dict[View, dict[str, Detection]]:  # fmt: skip
        """Return the detection of each detector, by view; ``cells`` maps (name of halves, predictor) to cells.

        With ``two_sided``, unusually small scores count as strange for detectors that declare it. Figures are NaN where
        a detector does not reach ``min_auroc`` (:attr:`Detection.blind`).
        """
        if not self.detectors:
            return {}
        scored_ids = [id_ for id_ in ids if self.scored is None or id_ in self.scored]
        records: dict[Record, dict[str, Array]] = {}
        for key, values in seen.items():
            records.setdefault(replace(key, name=""), {})[key.name] = values
        detections: dict[View, dict[str, Detection]] = {}
        for view, watch in self.watches.items():
            own_records, dose_records = (
                {layer: records[Record(kind, view, layer)] for layer in self.layers[view]} for kind in ("own", "doses")
            )
            stitched_records = {
                cell: records[Record("stitched", view, name, front)]
                for (front, name), cell in cells.items()
                if view in self.views[front]
            }
            detections[view] = {
                label: Evidence(
                    watch,
                    label,
                    two_sided and detector.two_sided,
                    scored_ids,
                    own_records,
                    dose_records,
                    stitched_records,
                ).detect(layers_a, min_auroc)
                for label, detector in self.detectors.items()
            }
        return detections


@dataclass(frozen=True)
class Evidence:
    """Records of one detector in a test, with reasons where it cannot be fitted or its scores are not finite."""

    watch: Watch
    label: str  # of the detector
    two_sided: bool
    ids: Sequence[Id]  # ids of the test samples
    own: Mapping[str, Seen]  # layer of the target -> records of its own activations
    doses: Mapping[str, Seen]  # layer -> records of its own activations with noise (Watch.record_doses)
    stitched: Mapping[Cell, Seen]  # cell -> records of stitched activations
    undefined: dict[str, str] = field(default_factory=dict)

    def detect(self, layers_a: Sequence[str], min_auroc: float) -> Detection:
        """Compute the detection."""
        layers, watch = tuple(self.own), self.watch
        doses = {kind: np.full((len(layers), len(DOSES), 3), np.nan) for kind in watch.kinds}
        controls = {
            name: np.full((len(layers), 3), np.nan) for name in ("halves", "train", *(["far"] * bool(watch.far_ids)))
        }
        for j, layer in enumerate(layers):
            for kind in watch.kinds_at(layer):
                for dose_number, dose in enumerate(DOSES):
                    prefix, case = f"{kind}.{dose_number}.", f"{layer} with {kind} noise {dose:g}"
                    noisy = {
                        key.removeprefix(prefix): values
                        for key, values in self.doses[layer].items()
                        if key.startswith(prefix)
                    }
                    doses[kind][j, dose_number] = self._auroc(case, noisy, self.own[layer], self.ids)
            for name, values in controls.items():
                values[j] = self._control(name, layer)
        matchers = dict.fromkeys(matcher for matcher, _, _ in self.stitched)
        shape = (len(layers_a), len(layers), 3)
        figures = {m: {name: np.full(shape, np.nan) for name in ("auroc", "dose", *FIGURES[1:])} for m in matchers}
        bins = {"edges": BINS + 1, "own": BINS, "stitched": BINS}
        histograms = {m: {name: np.full((*shape[:2], size), np.nan) for name, size in bins.items()} for m in matchers}
        detection = Detection(
            self.label, layers, self.two_sided, figures, doses, controls, self.undefined, histograms, min_auroc
        )
        blind = detection.blind
        for (matcher, la, lb), seen in self.stitched.items():
            if lb in blind:
                continue
            cell = layers_a.index(la), layers.index(lb)
            scores = self._scores(f"{matcher}: {la} -> {lb}", seen, self.own[lb], self.ids)
            coloured = doses["coloured"][cell[1]]
            if not (distinguished := coloured[-1, 1] > 0.5):
                self.undefined[f"{lb}, doses"] = "noise of the size of the activations is not distinguished"
            if scores is None:
                continue
            for name, values in binned(*scores).items():
                histograms[matcher][name][cell] = values
            measured = discrimination(*scores, two_sided=self.two_sided, paired=True, seed=watch.seed)
            if distinguished:
                measured["dose"] = equivalent_dose(measured["auroc"], coloured[:, 0], DOSES)
            for name, values in measured.items():
                figures[matcher][name][cell] = values
        return detection

    def _control(self, name: str, layer: str) -> Array:
        layer_detectors, reference, ids = self.watch.layers[layer], self.own[layer], self.ids
        case = f"{layer}, control {name}"
        if name == "far":
            return self._auroc(case, layer_detectors.far, reference, ids, self.watch.far_ids)
        if name == "train":
            return self._auroc(case, reference, layer_detectors.known, self.watch.known_ids, ids)
        half = halves(ids, self.watch.seed, "control")
        strange, rest = ({key: values[flags] for key, values in reference.items()} for flags in (half, ~half))
        strange_ids, ids = ([i for i, flag in zip(ids, flags, strict=True) if flag] for flags in (half, ~half))
        return self._auroc(case, strange, rest, ids, strange_ids)

    def _scores(
        self, case: str, strange: Seen, reference: Seen, ids: Sequence[Id], strange_ids: Sequence[Id] | None = None
    ) -> tuple[Array, Array] | None:
        try:
            scores = self.watch.compare(self.label, strange, reference, ids, strange_ids)
            check_scores(*scores)
        except ValueError as error:
            self.undefined[case] = str(error)
            return None
        return scores

    def _auroc(
        self, case: str, strange: Seen, reference: Seen, ids: Sequence[Id], strange_ids: Sequence[Id] | None = None
    ) -> Array:
        """Compute the AUROC of the declared sides; without ``strange_ids``, both score the same samples."""
        if (scores := self._scores(case, strange, reference, ids, strange_ids)) is None:
            return np.full(3, np.nan)
        if self.two_sided:
            scores = sided(*scores), sided(scores[1], scores[1])
        return auroc(*scores, paired=strange_ids is None)


def _subset(activations: Representation, rows: Tensor | None) -> Representation:
    """Return the samples of a batch at the given indices, without their context."""
    if rows is None:
        return activations
    selected = rows.to(activations.values.device)
    mask = None if activations.mask is None else activations.mask[selected]
    return activations.replace(values=activations.values[selected], mask=mask, context={})
