"""What a comparison is asked for: by which metrics, of which vectors of a sample as rows, paired how."""

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
"""Rows -> the pooling of a representation that gives them, and that of saved activations."""

ROWS_OF: dict[str, Rows] = {"flatten": "flat", "none": "resized", "mean": "mean", "cls": "cls", "last": "last"}
"""Pooling -> the rows that it gave before they had names."""

Kind = tuple[int, int] | Literal["vector", "text"]
"""What the positions of a layer are: a grid, the tokens of a text, or none."""

Align = Literal["tokens", "offsets"]
"""How rows of texts are paired: token by token, or by the pieces of text on whose boundaries two tokenizers agree."""


def per_sample(rows: Rows) -> bool:
    """Return whether each sample is one row."""
    return POOLINGS[rows] != "none"


def kind_of(spec: RepresentationSpec) -> Kind:
    """Return what the positions of a layer are."""
    return "vector" if spec.layout == "bd" else spec.grid or "text"


def check_layer(spec: RepresentationSpec, rows: Rows) -> None:
    """Refuse a layer that has no such rows."""
    kind = kind_of(spec)
    if rows == "flat" and kind == "text":
        raise ValueError(f"{spec}: texts vary in length, so that rows='flat' have no width; use 'mean' or 'positions'")
    grid = spec.layout != "bnd" or (rows == "cls" and spec.grid is not None and spec.prefix_tokens == 0)
    if rows in ("cls", "last") and kind != "vector" and grid:
        raise ValueError(f"{spec} has no token for rows={rows!r}; use 'mean' or 'flat'")


def differ(a: RepresentationSpec, b: RepresentationSpec, rows: Rows) -> str:
    """Return why row i of a layer is not the same as row i of another; empty if it is."""
    if per_sample(rows):
        return ""
    kinds, prefixes = (kind_of(a), kind_of(b)), (a.prefix_tokens, b.prefix_tokens)
    if rows == "resized" and not any(isinstance(kind, str) for kind in kinds):
        return ""
    if kinds[0] != kinds[1]:
        return f"rows={rows!r} pairs equal positions, which {a} and {b} do not have"
    if rows == "tokens" and prefixes[0] != prefixes[1]:
        return f"rows='tokens' pairs all tokens, but {a} and {b} have other prefix tokens"
    return ""


def mixed(sides: Sequence[Sequence[RepresentationSpec]], rows: Rows) -> str:
    """Return which kinds of rows a comparison mixes, whose values mean different things; empty if there is one."""
    first, last = [list(specs) for specs in (sides[0], sides[-1])] if sides else ([], [])
    pairs = [(kind_of(a), kind_of(b)) for a in first for b in last if not differ(a, b, rows)]
    vectors = {kind == "vector" for pair in pairs for kind in pair}
    if len({a != b for a, b in pairs}) > 1 and rows == "resized":
        return "positions of equal grids, and positions that were resized"
    if len(vectors) > 1 and rows != "flat":
        return f"vectors that layers output, and {'the ' * per_sample(rows)}{rows} of others"
    return ""


@dataclass(frozen=True)
class Asked:
    """Metrics by their labels, those of activations and those of weights, and which vectors are rows."""

    activations: Mapping[str, ActivationMetric]
    weights: Mapping[str, WeightMetric]
    rows: Rows = "mean"
    align: Align = "tokens"

    @classmethod
    def of(
        cls, metrics: Iterable[str | Mapping[str, Any] | Metric], rows: Rows = "mean", align: Align = "tokens"
    ) -> Asked:
        """Check what is asked for, and build the metrics."""
        if align == "offsets" and rows != "positions":
            raise ValueError(f"align='offsets' needs rows='positions', got rows={rows!r}: its rows are not tokens")
        activations: dict[str, ActivationMetric] = {}
        weights: dict[str, WeightMetric] = {}
        for label, metric in registries.metrics.build_all(metrics, needed=True).items():
            if isinstance(metric, WeightMetric):
                weights[label] = metric
            elif not isinstance(metric, ActivationMetric):
                raise TypeError(
                    f"{metric!r} is neither an ActivationMetric nor a WeightMetric; derive it from one of them"
                )
            elif not metric.routes:
                raise ValueError(f"metric {label} compares {metric.statistic}, not layers; call its function instead")
            else:
                activations[label] = metric
        return cls(activations, weights, rows, align)

    def check(self, run: Run, *data: Any, **tests: int) -> None:
        """Refuse samples and tests of samples that these metrics, or these rows, have no use for."""
        tested = any(tests.values())
        if self.weights and (run.planning or tested):
            raise ValueError(
                f"{', '.join(self.weights)} compares weights: it has no plan, no permutations and no resamples"
            )
        if self.weights and not self.activations and any(each is not None for each in data):
            raise ValueError(f"{', '.join(self.weights)} compares weights, without samples; leave data out")
        if tested and not per_sample(self.rows):
            raise ValueError(
                f"{', '.join(tests)} of layers exchange or leave out whole samples, which takes one row per sample: "
                "use rows='mean', 'flat', 'cls' or 'last'. For the positions of two layers, use "
                "hf_stitch.analysis.permutation_test(…, samples=…) or bootstrap(…, samples=…)"
            )
