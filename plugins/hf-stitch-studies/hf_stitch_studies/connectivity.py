"""Linear mode connectivity of stitching layers at the same cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_stitch.analysis import Score
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.results import Result
from hf_stitch.scoring.measured import as_score
from hf_stitch.stitches import LinearStitch, Stitch, StitchingLayer, as_linear
from hf_stitch_studies.curves import relative_accuracies

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

WEIGHTS = tuple(i / 10 for i in range(11))
"""Default values of λ on a path."""
Pair = tuple[str, str]
"""Names of the stitching layers at the ends of a path."""


@dataclass(frozen=True)
class ModeConnectivity(Result):
    """Relative accuracies along the lines between stitching layers, returned by :func:`mode_connectivity`.

    Attributes:
        min_relative_accuracy: Minimum relative accuracy of the stitching layers at the ends of a path.
        n: Number of held-out samples.
        data: Fingerprint of the held-out samples.
        left_out: Name -> relative accuracy, for stitching layers below the threshold.
        paths: (first, second) -> λ -> relative accuracy of λ·first + (1 − λ)·second.
        barriers: (first, second) -> greatest drop below the line between the relative accuracies of the ends,
            ``max λ·acc(first) + (1 − λ)·acc(second) − acc(λ)`` over the evaluated λ (Entezari et al. 2022, definition
            2.1, with accuracy instead of loss). 0 if the path is nowhere below the line. The maximum of noisy values is
            biased upwards: on a thousand samples, an interval that starts at 0.01 does not indicate a barrier.

    Example:
        >>> high, low = Score(0.9, 0.88, 0.92), Score(0.4, 0.36, 0.44)
        >>> path, drop = {0.0: high, 0.5: low, 1.0: high}, Score(0.5, 0.45, 0.55)
        >>> connectivity = ModeConnectivity(0.8, 1000, "sha256:0", {}, {("a", "b"): path}, {("a", "b"): drop})
        >>> min(score.value for score in connectivity.paths["a", "b"].values())
        0.4
    """

    min_relative_accuracy: float
    n: int
    data: str
    left_out: Mapping[str, Score]
    paths: Mapping[Pair, Mapping[float, Score]]
    barriers: Mapping[Pair, Score]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the paths in long format.

        Returns:
            One row per pair and λ, with the columns ``first``, ``second``, ``weight`` (λ), ``value``, ``low`` and
            ``high``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"first": first, "second": second, "weight": weight, **asdict(score)}
                for (first, second), path in self.paths.items()
                for weight, score in path.items()
            ]
        )

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per pair."""
        from rich.table import Table
        from rich.text import Text

        left_out = ", ".join(f"{name} ({score.value:.3f})" for name, score in self.left_out.items())
        table = Table(
            "first", "second", "ends", "lowest on the path", "barrier",
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
        """Plot the relative accuracy along each path with its interval.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import curves

        series = {
            f"{first} – {second}": {weight: (s.value, s.low, s.high) for weight, s in path.items()}
            for (first, second), path in self.paths.items()
        }
        return curves(series, axis="λ", label="relative accuracy")


def interpolate(first: StitchingLayer, second: StitchingLayer, weight: float) -> StitchingLayer:
    """Interpolate linearly between two stitching layers at the same cuts.

    Computes ``weight · first + (1 − weight) · second`` for the weights and biases of all maps (Csiszárik et al. 2021,
    section 8). Other affine maps, such as low-rank maps, are converted to full matrices first.

    Args:
        first: Stitching layer at weight 1.
        second: Stitching layer at weight 0.
        weight: The coefficient λ. Values outside [0, 1] extrapolate.

    Returns:
        A stitching layer with linear maps.

    Raises:
        ValueError: If the stitching layers differ in source, target or pooling, or a map is not affine.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> spec = RepresentationSpec("bd", 2)
        >>> ends = [StitchingLayer(spec, spec, "none", LinearStitch(2, 2)) for _ in range(2)]
        >>> bool((interpolate(*ends, 1.0).body.weight == ends[0].body.weight).all())
        True
    """
    for attribute in ("source", "target", "pooling"):
        if getattr(first, attribute) != getattr(second, attribute):
            raise ValueError(
                f"interpolate requires stitching layers with the same {attribute}, got {getattr(first, attribute)} and "
                f"{getattr(second, attribute)}"
            )
    prefix = None
    if first.prefix is not None and second.prefix is not None:
        prefix = _interpolate_maps(first.prefix, second.prefix, weight)
    return first.with_maps(_interpolate_maps(first.body, second.body, weight), prefix)


def _interpolate_maps(first: Stitch, second: Stitch, weight: float) -> LinearStitch:
    linear_first, linear_second = as_linear(first), as_linear(second)
    bias = None
    if linear_first.bias is not None or linear_second.bias is not None:
        zero = linear_first.weight.new_zeros(len(linear_first.weight))
        biases = (zero if stitch.bias is None else stitch.bias for stitch in (linear_first, linear_second))
        bias = weight * next(biases) + (1 - weight) * next(biases)
    return LinearStitch.of(weight=weight * linear_first.weight + (1 - weight) * linear_second.weight, bias=bias)


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
    """Evaluate the relative accuracy along the line between each pair of stitching layers.

    Follows Csiszárik et al. (2021, section 8). Stitching layers below ``min_relative_accuracy`` are left out, because
    their paths are not informative.

    Args:
        stitched: A stitched model at the same cuts with a classification head; only its source and target are used.
        stitches: Name -> stitching layer at the same cuts, with affine maps.
        data: Held-out raw samples with labels.
        weights: Values of λ in [0, 1] to evaluate on each path; 0 and 1 are always included.
        min_relative_accuracy: Minimum relative accuracy of the stitching layers at the ends of a path; the default
            follows the paper.
        target: The whole target network; default as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Seed of the bootstrap over samples.
        resamples: Number of bootstrap resamples.
        progress: Show progress bars.

    Returns:
        The relative accuracies along all paths with intervals, and the barriers.

    Raises:
        ValueError: If a weight is not in [0, 1], a stitching layer is at different cuts or not affine, the samples do
            not have labels, or fewer than two stitching layers reach the threshold.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> a, b = (
        ...     hf_stitch.load(
        ...         Sequential(Flatten(), Linear(12, 4), ReLU(), Linear(4, 2)), example_inputs=torch.randn(2, 3, 2, 2)
        ...     )
        ...     for _ in range(2)
        ... )
        >>> images = hf_stitch.Samples.of(torch.randn(60, 3, 2, 2), label=[0, 1] * 30)
        >>> stitched = hf_stitch.stitch(a, b, images, source_layer="1", target_layer="1", progress=False)
        >>> layers = {"first": stitched.stitch, "second": stitched.stitch}
        >>> connectivity = mode_connectivity(
        ...     stitched, layers, images, weights=[0.5], min_relative_accuracy=0.0, resamples=20, progress=False
        ... )
        >>> list(connectivity.paths["first", "second"])
        [0.0, 0.5, 1.0]
    """
    if invalid_weights := [weight for weight in weights if not 0 <= weight <= 1]:
        raise ValueError(f"weights must be in [0, 1], got {invalid_weights[0]}")
    for layer in stitches.values():
        for part in layer.parts:
            as_linear(getattr(layer, part))  # raises if a map is not affine
    samples = Samples.of(data)
    options: dict[str, Any] = {
        "target": target, "batch_size": batch_size, "seed": seed, "resamples": resamples, "progress": progress
    }  # fmt: skip
    accuracies = relative_accuracies(stitched, stitches, samples, **options)
    endpoints = [name for name in stitches if accuracies[name][0] >= min_relative_accuracy]
    if len(endpoints) < 2:
        listing = ", ".join(f"{name} {accuracy[0]:.3f}" for name, accuracy in accuracies.items())
        raise ValueError(
            f"fewer than two stitching layers reach a relative accuracy of {min_relative_accuracy:g}: "
            f"{listing or 'got none'}"
        )
    inner_weights = sorted({float(weight) for weight in weights} - {0.0, 1.0})
    names = {(a, b, w): f"{w:g} {a} + {1 - w:g} {b}" for a, b in combinations(endpoints, 2) for w in inner_weights}
    interpolated = {name: interpolate(stitches[a], stitches[b], w) for (a, b, w), name in names.items()}
    inner_accuracies = relative_accuracies(stitched, interpolated, samples, **options) if interpolated else {}
    paths, barriers = {}, {}
    for a, b in combinations(endpoints, 2):
        path = {0.0: accuracies[b], **{w: inner_accuracies[names[a, b, w]] for w in inner_weights}, 1.0: accuracies[a]}
        drops = np.stack([w * accuracies[a] + (1 - w) * accuracies[b] - values for w, values in path.items()])
        paths[a, b] = {w: as_score(values) for w, values in path.items()}
        barriers[a, b] = as_score(drops.max(0))
    left_out = {name: as_score(accuracy) for name, accuracy in accuracies.items() if name not in endpoints}
    return ModeConnectivity(min_relative_accuracy, len(samples), samples.fingerprint, left_out, paths, barriers)
