"""Relative accuracy of stitching layers at the same cuts as a function of a quantity, such as rank or sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hf_stitch.analysis import Score
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.data.classes import numbered_as, warn_of_other_classes
from hf_stitch.results import Result
from hf_stitch.running import Run
from hf_stitch.scoring.halves import HalvesOfModel, check_place, scored_target
from hf_stitch.scoring.measured import as_score
from hf_stitch.scoring.passing import Scoring
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Array
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Curves(Result):
    """Curves of relative accuracy, returned by :func:`score_curves`.

    Attributes:
        axis: Quantity that varies along a curve, such as ``rank`` or ``sparsity``.
        n: Number of held-out samples.
        data: Fingerprint of the held-out samples.
        scores: Name of a curve -> value on the axis -> relative accuracy.

    Example:
        >>> curve = {1: Score(0.5, 0.4, 0.6), 2: Score(0.9, 0.8, 1.0)}
        >>> low_rank, trained = (Curves("rank", 100, "sha256:0", {name: curve}) for name in ("low_rank", "trained"))
        >>> list(low_rank.join(trained).scores)
        ['low_rank', 'trained']
        >>> low_rank["low_rank"][2].value
        0.9
    """

    page: ClassVar[str] = "hf_stitch_studies.pages:of_curves"
    axis: str
    n: int
    data: str
    scores: Mapping[str, Mapping[float, Score]]

    def __getitem__(self, name: str) -> Mapping[float, Score]:
        """Return a curve: value on the axis -> relative accuracy."""
        return self.scores[name]

    def join(self, other: Curves) -> Curves:
        """Combine the curves of two results.

        Args:
            other: Curves over the same axis and samples.

        Returns:
            All curves in one result.

        Raises:
            ValueError: If the axes or the samples differ, or a name occurs in both.
        """
        for attribute in ("axis", "data"):
            if getattr(self, attribute) != getattr(other, attribute):
                raise ValueError(
                    f"join requires curves with the same {attribute}, got {getattr(self, attribute)} and "
                    f"{getattr(other, attribute)}"
                )
        if shared_names := self.scores.keys() & other.scores.keys():
            raise ValueError(f"join requires different names of curves, got {', '.join(sorted(shared_names))} in both")
        return replace(self, scores={**self.scores, **other.scores})

    def to_pandas(self) -> pandas.DataFrame:
        """Return the curves in long format.

        Returns:
            One row per point, with the columns ``curve``, the axis (e.g. ``rank``), ``value``, ``low`` and ``high``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"curve": name, self.axis: x, **asdict(score)}
                for name, curve in self.scores.items()
                for x, score in curve.items()
            ]
        )

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per value on the axis."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            self.axis, *self.scores, title=f"relative accuracy, {self.n} held-out samples, 95% intervals over samples"
        )
        for x in sorted({x for curve in self.scores.values() for x in curve}):
            cells = (curve.get(x) for curve in self.scores.values())
            table.add_row(f"{x:g}", *(Text("–" if cell is None else str(cell)) for cell in cells))
        return table

    def plot(self) -> Figure:
        """Plot the curves with their intervals.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import curves

        points = {name: {x: (s.value, s.low, s.high) for x, s in curve.items()} for name, curve in self.scores.items()}
        return curves(points, axis=self.axis, label="relative accuracy")


def score_curves(
    stitched: StitchedModel,
    data: Any,
    axis: str,
    stitches: Mapping[str, Mapping[float, StitchingLayer]],
    *,
    target: Any = None,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Curves:
    """Evaluate the relative accuracy of families of stitching layers in one pass over the data.

    Args:
        stitched: A stitched model at the same cuts with a classification head; only its source and target are used.
        data: Held-out raw samples with labels.
        axis: Name of the quantity that varies within a family.
        stitches: Name of a family -> value on the axis -> stitching layer at the same cuts.
        target: The whole target network; default as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Seed of the bootstrap over samples.
        resamples: Number of bootstrap resamples.
        progress: Show a progress bar.

    Returns:
        One curve per family, sorted by the value on the axis.

    Raises:
        ValueError: If a family is empty, a stitching layer is at different cuts, or the samples do not have labels.

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
        >>> families = {"direct": {4: stitched.stitch}}
        >>> curves = score_curves(stitched, images, "rank", families, resamples=20, progress=False)
        >>> list(curves["direct"])
        [4]
    """
    if not stitches or not all(stitches.values()):
        raise ValueError(f"each family must contain a stitching layer, got {[*stitches] or 'no family'}")
    samples = Samples.of(data)
    layers = {f"{name}, {axis} {x:g}": layer for name, family in stitches.items() for x, layer in family.items()}
    accuracies = relative_accuracies(
        stitched,
        layers,
        samples,
        target=target,
        batch_size=batch_size,
        seed=seed,
        resamples=resamples,
        progress=progress,
    )
    scores = {
        name: {x: as_score(accuracies[f"{name}, {axis} {x:g}"]) for x in sorted(family)}
        for name, family in stitches.items()
    }
    return Curves(axis, len(samples), samples.fingerprint, scores)


def relative_accuracies(
    stitched: StitchedModel,
    layers: Mapping[str, StitchingLayer],
    data: Any,
    *,
    target: Any,
    batch_size: int,
    seed: int,
    resamples: int,
    progress: bool,
) -> dict[str, Array]:
    """Compute the relative accuracy of stitching layers on all samples, and on resamples shared by all layers.

    Args:
        stitched: A stitched model with a classification head; only its source and target are used.
        layers: Name -> stitching layer at the cuts of the model.
        data: Held-out raw samples with labels.
        target: The whole target network; default as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Seed of the bootstrap.
        resamples: Number of bootstrap resamples.
        progress: Show a progress bar.

    Returns:
        Name -> (1 + resamples,) float64, with the relative accuracy on all samples first.

    Raises:
        ValueError: If a layer is at different cuts, the samples do not have labels, or the target misclassifies all
            of them.
    """
    for name, layer in layers.items():
        check_place(stitched, name, layer)  # raises if the cuts differ
    samples = Samples.of(data)
    task = task_named(stitched.task)
    if not task.classifies or samples.labels is None:
        raise ValueError("relative accuracy requires a classification head and samples with labels")
    samples = numbered_as(samples, stitched.config)
    warn_of_other_classes(samples, stitched.config)
    run = Run(batch_size=batch_size, progress=progress)
    halves = HalvesOfModel(stitched)
    scoring = Scoring(scored_target(stitched, target), {"": halves}, list(halves.predictors(layers)), task)
    outputs = scoring.run(PairedSamples.of(samples), run).answers[""]
    if not outputs["target"]["right"].any():
        raise ValueError(f"relative accuracy is undefined: the target misclassifies all {len(samples)} samples")
    resampled = task.drawn(outputs, resamples=resamples, seed=seed)
    return {name: resampled[name]["relative_accuracy"] for name in layers}
