"""The answer: what changed between two versions of a network."""

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
"""A part is a finding if its effect is, with confidence, more than this multiple of that of noise of the same norm."""

ELSEWHERE = 0.05
"""Share of the change that must be in no part before it is told."""

ADDITIVE = 0.25
"""Effects of single parts add up if their sum differs from the whole by less than this share."""

FEW = 3
"""Most names that are told: of modules that are tied to a part, and of parts that cannot be exchanged."""

BASE_FIRST, OTHER_FIRST = "{a} up to here, then {b}", "{b} up to here, then {a}"
"""Names of the curves of hybrids."""


@dataclass(frozen=True)
class Estimate(Score):
    """A value of any size with its interval over samples, of the confidence of the result; NaN ends if there is none.

    Example:
        >>> print(Estimate(0.000123, 0.000101, 0.00015))
        0.000123 [0.000101, 0.00015]
    """

    def __str__(self) -> str:
        """Return the value and its interval, with three digits."""
        if math.isnan(self.low):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Effect:
    """What a part does to the outputs, as distances from those of the first network.

    Attributes:
        patch: When the part of the second network stands in the first.
        weights: The same with its weights only: other than ``patch`` if it also rounds what it reads, as dynamic int8.
        revert: What is left when the part of the first network stands in the second.
        noise: When noise with the norms of the changes is added to the weights of the part; mean over draws.
        share: ``patch`` over the distance of the two networks.
        ratio: ``weights`` over ``noise``; its interval holds for all parts at once.
        local: Squared difference of the outputs of the part on the inputs of the first network, over their squares.
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
    """What changed in a part.

    Attributes:
        name: Its name in the first network.
        other: Its name in the second network.
        block: Whether it is a block.
        weights: How its weights differ.
        effect: What it does to the outputs; ``None`` without data, and for parts that cannot be exchanged.
        move: How far the activations behind it have moved; ``None`` without data, or behind what is no block.
        tied: Names in the first network of the modules elsewhere that share its weights, in both networks.
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
        """The name, with those of the modules that are tied to it."""
        more = f" and {len(self.tied) - FEW} more" * (len(self.tied) > FEW)
        return f"{self.name} (tied to {', '.join(self.tied[:FEW])}{more})" if self.tied else self.name


