"""What one detector finds at the layers of a target, and what it must show there before its figures count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.detection.noise import DOSES
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

MIN_AUROC = 0.8
"""AUROC that a detector must reach on coloured noise of the largest of :data:`DOSES`."""

FAR = 0.9
"""AUROC that it must reach on far samples."""

OWN = 0.05
"""How far the AUROC of the test samples, against those to which it was fitted, may lie from .5."""

Array = NDArray[np.float64]


def failed(controls: dict[str, NDArray[np.float64]], min_auroc: float) -> str:
    """Return why a detector is no evidence at a layer; empty if it is.

    ``controls`` are AUROCs with their intervals, ``(3,)``, as far as measured: ``noise``, ``far`` and ``train``.
    One that is NaN fails. The last fails only if its whole interval lies outside, so that few samples do not fail by
    chance.
    """
    if not min_auroc:
        return ""
    for name, least, what in (
        ("noise", min_auroc, "noise as large as the activations"), ("far", FAR, "far samples"),
    ):  # fmt: skip
        if name in controls and not (value := controls[name][0]) >= least:
            if np.isnan(value):
                return f"could not be tried on {what}"
            return f"tells {what} apart with an AUROC of {value:.3f} only (at least {least:g} is needed)"
    value, low, high = controls.get("train", (0.5, 0.5, 0.5))
    if np.isnan(value):
        return "could not be tried on the samples to which it was fitted"
    if low > 0.5 + OWN or high < 0.5 - OWN:
        return f"tells test samples from those to which it was fitted (AUROC {value:.2f})"
    return ""


@dataclass(frozen=True, eq=False)
class Detection(Result):
    """What a detector finds at layers of a target: of stitched activations, of noise of known size, and its controls.

    AUROCs, doses and controls are of one side: either larger scores alone are strange, or unusually small ones, too.
    An AUROC whose interval is below .5 does not count as strange: its dose is 0. If the detector is two-sided, the
    scores are then closer to the middle than the target's own: stitched activations vary less, and none is unusual.

    Attributes:
        detector: Label of the detector.
        layers: Layers of the target.
        two_sided: Whether unusually small scores count as strange.
        figures: Matcher -> figure -> ``(layers of the source, layers, 3)``: the value and both ends of its 95%
            interval. ``auroc``: stitched activations against the target's own of the same samples; ``dose``: the
            relative residual of coloured noise that is as easy to tell, 0 if less than the smallest of :data:`DOSES`,
            infinity if more than the largest, NaN if the largest is not told apart; ``one_sided`` and
            ``two_sided``: AUROCs of both kinds; ``aupr``, the average precision; ``fpr95``, the share of the target's
            own activations above the threshold that finds 95% of the stitched ones. NaN where a stitch, or the detector
            there, is undefined, and where the detector is :attr:`blind`.
        doses: Kind of noise (:data:`KINDS`) -> ``(layers, doses, 3)``: AUROC of the target's own activations with noise
            of the relative residuals :data:`DOSES` against the same without noise. NaN where there is no such noise.
        controls: ``halves``: AUROC of one half of the test samples against the other, .5 up to chance; ``train``: of
            the test samples against those to which the detector was fitted; ``far``, if far samples were given: of
            these against the test samples. Each ``(layers, 3)``.
        undefined: What the detector could not be fitted for, or has no finite scores of -> why.
        histograms: Matcher -> ``edges``, ``(layers of the source, layers, bins + 1)``, of which the outer ones are
            infinite, and the numbers of scores in each bin of ``stitched`` activations and of the target's ``own``,
            ``(layers of the source, layers, bins)``. NaN where ``figures`` are.
        min_auroc: AUROC of coloured noise as large as the activations from which the detector counts at a layer; 0: it
            counts at all.

    Example:
        >>> half = np.full((1, 3), 0.5)
        >>> detection = Detection("knn", ("bn1",), True, {}, {"coloured": np.full((1, 5, 3), 0.5)}, {"far": half})
        >>> detection.blind["bn1"]
        'tells noise as large as the activations apart with an AUROC of 0.500 only (at least 0.8 is needed)'
    """

    detector: str
    layers: tuple[str, ...]
    two_sided: bool
    figures: Mapping[str, Mapping[str, Array]]
    doses: Mapping[str, Array]
    controls: Mapping[str, Array]
    undefined: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    min_auroc: float = MIN_AUROC

    @property
    def blind(self) -> dict[str, str]:
        """Layers where the detector is no evidence, because it fails on what it must tell apart -> why.

        It must reach :attr:`min_auroc` on coloured noise of a relative residual of 1, and .9 on far samples, if there
        are any; and the AUROC of the test samples against those to which it was fitted must be .45 to .55.
        """
        shown = dict(self.controls)
        if "coloured" in self.doses:
            shown["noise"] = self.doses["coloured"][:, -1]
        reasons = {
            layer: failed({name: values[place] for name, values in shown.items()}, self.min_auroc)
            for place, layer in enumerate(self.layers)
        }
        for layer, failure in reasons.items():
            if failure and (why := self.undefined.get(f"{layer} with coloured noise {DOSES[-1]:g}")) is not None:
                reasons[layer] = f"is undefined: {why}"
        return {layer: why for layer, why in reasons.items() if why}

    @property
    def caution(self) -> str:
        """Where the detector is no evidence, with the reason at the first of these layers; empty if there is none."""
        blind = self.blind
        first = next(iter(blind.items()), ("", ""))
        reason = "it {1}" if len(blind) == 1 else "at {0}, it {1}"
        return f"{self.detector} is no evidence at {', '.join(blind)}: {reason.format(*first)}" if blind else ""

    def of(self, matcher: str, layer: str, name: str) -> Detection:
        """Return what the detector finds of one matcher at one layer."""
        place = [self.layers.index(layer)]
        mine = (f"{matcher}: ", f"{layer} ", f"{layer},")
        figures = {figure: values[:, place] for figure, values in self.figures[matcher].items()}
        return Detection(
            self.detector, (layer,), self.two_sided, {name: figures},
            {kind: values[place] for kind, values in self.doses.items()},
            {control: values[place] for control, values in self.controls.items()},
            {what: why for what, why in self.undefined.items() if what.startswith(mine)},
            {name: {part: values[:, place] for part, values in self.histograms.get(matcher, {}).items()}},
            self.min_auroc,
        )  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return the controls and the AUROCs of noise in long format.

        Returns one row per layer and measure, with the columns ``detector``, ``layer``, ``measure`` (``halves``,
        ``train``, ``far``, ``coloured 0.01``, …), ``value``, ``low``, ``high`` and ``blind``: whether the detector is
        no evidence at this layer.
        """
        import pandas

        measured = {
            **self.controls,
            **{f"{kind} {dose:g}": of[:, i] for kind, of in self.doses.items() for i, dose in enumerate(DOSES)},
        }
        return pandas.DataFrame(
            [
                {"detector": self.detector, "layer": layer, "measure": name,
                 **dict(zip(("value", "low", "high"), map(float, row), strict=True)), "blind": layer in self.blind}
                for name, values in measured.items()
                for layer, row in zip(self.layers, values, strict=True)
            ]
        )  # fmt: skip

    def plot(self, kind: str = "coloured") -> Figure:
        """Plot the AUROC of each layer over the dose of noise.

        Args:
            kind: Kind of noise, one of :attr:`doses`.
        """
        from hf_stitch.plots import curves

        if kind not in self.doses:
            raise KeyError(f"there is no noise {kind!r}; there is {', '.join(self.doses)}")
        lines = {
            layer: {dose: (float(v), float(low), float(high)) for dose, (v, low, high) in zip(DOSES, rows, strict=True)}
            for layer, rows in zip(self.layers, self.doses[kind], strict=True)
            if not np.isnan(rows).any()
        }
        figure = curves(lines, axis=f"relative residual of {kind} noise", label=f"AUROC, {self.detector}")
        figure.axes[0].set_xscale("log")
        return figure

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: controls and coloured noise, by layer."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "layer", *self.controls, *(f"noise {dose:g}" for dose in DOSES),
            title=f"AUROC, {self.detector}, {'two' if self.two_sided else 'one'}-sided", title_justify="left",
        )  # fmt: skip
        for place, layer in enumerate(self.layers):
            controls = (str(Score(*map(float, values[place]))) for values in self.controls.values())
            noise = (f"{value:.3f}" for value in self.doses["coloured"][place, :, 0])
            table.add_row(Text(layer), *map(Text, controls), *noise)
        table.caption = self.caution or None
        return table
