"""Are two stitches of one place ends of a line of stitches that do as well?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_stitch.analysis.scoring import Score, as_score, relative_accuracies
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.results import Result
from hf_stitch.stitches import LinearStitch, Stitch, StitchingLayer, as_linear

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

WEIGHTS = tuple(i / 10 for i in range(11))
Pair = tuple[str, str]


@dataclass(frozen=True)
class ModeConnectivity(Result):
    """What :func:`mode_connectivity` found.

    Attributes:
        min_relative_accuracy: Relative accuracy that a stitch needs to be an end.
        n: Number of held-out samples.
        data: Fingerprint of these.
        left_out: Name -> relative accuracy of the stitches below the threshold.
        paths: (first, second) -> λ -> relative accuracy of λ·first + (1 − λ)·second.
        barriers: (first, second) -> the greatest fall below the line between the ends' relative accuracies,
            ``max λ·acc(first) + (1 − λ)·acc(second) − acc(λ)`` over the λ evaluated (Entezari et al. 2022, definition
            2.1, of accuracy instead of loss): 0 where the line is nowhere worse. A maximum over noise: an interval
            that begins at 0.01 on a thousand samples is no sign of a barrier.
    """

    min_relative_accuracy: float
    n: int
    data: str
    left_out: Mapping[str, Score]
    paths: Mapping[Pair, Mapping[float, Score]]
    barriers: Mapping[Pair, Score]

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each pair and λ: ``first``, ``second``, ``weight``, ``value``, ``low``, ``high``."""
        import pandas

        return pandas.DataFrame(
            [
                {"first": first, "second": second, "weight": weight, **asdict(score)}
                for (first, second), path in self.paths.items()
                for weight, score in path.items()
            ]
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each pair."""
        from rich.table import Table
        from rich.text import Text

        left_out = ", ".join(f"{name} ({score.value:.3f})" for name, score in self.left_out.items())
        table = Table(
            "first", "second", "ends", "least on the path", "barrier",
            title=f"linear mode connectivity, {self.n} held-out samples, 95% intervals over samples",
            caption=f"left out, below {self.min_relative_accuracy:g}: {left_out or 'none'}",
        )  # fmt: skip
        for (first, second), path in self.paths.items():
            least = min(path.values(), key=lambda score: score.value)
            ends = f"{path[1.0].value:.3f}, {path[0.0].value:.3f}"
            barrier = Text(str(self.barriers[first, second]))
            table.add_row(Text(first), Text(second), ends, Text(str(least)), barrier)
        return table

    def plot(self) -> Figure:
        """The relative accuracy along each path."""
        from hf_stitch.plots import curves

        series = {
            f"{first} – {second}": {weight: (s.value, s.low, s.high) for weight, s in path.items()}
            for (first, second), path in self.paths.items()
        }
        return curves(series, axis="λ", label="relative accuracy")


def interpolate(first: StitchingLayer, second: StitchingLayer, weight: float) -> StitchingLayer:
    """``weight · first + (1 − weight) · second``, of all maps, weights and biases (Csiszárik et al. 2021, section 8).

    Affine maps of any kind, low-rank ones for instance, are combined as maps, not as factors.

    Args:
        first: What weight 1 gives.
        second: What weight 0 gives.
        weight: λ; beyond [0, 1] it extrapolates.

    Raises:
        ValueError: If the stitches are of different places, or a map is not affine.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> ends = [StitchingLayer(RepresentationSpec("bd", 2), RepresentationSpec("bd", 2), "none", LinearStitch(2, 2)) for _ in range(2)]
        >>> bool((interpolate(*ends, 1.0).body.weight == ends[0].body.weight).all())
        True
    """
    for what in ("source", "target", "pooling"):
        if getattr(first, what) != getattr(second, what):
            raise ValueError(
                f"only stitches of one place can be interpolated: their {what} is {getattr(first, what)} and "
                f"{getattr(second, what)}"
            )
    prefix = None
    if first.prefix is not None and second.prefix is not None:
        prefix = _interpolated(first.prefix, second.prefix, weight)
    return first.with_maps(_interpolated(first.body, second.body, weight), prefix)


def _interpolated(first: Stitch, second: Stitch, weight: float) -> LinearStitch:
    one, two = as_linear(first), as_linear(second)
    bias = None
    if one.bias is not None or two.bias is not None:
        zero = one.weight.new_zeros(len(one.weight))
        biases = (zero if stitch.bias is None else stitch.bias for stitch in (one, two))
        bias = weight * next(biases) + (1 - weight) * next(biases)
    return LinearStitch.of(weight=weight * one.weight + (1 - weight) * two.weight, bias=bias)


def mode_connectivity(
    stitched: StitchedModel,
    stitches: Mapping[str, StitchingLayer],
    data: Any,
    *,
    weights: Sequence[float] = WEIGHTS,
    min_relative_accuracy: float = 0.8,
    target: Any = None,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> ModeConnectivity:
    """The relative accuracy along the straight line between each two stitches (Csiszárik et al. 2021, section 8).

    Only stitches that do well by themselves are joined: between others nothing is to be expected.

    Args:
        stitched: A stitched model of the place, with a head that classifies; only its halves are used.
        stitches: Name -> stitching layer of the place, of affine maps.
        data: Held-out raw samples with labels.
        weights: The λ in [0, 1] at which the line is evaluated; the ends, 0 and 1, always are.
        min_relative_accuracy: Relative accuracy that a stitch needs to be an end; the default is the paper's.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Of the bootstrap over samples.
        resamples: Number of bootstrap resamples.
        progress: Show progress bars.

    Raises:
        ValueError: If a weight is not in [0, 1], a layer is of another place or not affine, the samples have no labels,
            or fewer than two stitches reach the threshold.
    """
    if wrong := [weight for weight in weights if not 0 <= weight <= 1]:
        raise ValueError(f"weights must be in [0, 1], got {wrong[0]}")
    for layer in stitches.values():
        for part in layer.parts:
            as_linear(getattr(layer, part))
    samples = Samples.of(data)
    options: dict[str, Any] = {
        "target": target, "batch_size": batch_size, "seed": seed, "resamples": resamples, "progress": progress
    }  # fmt: skip
    alone = relative_accuracies(stitched, stitches, samples, **options)
    ends = [name for name in stitches if alone[name][0] >= min_relative_accuracy]
    if len(ends) < 2:
        figures = ", ".join(f"{name} {drawn[0]:.3f}" for name, drawn in alone.items())
        raise ValueError(
            f"fewer than two stitches reach a relative accuracy of {min_relative_accuracy:g}: {figures or 'none given'}"
        )
    between = sorted({float(weight) for weight in weights} - {0.0, 1.0})
    places = {(a, b, w): f"{w:g} {a} + {1 - w:g} {b}" for a, b in combinations(ends, 2) for w in between}
    lines = {name: interpolate(stitches[a], stitches[b], w) for (a, b, w), name in places.items()}
    inner = relative_accuracies(stitched, lines, samples, **options) if lines else {}
    paths, barriers = {}, {}
    for a, b in combinations(ends, 2):
        drawn = {0.0: alone[b], **{w: inner[places[a, b, w]] for w in between}, 1.0: alone[a]}
        falls = np.stack([w * alone[a] + (1 - w) * alone[b] - values for w, values in drawn.items()])
        paths[a, b] = {w: as_score(values) for w, values in drawn.items()}
        barriers[a, b] = as_score(falls.max(0))
    left_out = {name: as_score(drawn) for name, drawn in alone.items() if name not in ends}
    return ModeConnectivity(min_relative_accuracy, len(samples), samples.fingerprint, left_out, paths, barriers)