@dataclass(frozen=True)
class Outputs:
    """How the outputs of two networks differ.

    Attributes:
        measure: ``KL``, or ``squared difference`` of networks without classes.
        what: The same in words.
        forth: Mean distance of the second network from the first: the expectation is the first one's.
        back: Mean distance the other way round.
        quantiles: Quantile -> distance of single samples.
        worst: Samples that differ most, with their distances.
        agreement: Share of equal predictions, of all tokens that each network has; ``None`` without classes.
        scores: Name -> values of the first and the second network, and of their difference: accuracy, cross-entropy,
            confidence (of texts means of the means over their tokens), calibration error; as far as labels are known.
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
    """What changed between two versions of a network, returned by :func:`diff`.

    Attributes:
        a: The first network.
        b: The second network.
        n: Number of samples; 0 without data.
        data: Fingerprint of the samples; ``None`` without data.
        weights: How all weights differ.
        outputs: How the outputs differ; ``None`` without data.
        parts: What changed in each part, in their order in the first network.
        rest: What is left of the distance when all parts of the second network stand in the first: what other code
            does, or weights that cannot be exchanged; ``None`` without data.
        curves: Name of a part -> distances from the outputs of the first network when the parts up to this one are of
            the first network and the rest of the second, and the other way round.
        lineage: Whether the second network is derived from the first.
        missing: Weights that only the first network has.
        extra: Weights that only the second network has.
        reshaped: Weights whose shapes differ.
        confidence: Confidence of intervals.
        forwards: Forwards of a whole network per batch, about.
        failed: What is above the bounds that were given, or could not be compared whole, in words.
        notes: What was left out, and why.
        inputs: How the inputs differ that the second network would make of the samples; it read those of the first.
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
        """The parts that change the outputs more than noise of the same size, that with the largest effect first."""
        found = [part for part in self.parts if part.effect is not None and part.effect.causal]
        return sorted(found, key=lambda part: -part.effect.patch.value if part.effect else 0.0)

    @property
    def verdict(self) -> str:
        """The answer in a few sentences."""
        told = self.lineage.verdict != "derived" and self.lineage.blocks  # what is expected of versions is not told
        kin = self.lineage.sentence if told else ""
        return " ".join(filter(None, [self._cause(), self._elsewhere(), self._sum(), self._size(), kin]))

    def _cause(self) -> str:
        """Tell which part carries the change."""
        if self.outputs is None:
            most = max(self.parts, key=lambda part: part.weights.change)
            if self.weights.change == self.weights.alone:
                alone = [*(each.partition(" (")[0] for each in self.reshaped), *self.missing, *self.extra]
                if not alone:
                    return "All weights are equal."
                more = f" and {len(alone) - 1} more have" if len(alone) > 1 else " has"
                return f"What both networks have is equal, but {alone[0]}{more} no partner of the same shape."
            changed = sum(part.weights.change > 0 for part in self.parts)
            return (
                f"{changed} of {len(self.parts)} parts have other weights, most {most.label} "
                f"({most.weights.change:.2g} of their norm). What this does to outputs is not known without data."
            )
        if not self.outputs.forth.value:
            return f"The outputs are equal on {self.n} samples."
        known = [part for part in self.parts if part.effect is not None]
        if not known:
            return "The outputs differ, and no part can be exchanged."
        if math.isinf(self.outputs.forth.value):
            return "The outputs are infinitely far apart: the second network excludes what the first does not."
        if math.isnan(self.outputs.forth.low):
            most = max(known, key=lambda part: part.effect.patch.value if part.effect else 0.0)
            assert most.effect is not None
            carried = _percent(most.effect.share)
            return f"{most.label} alone carries {carried} of the change; too few samples to be sure."
        if not self.causes and self._outside > 0.5:
            return ""
        if not self.causes:
            most = max(known, key=lambda part: part.effect.ratio.value if part.effect else 0.0)
            assert most.effect is not None
            return (
                f"No part changes the outputs more than noise of the same size does, as in roundings; the most, "
                f"{most.label}, does {most.effect.ratio} times as much."
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
        """Tell how much of the change is in no part."""
        if self.rest is None or self.outputs is None or not self._outside:
            return ""
        kept = [part.label for part in self.parts if part.effect is None and part.weights.change]
        names = f" ({', '.join(kept[:FEW])}{f' and {len(kept) - FEW} more' * (len(kept) > FEW)})" * bool(kept)
        return (
            f"{self._outside:.0%} of the change is in no part: in other code, or in weights that cannot be "
            f"exchanged{names}."
        )

    @property
    def _outside(self) -> float:
        """Share of the change that is in no part; 0 if it is little."""
        if self.rest is None or self.outputs is None or not self.outputs.forth.value:
            return 0.0
        share = self.rest.value / self.outputs.forth.value
        return share if share > ELSEWHERE else 0.0

    def _sum(self) -> str:
        """Tell whether effects of parts add up."""
        effects = [part.effect for part in self.parts if part.effect is not None]
        if self.outputs is None or not self.outputs.forth.value or len(self.causes) < 2:
            return ""
        total = sum(effect.share.value for effect in effects)
        if abs(total - 1) < ADDITIVE:
            return ""
        return f"The change is not local: single parts together carry {total:.0%} of it."

    def _size(self) -> str:
        """Tell how far outputs and weights are apart."""
        weights = f"{self.weights.change:.2g} of the norm of the weights changed"
        if self.weights.alone:
            weights += f", {self.weights.alone:.2g} in what only one network has"
        if self.weights.format:
            how = "the first network, rounded" if self.weights.rounding else "numbers of this format"
            weights += f"; the second network's are {self.weights.format} ({how})"
        if self.outputs is None:
            return f"{weights[0].upper()}{weights[1:]}."
        same = (
            "" if self.outputs.agreement is None else f", {self.outputs.agreement.value:.1%} of predictions are equal"
        )
        return f"{self.outputs.measure} {self.outputs.forth}{same}, on {self.n} samples; {weights}."

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per part, with its weights, its effect and its move in columns."""
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
        """Return a table of the parts, under the answer."""
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
        names = (each.format(a=a, b=b) for each in (BASE_FIRST, OTHER_FIRST))
        return {name: {part: pair[i] for part, pair in self.curves.items()} for i, name in enumerate(names)}

    def named(self, a: str, b: str) -> Difference:
        """Return the same result with other names of the networks, for tables, plots and pages.

        Args:
            a: Name of the first network.
            b: Name of the second network.

        Returns:
            The result.
        """
        return replace(self, a=a, b=b)

    def plot(self) -> Figure:
        """Plot the outputs of hybrids, whose first parts are of one network and the others of the other.

        Returns:
            The matplotlib figure.

        Raises:
            ValueError: If there are no hybrids, because no data were given.
        """
        from hf_stitch.plots import curves

        if not self.curves:
            raise ValueError("there is nothing to plot: without data no hybrids were run. Pass data to diff")
        numbered = {
            name: {float(i): (each.value, each.low, each.high) for i, each in enumerate(points.values())}
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
