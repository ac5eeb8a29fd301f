"""The answer: a network with another tower, and whether it is as good as before."""

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
"""Names of rows: the new tower through its map, the old one, the new tower on another image, the mean of the old tower
for every image, and the new tower as it is and with the means and variances of the old one."""

KL, AGREEMENT, WRITTEN = "kl_divergence", "agreement", "log_likelihood_change"
DECIDED, CLOSENESS, NEAREST = "decided_log_likelihood_change", "cosine", "nearest"
DECIDED_AGREEMENT, ACCURACY, ANSWER = "decided_agreement", "accuracy", "answer_log_likelihood"
CHANGES = {ACCURACY: "accuracy_change", ANSWER: "answer_log_likelihood_change"}
"""Figure of answers -> how it differs from the original's, image by image."""

FIGURES = (KL, AGREEMENT, WRITTEN, DECIDED, DECIDED_AGREEMENT, ACCURACY, CHANGES[ACCURACY], ANSWER, CHANGES[ANSWER],
           CLOSENESS, NEAREST)  # fmt: skip
"""Figures of networks that write, and the last two of networks of two towers; more is better, but of the first."""

WORDS = {
    WRITTEN: "likelihood of captions", DECIDED: "likelihood of what the image decides",
    DECIDED_AGREEMENT: "agreement in what the image decides",
    CHANGES[ACCURACY]: "change of accuracy", ANSWER: "likelihood of answers",
    CHANGES[ANSWER]: "change of the likelihood of answers",
    CLOSENESS: "cosine with the original's embedding", NEAREST: "the original's is the nearest",
}  # fmt: skip
"""Names of figures in tables."""

GONE = "this result was read from a file, which contains no network: do the job again"

CARD = """---
library_name: transformers
tags: [hf-stitch, tower-exchange]
---
# Another {part} tower

{network} with {encoder} as its {part} tower, exchanged by [hf-stitch](https://github.com/hf-stitch/hf-stitch) without
training: a map ({matcher}) was fitted on {fitted} images without labels.

{verdict}

| row | {figures} |
|---|{rules}|
{rows}

Outputs are compared with those of the original on {n} test images; 95% intervals over images.

{notes}
"""

END = "\n---\n"
"""What follows the part of a card that the Hub reads."""

Figures = Mapping[str, Score]


@dataclass(frozen=True)
class Caption:
    """What is written about a test image.

    Attributes:
        image: Id of the sample.
        before: By the original.
        after: By the network with the other tower.
    """

    image: int | str
    before: str
    after: str


