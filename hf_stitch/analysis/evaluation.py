"""How well a stitched model does, beside what it must beat, with intervals over samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_stitch.analysis.scoring import Answers, Array, Score, answers, as_score, check_place, figures_of, reference
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.stitches import StitchingLayer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` measured.

    Attributes:
        task: The head that was scored.
        n: Number of held-out samples.
        data: Fingerprint of these.
        scores: Name of a predictor (``stitched``, ``identity``, ``mean only``, ``target``, ``chance``) -> name of a
            figure -> score.
    """

    task: str
    n: int
    data: str
    scores: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Score:
        """A figure of the stitched model: ``evaluation["relative_accuracy"]``."""
        return self.scores["stitched"][figure]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (a figure that is not finite as text); :meth:`from_dict` gives it back."""
        record = asdict(self)
        for figures in record["scores"].values():
            for score in figures.values():
                score |= {key: str(value) for key, value in score.items() if not math.isfinite(value)}
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Evaluation:
        """Read :meth:`to_dict`."""
        scores = {
            who: {what: Score(**{key: float(value) for key, value in score.items()}) for what, score in figures.items()}
            for who, figures in record["scores"].items()
        }
        return cls(**{**record, "scores": scores})

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each predictor and figure: ``predictor``, ``figure``, ``value``, ``low``, ``high``."""
        import pandas

        return pandas.DataFrame(
            [
                {"predictor": who, "figure": what, **asdict(score)}
                for who, figures in self.scores.items()
                for what, score in figures.items()
            ]
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each predictor."""
        from rich.table import Table
        from rich.text import Text

        figures = list(next(iter(self.scores.values())))
        table = Table(
            "predictor",
            *(f.replace("_", " ") for f in figures),
            title=f"{self.n} held-out samples, 95% intervals over samples",
        )
        for who, row in self.scores.items():
            table.add_row(
                who, *(Text(str(row[figure])) for figure in figures), style="bold" if who == "stitched" else ""
            )
        return table

    def __str__(self) -> str:
        """The table as text."""
        from rich.console import Console

        console = Console(width=120)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def plot(self, figure: str | None = None) -> Figure:
        """A bar for each predictor with its interval; by default of the first figure."""
        from hf_stitch.plots import intervals

        name = figure or next(iter(self.scores["stitched"]))
        return intervals(
            {who: (s[name].value, s[name].low, s[name].high) for who, s in self.scores.items()},
            label=name.replace("_", " "),
        )


def evaluate(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    target_data: Any = None,
    baselines: Mapping[str, StitchingLayer] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Evaluation:
    """Score a stitched model on samples it was not fitted on, beside its baselines.

    Baselines share both halves: ``identity`` (no map; widths that differ are padded with zeros or cut), ``mean only``
    (the target's mean whatever the source says), the ``target`` alone, and ``chance`` (always the most frequent class,
    with the classes' shares as probabilities; for language, all tokens equally likely).

    Figures of classifiers: ``accuracy``; ``relative_accuracy`` (over the target's accuracy, Csiszárik et al. 2021,
    section 4; NaN where the target has none right); ``cross_entropy`` with the true
    labels, in nats; ``agreement`` (share of samples on which the prediction is the target's). Of language models:
    ``perplexity``, ``relative_perplexity``, ``cross_entropy`` per token in nats, ``agreement`` on the next token;
    tokens that have no real token before them do not count. Without labels, classifiers have ``agreement`` only.

    Args:
        stitched: The model, with a head.
        data: Held-out raw samples: what :meth:`hf_stitch.Samples.of` takes.
        target: The whole target network; default: the one it was made of, or the one that its config names. Or the
            stitched model that this one was before its encoder was swapped.
        target_data: Where the target is to see other samples, with the same ids in the same order.
        baselines: More stitching layers of the same place, by what they are called.
        batch_size: Samples per forward.
        seed: Of the bootstrap.
        resamples: Number of bootstrap resamples; samples are resampled, jointly for all predictors.
        progress: Show a progress bar.

    Returns:
        The figures with 95% intervals.

    Raises:
        ValueError: If the model has no head, the target is neither live nor named, a baseline is of another place, or
            labels are missing or out of range.
    """
    samples = Samples.of(data)
    for name, layer in (baselines or {}).items():
        check_place(stitched, name, layer)
    layers = {
        "stitched": stitched.stitch,
        "identity": stitched.stitch.identity(),
        "mean only": stitched.stitch.mean_only(),
        **(baselines or {}),
    }
    found = answers(
        stitched,
        layers,
        samples,
        reference(stitched, target),
        None if target_data is None else Samples.of(target_data),
        batch_size=batch_size,
        progress=progress,
    )
    drawn = figures_of(_with_chance(found, str(stitched.task)), str(stitched.task), resamples=resamples, seed=seed)
    scores = {name: {figure: as_score(values) for figure, values in row.items()} for name, row in drawn.items()}
    return Evaluation(str(stitched.task), len(samples), samples.fingerprint, scores)


def _with_chance(collected: Mapping[str, Answers], task: str) -> dict[str, Answers]:
    """The predictor that knows nothing of a sample: the most frequent class, or all tokens equally likely."""
    target = collected["target"]
    chance: dict[str, Array] = {}
    if task == "text-generation":
        chance = {**target, "cross_entropy": target["tokens"] * np.log(target["vocabulary"])}
        chance["agreement"] = target["tokens"] / target["vocabulary"]
    else:
        answers = target.get("label", target["class"])
        classes, inverse, counts = np.unique(answers, return_inverse=True, return_counts=True)
        chance["agreement"] = (target["class"] == classes[counts.argmax()]).astype(float)
        if "label" in target:
            chance["right"] = (inverse == counts.argmax()).astype(float)
            chance["cross_entropy"] = -np.log(counts / counts.sum())[inverse]
    return {**collected, "chance": chance}
