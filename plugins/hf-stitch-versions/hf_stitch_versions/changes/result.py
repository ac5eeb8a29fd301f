"""Result of :func:`diff`: changes between two versions of a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score
from hf_stitch_versions.changes.lineage import Lineage
from hf_stitch_versions.changes.moved import Move
from hf_stitch_versions.changes.weights import WeightChange

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

LEAST_RATIO = 3.0
"""A part is a finding if its effect exceeds this multiple of the effect of noise, with confidence."""

ELSEWHERE = 0.05
"""Minimum share of the change outside of all parts that the verdict reports."""

ADDITIVE = 0.25
"""Effects of single parts add up if their sum deviates from the whole by less than this share."""

FEW = 3
"""Maximum number of reported names of tied modules, and of parts that cannot be exchanged."""

BASE_FIRST, OTHER_FIRST = "{a} up to here, then {b}", "{b} up to here, then {a}"
"""Names of the curves of hybrids."""


@dataclass(frozen=True)
class Estimate(Score):
    """Value with its confidence interval over samples; without an interval, its ends are NaN.

    Example:
        >>> print(Estimate(0.000123, 0.000101, 0.00015))
        0.000123 [0.000101, 0.00015]
    """

    def __str__(self) -> str:
        """Return the value and its interval with three digits."""
        if math.isnan(self.low):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Effect:
    """Effect of a part on the outputs, as distances from the outputs of the first network.

    Attributes:
        patch: With the part of the second network in the first.
        weights: With only its weights in the first; differs from ``patch`` if the part also quantizes its inputs, as
            dynamic int8.
        revert: With the part of the first network in the second.
        noise: With noise of the norms of the changes on the weights of the part; mean over draws.
        share: ``patch`` over the distance of the two networks.
        ratio: ``weights`` over ``noise``; its interval holds for all parts at once.
        local: Squared difference of the part's outputs on the inputs of the first network, over their squares.
        causal: Whether ``ratio`` is above 3 with confidence.
    """

    patch: Estimate
    weights: Estimate
    revert: Estimate
    noise: float
    share: Estimate
    ratio: Estimate
    local: float
    causal: bool


@dataclass(frozen=True)
class Change:
    """Change of a part.

    Attributes:
        name: Its name in the first network.
        other: Its name in the second network.
        block: Whether it is a block.
        weights: Change of its weights.
        effect: Its effect on the outputs; ``None`` without data, and for parts that cannot be exchanged.
        move: Change of the activations after it; ``None`` without data, and for parts that are not blocks.
        tied: Names in the first network of modules elsewhere that share its weights, in both networks.
    """

    name: str
    other: str
    block: bool
    weights: WeightChange
    effect: Effect | None
    move: Move | None
    tied: Sequence[str] = ()

    @property
    def label(self) -> str:
        """The name, with the names of modules tied to it."""
        more = f" and {len(self.tied) - FEW} more" * (len(self.tied) > FEW)
        return f"{self.name} (tied to {', '.join(self.tied[:FEW])}{more})" if self.tied else self.name


@dataclass(frozen=True)
class Outputs:
    """Differences of the outputs of two networks.

    Attributes:
        measure: ``KL``, or ``squared difference`` for networks without classes.
        what: The measure in words.
        forth: Mean distance of the second network from the first, as an expectation over the first.
        back: The same with the networks exchanged.
        quantiles: Quantile -> distance of single samples.
        worst: Samples with the largest distances, and these distances.
        agreement: Share of equal predictions, over each network's whole vocabulary; ``None`` without classes.
        scores: Name -> values of the first and the second network and their difference: accuracy, cross-entropy,
            confidence (for texts, means of means over tokens) and calibration error, as far as labels are available.
    """

    measure: str
    what: str
    forth: Estimate
    back: Estimate
    quantiles: Mapping[str, float]
    worst: Sequence[tuple[str, float]]
    agreement: Estimate | None
    scores: Mapping[str, tuple[float, float, Estimate]]


@dataclass(frozen=True)
class Difference(Result):
    """Changes between two versions of a network, returned by :func:`diff`.

    Attributes:
        a: The first network.
        b: The second network.
        n: Number of samples; 0 without data.
        data: Fingerprint of the samples; ``None`` without data.
        weights: Change of all weights.
        outputs: Differences of the outputs; ``None`` without data.
        parts: Change of each part, in their order in the first network.
        rest: Remaining distance with all parts of the second network in the first, due to different code or to weights
            that cannot be exchanged; ``None`` without data.
        curves: Name of a part -> distances from the outputs of the first network for two hybrids: with the parts up to
            this one from the first network and the rest from the second, and the reverse.
        lineage: Whether the second network is derived from the first.
        missing: Weights of the first network only.
        extra: Weights of the second network only.
        reshaped: Weights with different shapes.
        confidence: Level of confidence intervals.
        forwards: Approximate number of forward passes of a whole network per batch.
        failed: Exceeded bounds, and bounds that could not be fully checked, in words.
        notes: Omissions and their reasons.
        inputs: How the second network's own inputs differ; it ran on the inputs of the first.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict",)
    page: ClassVar[str] = "hf_stitch_versions.changes.page:section"

    a: str
    b: str
    n: int
    data: str | None
    weights: WeightChange
    outputs: Outputs | None
    parts: Sequence[Change]
    rest: Estimate | None
    curves: Mapping[str, tuple[Estimate, Estimate]]
    lineage: Lineage
    missing: Sequence[str]
    extra: Sequence[str]
    reshaped: Sequence[str]
    confidence: float
    forwards: float
    failed: Sequence[str]
    notes: Sequence[str]
    inputs: Sequence[str] = ()

    @property
    def causes(self) -> Sequence[Change]:
        """The parts that change the outputs more than noise of the same size, largest effect first."""
        causal = [part for part in self.parts if part.effect is not None and part.effect.causal]
        return sorted(causal, key=lambda part: -part.effect.patch.value if part.effect else 0.0)

    @property
    def verdict(self) -> str:
        """Summary in a few sentences."""
        unexpected = self.lineage.verdict != "derived" and self.lineage.blocks  # versions are expected to be derived
        kin = self.lineage.sentence if unexpected else ""
        return " ".join(filter(None, [self._cause(), self._elsewhere(), self._sum(), self._size(), kin]))

    def _cause(self) -> str:
        """Describe the part that carries the change."""
        if self.outputs is None:
            most = max(self.parts, key=lambda part: part.weights.change)
            if self.weights.change == self.weights.alone:
                alone = [*(reshaped.partition(" (")[0] for reshaped in self.reshaped), *self.missing, *self.extra]
                if not alone:
                    return "All weights are equal."
                more = f" and {len(alone) - 1} more lack" if len(alone) > 1 else " lacks"
                return f"All common weights are equal, but {alone[0]}{more} a partner of the same shape."
            changed = sum(part.weights.change > 0 for part in self.parts)
            return (
                f"The weights of {changed} of {len(self.parts)} parts differ, most in {most.label} "
                f"({most.weights.change:.2g} of their norm). Pass data to measure the effect on the outputs."
            )
        if not self.outputs.forth.value:
            return f"The outputs are equal on {self.n} samples."
        with_effect = [part for part in self.parts if part.effect is not None]
        if not with_effect:
            return "The outputs differ, but none of the parts can be exchanged."
        if math.isinf(self.outputs.forth.value):
            return "The distance of the outputs is infinite: the second network excludes classes of the first."
        if math.isnan(self.outputs.forth.low):
            most = max(with_effect, key=lambda part: part.effect.patch.value if part.effect else 0.0)
            assert most.effect is not None
            carried = _percent(most.effect.share)
            return f"{most.label} alone carries {carried} of the change; too few samples to be sure."
        if not self.causes and self._outside > 0.5:
            return ""
        if not self.causes:
            most = max(with_effect, key=lambda part: part.effect.ratio.value if part.effect else 0.0)
            assert most.effect is not None
            return (
                "No part changes the outputs more than noise of the same size, as with quantization; the largest "
                f"effect, of {most.label}, is {most.effect.ratio} times the effect of noise."
            )
        first = self.causes[0]
        assert first.effect is not None
        share, of = first.effect.share, self.outputs.forth.value
        more = f", {len(self.causes) - 1} more with confidence" if len(self.causes) > 1 else ""
        return (
            f"{first.label} alone carries {_percent(share)} of the change of the outputs; noise of the same size there "
            f"would carry {first.effect.noise / of:.2%}{more}."
        )

    def _elsewhere(self) -> str:
        """Describe the share of the change outside of all parts."""
        if self.rest is None or self.outputs is None or not self._outside:
            return ""
        outside = [part.label for part in self.parts if part.effect is None and part.weights.change]
        names = f" ({', '.join(outside[:FEW])}{f' and {len(outside) - FEW} more' * (len(outside) > FEW)})" * bool(
            outside
        )
        return (
            f"{self._outside:.0%} of the change is outside of all parts: in code, or in weights that cannot be "
            f"exchanged{names}."
        )

    @property
    def _outside(self) -> float:
        """Share of the change outside of all parts; 0 if it is small."""
        if self.rest is None or self.outputs is None or not self.outputs.forth.value:
            return 0.0
        share = self.rest.value / self.outputs.forth.value
        return share if share > ELSEWHERE else 0.0

    def _sum(self) -> str:
        """Describe the sum of the effects of parts, if it is far from the whole."""
        effects = [part.effect for part in self.parts if part.effect is not None]
        if self.outputs is None or not self.outputs.forth.value or len(self.causes) < 2:
            return ""
        total = sum(effect.share.value for effect in effects)
        if abs(total - 1) < ADDITIVE:
            return ""
        return f"The change is not local: single parts together carry {total:.0%} of it."

    def _size(self) -> str:
        """Describe the distances of outputs and weights."""
        weights = f"{self.weights.change:.2g} of the norm of the weights changed"
        if self.weights.alone:
            weights += f", {self.weights.alone:.2g} in weights of only one network"
        if self.weights.format:
            how = "rounded from the first network" if self.weights.rounding else "numbers of this format"
            weights += f"; the second network's are {self.weights.format} ({how})"
        if self.outputs is None:
            return f"{weights[0].upper()}{weights[1:]}."
        same = (
            "" if self.outputs.agreement is None else f", {self.outputs.agreement.value:.1%} of predictions are equal"
        )
        return f"{self.outputs.measure} {self.outputs.forth}{same}, on {self.n} samples; {weights}."

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per part, with columns for its weights, effect and move."""
        import pandas

        rows = []
        for part in self.parts:
            row: dict[str, object] = {"part": part.name, "other": part.other, "block": part.block}
            row |= {"tied": ", ".join(part.tied), **vars(part.weights)}
            if part.effect is not None:
                for name in ("patch", "weights", "revert", "share", "ratio"):
                    value: Estimate = getattr(part.effect, name)
                    row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
                row |= {"noise": part.effect.noise, "local": part.effect.local, "causal": part.effect.causal}
            rows.append(row | (vars(part.move) if part.move is not None else {}))
        return pandas.DataFrame(rows)

    def __rich__(self) -> Table:
        """Return a table of the parts, under the verdict."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.verdict))
        for column in ("part", "weights changed", "rank", "effect", "of the whole", "times noise", "moved", "lost"):
            table.add_column(column, justify="left" if column == "part" else "right")
        for part in self.parts:
            effect, move = part.effect, part.move
            style = "bold red" if effect is not None and effect.causal else ""
            table.add_row(
                Text(part.label), f"{part.weights.change:.2g}", _number(part.weights.rank),
                *(
                    ("", "", "") if effect is None
                    else (
                        f"{effect.patch.value:.2g}", f"{effect.share.value:.1%}", Text(str(effect.ratio), style=style)
                    )
                ),
                *(("", "") if move is None else (_number(move.error), _number(move.affine))),
            )  # fmt: skip
        notes = [*self.failed, *self.notes]
        if notes:
            table.caption = Text("\n".join(notes))
        return table

    @property
    def series(self) -> dict[str, dict[str, Estimate]]:
        """The curves of the plot: name -> part -> distance from the outputs of the first network."""
        a, b = ("the first", "the second") if self.a == self.b else (self.a, self.b)
        names = (template.format(a=a, b=b) for template in (BASE_FIRST, OTHER_FIRST))
        return {name: {part: pair[i] for part, pair in self.curves.items()} for i, name in enumerate(names)}

    def named(self, a: str, b: str) -> Difference:
        """Return the result with new names for the networks, for tables, plots and pages.

        Args:
            a: Name of the first network.
            b: Name of the second network.

        Returns:
            The result.
        """
        return replace(self, a=a, b=b)

    def plot(self) -> Figure:
        """Plot the outputs of hybrids, with the first parts from one network and the rest from the second.

        Returns:
            The matplotlib figure.

        Raises:
            ValueError: If the result does not contain hybrids, because ``diff`` ran without data.
        """
        from hf_stitch.plots import curves

        if not self.curves:
            raise ValueError("plot requires the outputs of hybrids: pass data to diff")
        numbered = {
            name: {
                float(i): (estimate.value, estimate.low, estimate.high) for i, estimate in enumerate(points.values())
            }
            for name, points in self.series.items()
        }
        assert self.outputs is not None
        figure = curves(numbered, axis="part, in order", label=f"{self.outputs.measure} from the first network")
        axes = figure.axes[0]
        axes.set_xticks(range(len(self.curves)), list(self.curves), rotation=90)
        return figure


def _percent(share: Estimate) -> str:
    """Return a share with its interval in per cent."""
    if math.isnan(share.low):
        return f"{share.value:.0%}"
    return f"{share.value:.0%} [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2g}"
