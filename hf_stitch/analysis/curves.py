"""Relative accuracy of stitches of one place against a number that they differ in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_stitch.analysis.scoring import Score, as_score, relative_accuracies
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.results import Result
from hf_stitch.stitches import StitchingLayer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Curves(Result):
    """Relative accuracies along an axis, a curve for each name.

    Attributes:
        axis: What the stitches of a curve differ in: ``rank``, ``sparsity``.
        n: Number of held-out samples.
        data: Fingerprint of these.
        scores: Name -> place on the axis -> relative accuracy.
    """

    axis: str
    n: int
    data: str
    scores: Mapping[str, Mapping[float, Score]]

    def __getitem__(self, name: str) -> Mapping[float, Score]:
        """A curve: place on the axis -> relative accuracy."""
        return self.scores[name]

    def join(self, other: Curves) -> Curves:
        """The curves of both.

        Raises:
            ValueError: If axis or samples differ, or a name occurs in both.
        """
        for what in ("axis", "data"):
            if getattr(self, what) != getattr(other, what):
                raise ValueError(
                    f"only curves of one axis and the same samples can be joined: their {what} is "
                    f"{getattr(self, what)} and {getattr(other, what)}"
                )
        if twice := self.scores.keys() & other.scores.keys():
            raise ValueError(f"curves of the same name cannot be joined: {', '.join(sorted(twice))}")
        return replace(self, scores={**self.scores, **other.scores})

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each point: ``curve``, the axis, ``value``, ``low``, ``high``."""
        import pandas

        return pandas.DataFrame(
            [
                {"curve": name, self.axis: x, **asdict(score)}
                for name, curve in self.scores.items()
                for x, score in curve.items()
            ]
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each place on the axis."""
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
        """The curves with their intervals."""
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
    """The relative accuracies of families of stitches, all in one pass over the data.

    Args:
        stitched: A stitched model of the place, with a head that classifies; only its halves are used.
        data: Held-out raw samples with labels.
        axis: What the stitches of a family differ in.
        stitches: Name of the family -> place on the axis -> stitching layer.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Of the bootstrap over samples.
        resamples: Number of bootstrap resamples.
        progress: Show a progress bar.

    Raises:
        ValueError: If a family is empty, a layer is of another place, or the samples have no labels.
    """
    if not stitches or not all(stitches.values()):
        raise ValueError(f"there must be a stitch in each family, got {[*stitches] or 'no family'}")
    samples = Samples.of(data)
    layers = {f"{name}, {axis} {x:g}": layer for name, family in stitches.items() for x, layer in family.items()}
    drawn = relative_accuracies(
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
        name: {x: as_score(drawn[f"{name}, {axis} {x:g}"]) for x in sorted(family)} for name, family in stitches.items()
    }
    return Curves(axis, len(samples), samples.fingerprint, scores)
