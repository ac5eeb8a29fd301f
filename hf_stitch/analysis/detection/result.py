"""Results of one detector at the layers of a target, and the controls that it must pass."""

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
"""AUROC that a detector must reach on far samples."""

OWN = 0.05
"""Largest distance from .5 of the AUROC of the test samples against the samples of the fit."""

Array = NDArray[np.float64]


def failed(controls: dict[str, NDArray[np.float64]], min_auroc: float) -> str:
    """Return why a detector is not evidence at a layer; empty if it is evidence.

    ``controls`` contains the measured AUROCs among ``noise``, ``far`` and ``train``, with intervals, ``(3,)``. NaN
    fails. ``train`` fails only if its whole interval lies outside the bounds, so that few samples do not fail by
    chance.
    """
    if not min_auroc:
        return ""
    for name, least, samples in (
        ("noise", min_auroc, "noise as large as the activations"), ("far", FAR, "far samples"),
    ):  # fmt: skip
        if name in controls and not (value := controls[name][0]) >= least:
            if np.isnan(value):
                return f"could not be tested on {samples}"
            return f"distinguishes {samples} with an AUROC of only {value:.3f} (at least {least:g} is required)"
    value, low, high = controls.get("train", (0.5, 0.5, 0.5))
    if np.isnan(value):
        return "could not be tested on the samples that it was fitted to"
    if low > 0.5 + OWN or high < 0.5 - OWN:
        return f"distinguishes test samples from the samples that it was fitted to (AUROC {value:.2f})"
    return ""


@dataclass(frozen=True, eq=False)
class Detection(Result):
    """Results of a detector at layers of a target: for stitched activations, noise of known size, and controls.

    AUROCs, doses and controls are either one-sided (larger scores are strange) or two-sided (unusually small scores are
    strange, too). An AUROC with an interval below .5 does not count as strange: its dose is 0. For a two-sided
    detector, the scores are then closer to the middle than the target's own: stitched activations vary less.

    Attributes:
        detector: Label of the detector.
        layers: Layers of the target.
        two_sided: Whether unusually small scores count as strange.
        figures: Matcher -> figure -> ``(layers of the source, layers, 3)``: the value and both ends of its 95%
            interval. ``auroc``: stitched activations against the target's own activations of the same samples;
            ``dose``: the relative residual of coloured noise that is as easy to distinguish, 0 below the smallest of
            :data:`DOSES`, infinity above the largest, NaN if the largest is not distinguished; ``one_sided`` and
            ``two_sided``: AUROCs of both kinds; ``aupr``: the average precision; ``fpr95``: the share of the target's
            own activations above the threshold that finds 95% of the stitched ones. NaN where a stitch or its detector
            is undefined, and where the detector is :attr:`blind`.
        doses: Kind of noise (:data:`KINDS`) -> ``(layers, doses, 3)``: AUROC of the target's own activations with noise
            of the relative residuals :data:`DOSES` against the same activations without noise. NaN without such noise.
        controls: ``halves``: AUROC of one half of the test samples against the second half, .5 up to chance; ``train``:
            of the test samples against the samples of the fit; ``far``, if far samples were passed: of far samples
            against the test samples. Each ``(layers, 3)``.
        undefined: Activations without a fitted detector or finite scores -> reason.
        histograms: Matcher -> ``edges``, ``(layers of the source, layers, bins + 1)``, with infinite outer edges, and
            the numbers of scores in each bin of ``stitched`` activations and of the target's ``own``,
            ``(layers of the source, layers, bins)``. NaN where ``figures`` are.
        min_auroc: Smallest AUROC on coloured noise as large as the activations for a detector that counts; 0: it always
            counts.

    Example:
        >>> half = np.full((1, 3), 0.5)
        >>> detection = Detection("knn", ("bn1",), True, {}, {"coloured": np.full((1, 5, 3), 0.5)}, {"far": half})
        >>> detection.blind["bn1"]
        'distinguishes noise as large as the activations with an AUROC of only 0.500 (at least 0.8 is required)'
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
        """Layers where the detector is not evidence, because it fails a control -> reason.

        It must reach :attr:`min_auroc` on coloured noise of a relative residual of 1, and .9 on any far samples; and
        the AUROC of the test samples against the samples of the fit must be .45 to .55.
        """
        controls = dict(self.controls)
        if "coloured" in self.doses:
            controls["noise"] = self.doses["coloured"][:, -1]
        reasons = {
            layer: failed({name: values[index] for name, values in controls.items()}, self.min_auroc)
            for index, layer in enumerate(self.layers)
        }
        for layer, failure in reasons.items():
            if failure and (reason := self.undefined.get(f"{layer} with coloured noise {DOSES[-1]:g}")) is not None:
                reasons[layer] = f"is undefined: {reason}"
        return {layer: reason for layer, reason in reasons.items() if reason}

    @property
    def caution(self) -> str:
        """Sentence about the layers where the detector is not evidence, with the first reason; may be empty."""
        blind = self.blind
        first = next(iter(blind.items()), ("", ""))
        reason = "it {1}" if len(blind) == 1 else "at {0}, it {1}"
        return f"{self.detector} is not evidence at {', '.join(blind)}: {reason.format(*first)}" if blind else ""

    def of(self, matcher: str, layer: str, name: str) -> Detection:
        """Return the results for one matcher at one layer."""
        index = [self.layers.index(layer)]
        prefixes = (f"{matcher}: ", f"{layer} ", f"{layer},")
        figures = {figure: values[:, index] for figure, values in self.figures[matcher].items()}
        return Detection(
            self.detector, (layer,), self.two_sided, {name: figures},
            {kind: values[index] for kind, values in self.doses.items()},
            {control: values[index] for control, values in self.controls.items()},
            {description: reason for description, reason in self.undefined.items() if description.startswith(prefixes)},
            {name: {part: values[:, index] for part, values in self.histograms.get(matcher, {}).items()}},
            self.min_auroc,
        )  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return the controls and the AUROCs of noise in long format.

        Returns one row per layer and measure, with the columns ``detector``, ``layer``, ``measure`` (``halves``,
        ``train``, ``far``, ``coloured 0.01``, …), ``value``, ``low``, ``high`` and ``blind``: whether the detector is
        not evidence at this layer.
        """
        import pandas

        measured = {
            **self.controls,
            **{f"{kind} {dose:g}": rows[:, i] for kind, rows in self.doses.items() for i, dose in enumerate(DOSES)},
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
            raise KeyError(f"kind must be one of {', '.join(self.doses)}, got {kind!r}")
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
        for index, layer in enumerate(self.layers):
            controls = (str(Score(*map(float, values[index]))) for values in self.controls.values())
            noise = (f"{value:.3f}" for value in self.doses["coloured"][index, :, 0])
            table.add_row(Text(layer), *map(Text, controls), *noise)
        table.caption = self.caution or None
        return table
