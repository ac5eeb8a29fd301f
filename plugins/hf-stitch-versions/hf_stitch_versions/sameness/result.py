"""Result of :func:`same`: whether two networks are the same, and where they first differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

FINDINGS = 8
"""Maximum number of findings."""

REPAIRED = "; with all of them repaired, the networks are the same"
"""Suffix of the verdict if several findings explain all differences."""

UNEQUAL = "with a different shape, or NaN or infinite in one network only"
"""Text of an infinite difference."""

AS_THEY_ARE = "as they are"
"""Name of the curve of all differences."""

LEAST = 1e-3
"""Lower end of plots, in units of the null: a logarithmic scale excludes zero."""

FEW = 3
"""Maximum number of settings in the verdict."""

BEFORE, BEHIND = 3, 8
"""Number of modules before and from the first difference in a table as text."""

PROOF = {
    True: "; replacing its output by the output of the first network restores the network's outputs",
    False: "",
    None: "; the network's outputs do not show it",
}
"""Effect of replacing the output of a module by the output in the first network."""


@dataclass(frozen=True)
class Module:
    """Difference of one call of a module.

    Attributes:
        name: Name in the first network; empty for the whole network.
        other: Name in the second network.
        call: Number of the call in one forward pass, from 0.
        kind: Class of the module in the first network.
        difference: Root mean square of the difference of the outputs, relative to the first network's output.
        null: Effect of rounding alone on this output, in the same unit.
        repaired: The difference if the modules of all findings return their outputs from the first network.
    """

    name: str
    other: str
    call: int
    kind: str
    difference: float
    null: float
    repaired: float

    @property
    def ratio(self) -> float:
        """The difference in units of the null."""
        return self.difference / self.null


@dataclass(frozen=True)
class Finding:
    """Module with different outputs for the same input.

    Attributes:
        module: Its name in the first network; empty for the network's own code, between its modules.
        other: Its name in the second network.
        kind: Its class in the first network.
        seen_at: The first output that differs: of the module, or of a submodule with an input made by the module.
        ratio: Difference of that output, in units of the null.
        compared: Quantities known in both networks: ``weights``, ``input``.
        weights: Weights that differ, in words.
        settings: Attributes or classes that differ, in words.
        masks: Share of positions at which a mask made by the module differs; 0 without differences or masks.
        restored: Whether the outputs of the networks agree if the modules of this and all earlier findings return their
            outputs from the first network; ``None`` if they agree anyway.
        places: Names of all modules that differ in the same way, this one included; empty if it is the only one.
    """

    module: str
    other: str
    kind: str
    seen_at: str
    ratio: float
    compared: Sequence[str]
    weights: Sequence[str]
    settings: Sequence[str]
    masks: float
    restored: bool | None
    places: Sequence[str] = ()

    @property
    def cause(self) -> str:
        """The difference in words."""
        if self.weights:
            more = f" and {len(self.weights) - 1} more" * (len(self.weights) > 1)
            prefix = "its input is equal, its weights differ" if "input" in self.compared else "its weights differ"
            return f"{prefix}: {self.weights[0]}{more}"
        equal = (
            " and ".join(f"its {name}" for name in self.compared)
            + f" {'are' if 'weights' in self.compared else 'is'} equal"
        )
        if self.masks:
            return f"{equal}; the mask that it makes differs at {self.masks:.0%} of positions"
        if len(self.compared) == 2:
            equal += ", so it is the operation"
        elif self.compared:
            equal += f"; its {'weights are' if 'input' in self.compared else 'input is'} not known"
        else:
            equal = "the second network shows neither its weights nor its input"
        return f"{equal}: {'; '.join(self.settings)}" if self.settings else equal

    def __str__(self) -> str:
        """Return the finding as a sentence."""
        where = f"`{self.module}` ({self.kind})" if self.module else "the network's own code"
        where += f" and {len(self.places) - 1} more that differ in the same way" * bool(self.places)
        inside = f", first seen at `{self.seen_at}`" if self.seen_at != self.module else ""
        far = f"{self.ratio:,.1f} times the null" if math.isfinite(self.ratio) else UNEQUAL
        proof = PROOF[self.restored]
        return f"{where}{inside}, {far}: {self.cause}{proof}"


@dataclass(frozen=True)
class Cause:
    """Change of the first network with which it equals the second.

    Attributes:
        kind: Kind of the fault of the second network, such as ``"RoPE base"``.
        text: The change, such as ``"with rope_theta 10000 instead of 500000"``.
        module: The first module of the first network that the change affects; empty if it is not known.
    """

    kind: str
    text: str
    module: str = ""

    def __str__(self) -> str:
        """Return the kind and the change."""
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Sameness(Result):
    """Result of :func:`same`: whether two networks are the same, and where they first differ.

    Attributes:
        a: Name of the first network.
        b: Name of the second network.
        tolerance: Multiple of the null above which outputs differ.
        reference: dtype of the first network as the reference.
        null: dtype that defines the null.
        n: Number of samples.
        data: Fingerprint of the samples; ``None`` for random inputs.
        inputs: Differences between the two networks' own inputs for the same samples, in words. The second network then
            ran on the inputs of the first.
        settings: Settings that differ, in words.
        findings: Modules that differ, in order of execution.
        complete: Whether the findings explain all differences, because the outputs agree after repairing them, or the
            causes do.
        modules: All compared calls, in order of completion.
        missing: Modules of the first network without a partner in the second.
        extra: Modules of the second network without a partner in the first.
        inside: Modules that differ inside a module with equal outputs, in networks with equal outputs: layers were
            fused or split, or the difference does not have an effect.
        by_names: Whether modules were paired by names; else by values and weights, in order.
        bound: Limits of the comparison, in words: random inputs may be shorter than a length that the networks name,
            and outputs may not be finite. Empty without limits.
        quantized: Which network is quantized, and the share of quantized weights; empty if both are quantized alike or
            neither is. In the file of a quantized network all modules differ, so findings are not searched.
        causes: Changes of the first network that move the first difference to a later module, one after the other.
        explained: Whether the networks are the same with all these changes; else they are closer.
        runtime: Name and version of the runtime of the second network; empty for torch.
        unseen: What this runtime does not show, and how it ran, in sentences.

    Example:
        >>> row = Module("", "", 0, "ViT", 2e-8, 1e-7, 2e-8)
        >>> none: tuple[str, ...] = ()
        >>> sameness = Sameness(
        ...     "a", "b", 4.0, "float64", "float32", 8, "sha256:0", none, none, (), True, (row,), none, none, none, True
        ... )
        >>> print(sameness.verdict)
        The networks are the same: no output differs by more than 0.2 times its null (float32 rounding), on 8 samples.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict", "is_same")
    page: ClassVar[str] = "hf_stitch_versions.sameness.page:section"

    a: str
    b: str
    tolerance: float
    reference: str
    null: str
    n: int
    data: str | None
    inputs: Sequence[str]
    settings: Sequence[str]
    findings: Sequence[Finding]
    complete: bool
    modules: Sequence[Module]
    missing: Sequence[str]
    extra: Sequence[str]
    inside: Sequence[str]
    by_names: bool
    bound: str = ""
    quantized: str = ""
    causes: Sequence[Cause] = ()
    explained: bool = False
    runtime: str = ""
    unseen: Sequence[str] = ()

    @property
    def is_same(self) -> bool:
        """Whether neither the inputs nor the outputs of any module differ."""
        return not self.inputs and not self.findings and self.complete

    @property
    def agreed(self) -> str:
        """Name of the last compared module before the outputs that agrees; empty without one."""
        return next((row.name for row in reversed(self.modules) if row.name and row.ratio <= self.tolerance), "")

    @property
    def verdict(self) -> str:
        """Summary in one or two sentences."""
        most = max((row.ratio for row in self.modules if row.name not in self.inside), default=0.0)
        samples = f"on {self.n} {'random ' if self.data is None else ''}samples"
        samples += f", in {self.runtime}" * bool(self.runtime)
        if self.is_same:
            far = f"differs by more than {most:.2g} times its null ({self.null} rounding)" if most else "differs"
            subject = "The networks are" if any(not row.name for row in self.modules) else "The common modules are"
            aside = f" Settings differ: {'; '.join(self.settings[:FEW])}." if self.settings else ""
            bound = f" This holds for {self.bound}." if self.bound else ""
            return f"{subject} the same: no output {far}, {samples}.{bound}{aside}"
        sentences = [f"The inputs differ: {self.inputs[0]}."] if self.inputs else []
        if self.quantized:
            end = self.modules[-1]
            sentences.append(
                f"{self.quantized}. The outputs differ by {end.difference:.2g} of their norm, {end.ratio:,.1f} times "
                "the null."
            )
        if self.findings:
            more = len(self.findings) - 1
            sentences.append(f"First difference: {self.findings[0]}.")
            sentences += (
                [f"{more} more difference{'s' * (more > 1)} after it{REPAIRED * self.complete}."] if more else []
            )
        if self.causes:
            texts = " and ".join(cause.text for cause in self.causes)
            kinds = ", ".join(dict.fromkeys(cause.kind for cause in self.causes))
            kind, closer = ("Cause", "is the same as") if self.explained else ("Likely cause", "is closer to")
            sentences.append(f"{kind} ({kinds}): {texts}, the first network {closer} the second.")
        first = next((cause.module for cause in self.causes if cause.module), "")
        if first and self.findings and first not in (self.findings[0].module, self.findings[0].seen_at):
            sentences.append(f"The change begins at `{first}`.")
        elif self.agreed and self.findings and not first and not self.findings[0].seen_at:
            sentences.append(f"The last module that agrees is `{self.agreed}`.")
        if not self.findings and self.complete:
            sentences.append("On the same inputs, the networks are the same.")
        if not self.complete:
            stopped = f"The search stopped after {FINDINGS} findings; the networks still differ."
            missed = stopped if len(self.findings) >= FINDINGS else "Further differences were not located."
            untold = self.quantized and not self.findings
            sentences.append("The outputs have different sizes." if "" in self.missing else missed * (not untold))
        return " ".join(filter(None, sentences))

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per call of a module, in order of completion.

        Returns:
            The columns ``module``, ``other``, ``call``, ``kind``, ``difference``, ``null``, ``ratio`` and ``repaired``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {
                    "module": row.name, "other": row.other, "call": row.call, "kind": row.kind,
                    "difference": row.difference, "null": row.null, "ratio": row.ratio, "repaired": row.repaired,
                }
                for row in self.modules
            ]
        )  # fmt: skip

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: the verdict, the findings, and modules around the differences."""
        from rich.table import Table
        from rich.text import Text

        notes = [f"settings: {'; '.join(self.settings)}"] * bool(self.settings)
        notes += [str(finding) for finding in self.findings[1:]]
        notes += [f"{self.runtime}: {'; '.join(self.unseen)}"] * bool(self.unseen)
        listed = {"differ inside equal modules": self.inside}
        listed |= {"only in the first": self.missing, "only in the second": self.extra}
        for label, names in listed.items():
            notes += [f"{label}: {', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}"] * bool(
                names
            )
        table = Table("module", "in the second", "difference", "null", "ratio", title=Text(self.verdict))
        table.caption = Text("\n".join(notes)) if notes else None
        for row in self.shown:
            ratio = Text(f"{row.ratio:.3g}", style="bold red" if row.ratio > self.tolerance else "")
            name_b = "" if row.other == row.name else row.other
            table.add_row(Text(row.name or "(output)"), Text(name_b), f"{row.difference:.2g}", f"{row.null:.2g}", ratio)
        return table

    @property
    def shown(self) -> Sequence[Module]:
        """The modules in a table as text: around the first difference, or with the largest ratio, and the output."""
        far = [place for place, row in enumerate(self.modules) if row.ratio > self.tolerance]
        if not far:
            return sorted(self.modules[:-1], key=lambda row: row.ratio)[-1:] + list(self.modules[-1:])
        end = len(self.modules) - 1
        return [*self.modules[max(0, far[0] - BEFORE) : min(far[0] + BEHIND, end)], self.modules[end]]

    def plot(self) -> Figure:
        """Plot the difference of every module in units of the null, in order of completion.

        Returns:
            The matplotlib figure, with a logarithmic scale.
        """
        from hf_stitch.plots import curves

        figure = curves(self.series, axis="module, in order", label="difference over null")
        figure.axes[0].set_yscale("log")
        figure.axes[0].axhline(self.tolerance, color="grey", linestyle="--", linewidth=1)
        return figure

    @property
    def series(self) -> dict[str, dict[float, tuple[float, float, float]]]:
        """The curves of the plot: name -> number of the module -> value, low and high."""
        ratios = {AS_THEY_ARE: {i: row.ratio for i, row in enumerate(self.modules)}}
        if self.findings:
            ratios["with the findings repaired"] = {i: row.repaired / row.null for i, row in enumerate(self.modules)}
        return {
            name: {float(i): (max(v, LEAST),) * 3 for i, v in points.items() if math.isfinite(v)}
            for name, points in ratios.items()
        }
