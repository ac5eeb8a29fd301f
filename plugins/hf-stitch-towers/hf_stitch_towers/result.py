"""Result of a tower exchange: the network with the new tower, and its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score
from hf_stitch.storage.files import replacing

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

EXCHANGED, ORIGINAL, ANOTHER = "exchanged", "original", "another image"
MEAN, NO_MAP, MOMENTS = "mean only", "no map", "matched moments"
"""Names of rows: the new tower with its map, the old tower, the new tower on another image, the mean of the old tower
for every image, and the new tower without a map and with the means and variances of the old tower."""

KL, AGREEMENT, WRITTEN = "kl_divergence", "agreement", "log_likelihood_change"
DECIDED, CLOSENESS, NEAREST = "decided_log_likelihood_change", "cosine", "nearest"
DECIDED_AGREEMENT, ACCURACY, ANSWER = "decided_agreement", "accuracy", "answer_log_likelihood"
CHANGES = {ACCURACY: "accuracy_change", ANSWER: "answer_log_likelihood_change"}
"""Metric of answers -> its difference from the original, per image."""

FIGURES = (KL, AGREEMENT, WRITTEN, DECIDED, DECIDED_AGREEMENT, ACCURACY, CHANGES[ACCURACY], ANSWER, CHANGES[ANSWER],
           CLOSENESS, NEAREST)  # fmt: skip
"""Metrics of networks that generate; the last two are for two towers. Lower is better for the first only."""

WORDS = {
    WRITTEN: "likelihood of captions", DECIDED: "likelihood of tokens decided by the image",
    DECIDED_AGREEMENT: "agreement in tokens decided by the image",
    CHANGES[ACCURACY]: "change of accuracy", ANSWER: "likelihood of answers",
    CHANGES[ANSWER]: "change of the likelihood of answers",
    CLOSENESS: "cosine with the original's embedding", NEAREST: "nearest to the original's embedding",
}  # fmt: skip
"""Names of metrics in tables."""

GONE = "this result was loaded from a file, which does not contain the network: run the job again"

CARD = """---
library_name: transformers
tags: [hf-stitch, tower-exchange]
---
# Exchanged {part} tower