@dataclass(frozen=True)
class Exchanged(Result):
    """A network with another tower, returned by ``hf_stitch.swap(…, part="vision")``.

    Figures compare outputs with those of the original: of a network that writes, token by token, on captions that the
    original writes for test images, as a mean over images of the mean over tokens; of a network of two towers, the
    embeddings of images.

    Attributes:
        network: The original.
        encoder: The new tower.
        part: Which tower was exchanged.
        matcher: Name of the map.
        held_out: Matcher -> what chose it, on images that fitted nothing: the change of the log-likelihood of tokens
            that the image decides, or else the negative divergence, or the cosine; empty if it was named.
        fitted: Number of images that the map was fitted on.
        n: Number of test images.
        data: Fingerprint of the test images.
        scores: ``exchanged`` and baselines -> figure -> score: ``kl_divergence`` from the original in nats per token,
            ``agreement`` of the most likely tokens, ``log_likelihood_change`` of the captions in nats per token, and
            ``decided_log_likelihood_change`` of those tokens that the image decides: the original with the mean of all
            images would write others, and ``decided_agreement`` in these. Of two towers: ``cosine`` with the embedding
            of the original, and the share of images whose own embedding by the original is the ``nearest`` among those
            of all test images.
        folded: Whether the map was folded into weights, so that the result is a network of the class of the original.
        error: Greatest difference between outputs of the result and of the original that reads mapped features, over
            the largest output.
        notes: What to know.
        captions: Of the first test images, if the processor of the original has a tokenizer.
        model: The network, with ``generate``: one of the class if the map was folded, else a stitched model; not in the
            saved result.
        processor: Of images and texts for the network, or the tokenizer alone; not in the saved result.
        reader: What turns raw samples into inputs (:meth:`preprocess`); not in the saved result.
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
        """Names of the figures."""
        return tuple(self.scores[EXCHANGED])

    @property
    def beaten(self) -> tuple[str, ...]:
        """The baselines than which it is closer to the original, by intervals that do not overlap."""
        own, figure = self.scores[EXCHANGED], self.figures[0]
        others = {who: row[figure] for who, row in self.scores.items() if who not in (EXCHANGED, ORIGINAL)}
        if figure == KL:
            return tuple(who for who, score in others.items() if own[figure].high < score.low)
        return tuple(who for who, score in others.items() if own[figure].low > score.high)

    @property
    def verdict(self) -> str:
        """What came out, in a sentence: is it as good as before?"""
        own, mean = self.scores[EXCHANGED], self.scores[MEAN]
        text = f"With {self.encoder} as its {self.part} tower, {self._answers()}"
        if KL in own:
            share = own[DECIDED_AGREEMENT]
            if np.isnan(share.value):
                text += "no token depends on the image, so that nothing is told: test on other images"
            else:
                text += (
                    f"{share.value:.1%} of the tokens that the image decides [{share.low:.1%}, {share.high:.1%}] are "
                    f"those of the original (of all tokens {own[AGREEMENT].value:.1%}, and {mean[AGREEMENT].value:.1%} "
                    "with the mean of all images)"
                )
        else:
            share = own[NEAREST]
            text += (
                f"the embedding of {share.value:.1%} of images [{share.low:.1%}, {share.high:.1%}] is nearest to the "
                f"original's of the same image; the cosine with it is {own[CLOSENESS].value:.3f}"
            )
        missed = [who for who in self.scores if who not in (EXCHANGED, ORIGINAL, *self.beaten)]
        if missed and not np.isnan(share.value):
            by = "the divergence of all tokens" if KL in own else "the cosine"
            text += f". But by {by} it is not clearly closer to the original than {' and '.join(missed)}"
        return self.told(text + ".")

    def told(self, text: str) -> str:
        """Return a text about images as one about what the tower reads."""
        return text.replace("image", "sound") if self.part == "audio" else text

    def _answers(self) -> str:
        """Return the part of the verdict about answers; nothing if samples have none."""
        own, first = self.scores[EXCHANGED], self.scores[ORIGINAL]
        for figure, text, form in (
            (ACCURACY, "the right answer is the likeliest for {} of images", ".1%"),
            (ANSWER, "right answers have a log-likelihood of {} nats per token", ".2f"),
        ):
            if figure in own:
                change = own[CHANGES[figure]]
                value, low, high = (format(x, f"+{form}") for x in (change.value, change.low, change.high))
                was, without = (format(row[figure].value, form) for row in (first, self.scores[MEAN]))
                said = text.format(format(own[figure].value, form))
                return f"{said} (before {was}, change {value} [{low}, {high}]; with the mean of all images {without}); "
        return ""

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Turn raw samples into inputs of the network.

        Args:
            samples: Images, waveforms, or dictionaries with a text beside them, as those of the exchange.

        Returns:
            Keyword arguments for ``model.generate`` and the forward.

        Raises:
            ValueError: If the result was read from a file and has no network, or a sample cannot be read.
        """
        if self.reader is None:
            raise ValueError(GONE)
        return dict(self.reader.preprocess(samples))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the network with its processor and a card.

        If the map was folded, transformers loads the folder without hf-stitch.

        Args:
            folder: The folder; files of an earlier save are replaced at once.

        Raises:
            ValueError: If the result was read from a file and has no network.
        """
        if self.model is None:
            raise ValueError(GONE)
        with replacing(Path(folder), _stale) as fresh:
            self.model.save_pretrained(fresh)
            text = self._card()
            if not self.folded:  # which has a card; the scores go behind what the Hub reads
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
        """Return the table of the rows."""
        from rich.table import Table

        table = Table(
            "figure", *self.scores, title=self.told(f"{self.n} test images, 95% intervals"),
            caption="\n".join((self.verdict, *self.notes)), caption_justify="left",
        )  # fmt: skip
        for name in self.figures:
            cells = (str(row[name]).replace(" [", "\n[") for row in self.scores.values())
            table.add_row(worded(name), *cells)
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each row and figure: row, figure, value, low, high."""
        import pandas

        return pandas.DataFrame(
            [
                {"row": who, "figure": name, "value": score.value, "low": score.low, "high": score.high}
                for who, row in self.scores.items()
                for name, score in row.items()
            ]
        )

    def plot(self) -> Figure:
        """Plot the first figure of each row with its interval.

        Returns:
            The matplotlib figure.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 0.6 * len(self.scores) + 1.5), layout="constrained")
        for place, row in enumerate(self.scores.values()):
            score = row[self.figures[0]]
            ends = [[score.value - score.low], [score.high - score.value]]
            axes.errorbar(score.value, place, xerr=ends, fmt="o", capsize=4)
        axes.set_yticks(range(len(self.scores)), list(self.scores))
        axes.invert_yaxis()
        axes.set(xlabel=worded(self.figures[0]) + (" from the original, nats per token" if KL in self.figures else ""))
        return figure


def worded(figure: str) -> str:
    """Return the name of a figure in words."""
    return WORDS.get(figure, figure.replace("_", " ").replace("kl ", "KL "))


def _stale(folder: Path) -> list[str]:
    """Return the files of an earlier save that a new one may not replace, and that would be read."""
    patterns = ("*.safetensors*", "pytorch_model*", "*processor_config.json", "tokenizer*", "chat_template*")
    return [path.name for pattern in patterns for path in folder.glob(pattern)]
