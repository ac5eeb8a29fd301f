"""Request of a comparison: metrics, rows, and how rows of both sides are paired."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_stitch.metrics import ActivationMetric, Metric, WeightMetric
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.running import Run

Rows = Literal["flat", "positions", "resized", "mean", "tokens", "cls", "last"]
POOLINGS: dict[Rows, Pooling] = {
    "flat": "flatten", "positions": "none", "resized": "none", "mean": "mean", "tokens": "none", "cls": "cls",
    "last": "last",
}  # fmt: skip
"""Rows -> the pooling that produces them, also in saved activations."""

ROWS_OF: dict[str, Rows] = {"flatten": "flat", "none": "resized", "mean": "mean", "cls": "cls", "last": "last"}
"""Pooling in results of old versions -> rows."""

Kind = tuple[int, int] | Literal["vector", "text"]
"""Kind of the positions of a layer: a grid, the tokens of a text, or a single vector."""

Align = Literal["tokens", "offsets"]
"""How rows of texts are paired: token by token, or by text segments with boundaries that two tokenizers share."""


def per_sample(rows: Rows) -> bool:
    """Return whether each sample is one row."""
    return POOLINGS[rows] != "none"


def kind_of(spec: RepresentationSpec) -> Kind:
    """Return the kind of the positions of a layer."""
    return "vector" if spec.layout == "bd" else spec.grid or "text"


def check_layer(spec: RepresentationSpec, rows: Rows) -> None:
    """Raise an error if a layer cannot be split into such rows."""
    kind = kind_of(spec)
    if rows == "flat" and kind == "text":
        raise ValueError(f"rows='flat' requires a fixed length, but texts vary ({spec}); use 'mean' or 'positions'")
    grid = spec.layout != "bnd" or (rows == "cls" and spec.grid is not None and spec.prefix_tokens == 0)
    if rows in ("cls", "last") and kind != "vector" and grid:
        raise ValueError(f"rows={rows!r} is undefined for {spec}; use 'mean' or 'flat'")


def mismatch(a: RepresentationSpec, b: RepresentationSpec, rows: Rows) -> str:
    """Return why rows i of two layers do not correspond; empty if they do."""
    if per_sample(rows):
        return ""
    kinds, prefixes = (kind_of(a), kind_of(b)), (a.prefix_tokens, b.prefix_tokens)
    if rows == "resized" and not any(isinstance(kind, str) for kind in kinds):
        return ""
    if kinds[0] != kinds[1]:
        return f"rows={rows!r} requires equal positions, got {a} and {b}"
    if rows == "tokens" and prefixes[0] != prefixes[1]:
        return f"rows='tokens' requires equal prefix tokens, got {a} and {b}"
    return ""


def mixed_kinds(sides: Sequence[Sequence[RepresentationSpec]], rows: Rows) -> str:
    """Return the kinds of rows that a comparison mixes; empty if there is only one kind."""
    first, last = [list(specs) for specs in (sides[0], sides[-1])] if sides else ([], [])
    pairs = [(kind_of(a), kind_of(b)) for a in first for b in last if not mismatch(a, b, rows)]
    vectors = {kind == "vector" for pair in pairs for kind in pair}
    if len({a != b for a, b in pairs}) > 1 and rows == "resized":
        return "positions of equal grids and resized positions"
    if len(vectors) > 1 and rows != "flat":
        return f"layers that output vectors and {'the ' * per_sample(rows)}{rows} of layers with positions"
    return ""


@dataclass(frozen=True)
class Asked:
    """Metrics of activations and of weights by label, and the choice of rows."""

    activations: Mapping[str, ActivationMetric]
    weights: Mapping[str, WeightMetric]
    rows: Rows = "mean"
    align: Align = "tokens"

    @classmethod
    def of(
        cls, metrics: Iterable[str | Mapping[str, Any] | Metric], rows: Rows = "mean", align: Align = "tokens"
    ) -> Asked:
        """Validate the request and build the metrics."""
        if align == "offsets" and rows != "positions":
            raise ValueError(f"align='offsets' requires rows='positions', got rows={rows!r}")
        activations: dict[str, ActivationMetric] = {}
        weights: dict[str, WeightMetric] = {}
        for label, metric in registries.metrics.build_all(metrics, needed=True).items():
            if isinstance(metric, WeightMetric):
                weights[label] = metric
            elif not isinstance(metric, ActivationMetric):
                raise TypeError(
                    f"metric must be an ActivationMetric or a WeightMetric, got {metric!r}; derive it from one of them"
                )
            elif not metric.routes:
                raise ValueError(f"metric {label} compares {metric.statistic}, not layers; call its function instead")
            else:
                activations[label] = metric
        return cls(activations, weights, rows, align)

    def check(self, run: Run, *data: Any, **tests: int) -> None:
        """Raise an error if these metrics or rows do not support the samples or the tests."""
        has_tests = any(tests.values())
        if self.weights and (run.planning or has_tests):
            raise ValueError(
                f"{', '.join(self.weights)} compares weights and does not support a plan, permutations or resamples"
            )
        if self.weights and not self.activations and any(samples is not None for samples in data):
            raise ValueError(f"{', '.join(self.weights)} compares weights, without samples; leave data out")
        if has_tests and not per_sample(self.rows):
            raise ValueError(
                f"{', '.join(tests)} require one row per sample: use rows='mean', 'flat', 'cls' or 'last'. For the "
                "positions of two layers, use hf_stitch.analysis.permutation_test(…, samples=…) or "
                "bootstrap(…, samples=…)"
            )