{network} with {encoder} as its {part} tower, exchanged by [hf-stitch](https://github.com/hf-stitch/hf-stitch) without
training: a map ({matcher}) was fitted on {fitted} images without labels.

{verdict}

| row | {figures} |
|---|{rules}|
{rows}

Outputs are compared with the original on {n} test images, with 95% intervals over images.

{notes}
"""

END = "\n---\n"
"""End of the metadata of a card."""

Figures = Mapping[str, Score]


@dataclass(frozen=True)
class Caption:
    """Captions of a test image.

    Attributes:
        image: Id of the sample.
        before: Caption of the original.
        after: Caption of the network with the new tower.
    """

    image: int | str
    before: str
    after: str


@dataclass(frozen=True)
class Exchanged(Result):
    """Network with an exchanged tower, returned by ``hf_stitch.swap(…, part="vision")``.

    Metrics compare outputs with the original. For a network that generates, they are means over images of means over
    the tokens of captions that the original writes for test images. For a network of two towers, they compare the
    embeddings of images.

    Attributes:
        network: The original network.
        encoder: The new tower.
        part: The exchanged tower.
        matcher: Name of the map.
        held_out: Matcher -> its score on held-out images: the change of the log-likelihood of tokens decided by the
            image, the negative divergence without such tokens, or the cosine; empty if the matcher was named.
        fitted: Number of images used for fitting.
        n: Number of test images.
        data: Fingerprint of the test images.
        scores: ``exchanged`` and baselines -> metric -> score. ``kl_divergence`` from the original is in nats per
            token, ``agreement`` compares the most likely tokens, and ``log_likelihood_change`` of the captions is in
            nats per token. ``decided_log_likelihood_change`` and ``decided_agreement`` are restricted to tokens decided
            by the image: the original with the mean of all images would write other ones. For two towers, ``cosine``
            compares with the embedding of the original, and ``nearest`` is the share of images for which the nearest
            of the original's embeddings is the embedding of the same image.
        folded: Whether the map was folded into weights; the result is then a network of the original's class.
        error: Largest difference between outputs of the result and of the original with mapped features, over the
            largest output.
        notes: Remarks on the result.
        captions: Captions of the first test images, if the processor of the original has a tokenizer.
        model: The network, with ``generate``: of the original's class if the map was folded, else a stitched model; not
            saved with the result.
        processor: Processor of images and texts for the network, or only the tokenizer; not saved with the result.
        reader: Converts raw samples to inputs (:meth:`preprocess`); not saved with the result.
    """

    page: ClassVar[str] = "hf_stitch_towers.page:section"
    derived: ClassVar[tuple[str, ...]] = ("verdict", "beaten")

    network: str
    encoder: str
    part: str
    matcher: str
    held_out: Mapping[str, float]
    fitted: int
    n: int
    data: str
    scores: Mapping[str, Figures]
    folded: bool
    error: float
    notes: tuple[str, ...]
    captions: tuple[Caption, ...] = ()
    model: Any = field(default=None, compare=False, repr=False, metadata={"saved": False})
    processor: Any = field(default=None, compare=False, repr=False, metadata={"saved": False})
    reader: Any = field(default=None, compare=False, repr=False, metadata={"saved": False})

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(self.scores[EXCHANGED])

    @property
    def beaten(self) -> tuple[str, ...]:
        """The baselines that are farther from the original, with non-overlapping intervals."""
        scores, figure = self.scores[EXCHANGED], self.figures[0]
        baselines = {name: row[figure] for name, row in self.scores.items() if name not in (EXCHANGED, ORIGINAL)}
        if figure == KL:  # lower is better
            return tuple(name for name, score in baselines.items() if scores[figure].high < score.low)
        return tuple(name for name, score in baselines.items() if scores[figure].low > score.high)

    @property
    def verdict(self) -> str:
        """Summary in plain English: how close the network is to the original."""
        scores, mean = self.scores[EXCHANGED], self.scores[MEAN]
        text = f"With {self.encoder} as its {self.part} tower, {self._answers()}"
        if KL in scores:
            share = scores[DECIDED_AGREEMENT]
            if np.isnan(share.value):
                text += (
                    "the test is not conclusive, because none of the tokens depends on the image: test on other images"
                )
            else:
                text += (
                    f"{share.value:.1%} of the tokens decided by the image [{share.low:.1%}, {share.high:.1%}] agree "
                    f"with the original (of all tokens {scores[AGREEMENT].value:.1%}, and {mean[AGREEMENT].value:.1%} "
                    "with the mean of all images)"
                )
        else:
            share = scores[NEAREST]
            text += (
                f"for {share.value:.1%} of images [{share.low:.1%}, {share.high:.1%}] the nearest embedding of the "
                f"original is from the same image, with a cosine of {scores[CLOSENESS].value:.3f}"
            )
        not_beaten = [name for name in self.scores if name not in (EXCHANGED, ORIGINAL, *self.beaten)]
        if not_beaten and not np.isnan(share.value):
            by = "the divergence of all tokens" if KL in scores else "the cosine"
            text += f". But by {by}, it is not clearly closer to the original than {' and '.join(not_beaten)}"
        return self.told(text + ".")

    def told(self, text: str) -> str:
        """Return a text with ``image`` replaced by the content of the tower."""
        return text.replace("image", "sound") if self.part == "audio" else text

    def _answers(self) -> str:
        """Return the part of the verdict about answers; empty without answers."""
        scores, original = self.scores[EXCHANGED], self.scores[ORIGINAL]
        for figure, text, form in (
            (ACCURACY, "the right answer is the most likely for {} of images", ".1%"),
            (ANSWER, "the log-likelihood of right answers is {} nats per token", ".2f"),
        ):
            if figure in scores:
                change = scores[CHANGES[figure]]
                value, low, high = (format(x, f"+{form}") for x in (change.value, change.low, change.high))
                before, mean = (format(row[figure].value, form) for row in (original, self.scores[MEAN]))
                share = text.format(format(scores[figure].value, form))
                return (
                    f"{share} (before {before}, change {value} [{low}, {high}]; with the mean of all images {mean}); "
                )
        return ""

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Convert raw samples to inputs of the network.

        Args:
            samples: Images, waveforms, or dictionaries with a text, as for the exchange.

        Returns:
            Keyword arguments of ``model.generate`` and of the forward.

        Raises:
            ValueError: If the result was loaded from a file, without the network, or a sample cannot be read.
        """
        if self.reader is None:
            raise ValueError(GONE)
        return dict(self.reader.preprocess(samples))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the network with its processor and a card.

        If the map was folded, transformers loads the folder without hf-stitch.

        Args:
            folder: The folder; files of an earlier save are replaced atomically.

        Raises:
            ValueError: If the result was loaded from a file, without the network.
        """
        if self.model is None:
            raise ValueError(GONE)
        with replacing(Path(folder), _stale) as fresh:
            self.model.save_pretrained(fresh)
            text = self._card()
            if not self.folded:  # a stitched model has a card; scores go after its metadata
                text = f"{(fresh / 'README.md').read_text(encoding='utf-8')}\n{text.partition(END)[2]}"
            if self.processor is not None and (self.folded or self.processor is not self.model.processor):
                self.processor.save_pretrained(fresh)
            (fresh / "README.md").write_text(text, encoding="utf-8")

    def _card(self) -> str:
        rows = [
            f"| {who} | " + " | ".join(str(row[name]) for name in self.figures) + " |"
            for who, row in self.scores.items()
        ]
        return CARD.format(
            part=self.part, network=self.network, encoder=self.encoder, matcher=self.matcher, fitted=self.fitted,
            verdict=self.verdict, figures=" | ".join(map(worded, self.figures)),
            rules="|".join("---" for _ in self.figures),
            rows="\n".join(rows), n=self.n, notes="\n".join(f"- {note}" for note in self.notes),
        )  # fmt: skip

    def __rich__(self) -> Table:
        """Return a table of the scores."""
        from rich.table import Table

        table = Table(
            "metric", *self.scores, title=self.told(f"{self.n} test images, 95% intervals"),
            caption="\n".join((self.verdict, *self.notes)), caption_justify="left",
        )  # fmt: skip
        for name in self.figures:
            cells = (str(row[name]).replace(" [", "\n[") for row in self.scores.values())
            table.add_row(worded(name), *cells)
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per row of scores and metric: row, figure, value, low, high."""
        import pandas

        return pandas.DataFrame(
            [
                {"row": who, "figure": name, "value": score.value, "low": score.low, "high": score.high}
                for who, row in self.scores.items()
                for name, score in row.items()
            ]
        )

    def plot(self) -> Figure:
        """Plot the first metric of each row with its interval.

        Returns:
            The matplotlib figure.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 0.6 * len(self.scores) + 1.5), layout="constrained")
        for position, row in enumerate(self.scores.values()):
            score = row[self.figures[0]]
            errors = [[score.value - score.low], [score.high - score.value]]
            axes.errorbar(score.value, position, xerr=errors, fmt="o", capsize=4)
        axes.set_yticks(range(len(self.scores)), list(self.scores))
        axes.invert_yaxis()
        axes.set(xlabel=worded(self.figures[0]) + (" from the original, nats per token" if KL in self.figures else ""))
        return figure


def worded(figure: str) -> str:
    """Return the name of a metric in words."""
    return WORDS.get(figure, figure.replace("_", " ").replace("kl ", "KL "))


def _stale(folder: Path) -> list[str]:
    """Return the files of an earlier save that would be read if a new save did not replace them."""
    patterns = ("*.safetensors*", "pytorch_model*", "*processor_config.json", "tokenizer*", "chat_template*")
    return [path.name for pattern in patterns for path in folder.glob(pattern)]
