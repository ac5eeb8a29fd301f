"""How well a stitched model does, beside what it must beat, with intervals over samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..adapters import load
from ..adapters.base import evaluating
from ..data import Batch, Samples, check_same_order, paired_batches
from ..models.modeling import StitchedModel, logits_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """A figure with its 95% interval (percentile bootstrap over samples).

    Attributes:
        value: The figure on all samples.
        low: Lower end of the interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """For example ``0.913 [0.902, 0.923]``."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


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
        from ..plots import intervals

        name = figure or next(iter(self.scores["stitched"]))
        return intervals(
            {who: (s[name].value, s[name].low, s[name].high) for who, s in self.scores.items()},
            label=name.replace("_", " "),
        )


@torch.no_grad()
def evaluate(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    target_data: Any = None,
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
        target: The whole target network; default: the one it was made of, or the one that its config names.
        target_data: Where the target is to see other samples, with the same ids in the same order.
        batch_size: Samples per forward.
        seed: Of the bootstrap.
        resamples: Number of bootstrap resamples; samples are resampled, jointly for all predictors.
        progress: Show a progress bar.

    Returns:
        The figures with 95% intervals.

    Raises:
        ValueError: If the model has no head, the target is neither live nor named, or labels are missing or out of
            range.
    """
    if stitched.task is None:
        raise ValueError(f"{type(stitched).__name__} has no head that could be scored; stitch with a task")
    whole = stitched.parent("target") if target is None else load(target)
    samples = Samples.of(data)
    other = samples if target_data is None else Samples.of(target_data)
    check_same_order(samples, other)
    layers = {
        "stitched": stitched.stitch,
        "identity": stitched.stitch.identity(),
        "mean only": stitched.stitch.mean_only(),
    }
    measure = _measure_tokens if stitched.task == "text-generation" else _measure_classes
    parts: dict[str, list[Mapping[str, Array]]] = {}
    for batch, twin in paired_batches(samples, other, batch_size, progress="scoring" if progress else None):
        inputs, reference = stitched.preprocess(batch.samples), whole.preprocess(twin.samples)
        if stitched.task == "text-generation":
            _check_same_tokens(inputs, reference)
        with evaluating(stitched):
            representation = stitched.source(**stitched.source_inputs(inputs))
            logits = {name: stitched.head(layer(representation)).logits for name, layer in layers.items()}
        logits["target"] = logits_of(whole.forward(reference))
        for name, measured in measure(logits, batch, reference).items():
            parts.setdefault(name, []).append(measured)
    collected = {
        name: {key: np.concatenate([p[key] for p in chunks]) for key in chunks[0]} for name, chunks in parts.items()
    }
    figures = _language_figures if stitched.task == "text-generation" else _class_figures
    predictors = _with_chance(collected, stitched.task)
    drawn: dict[str, list[dict[str, Array]]] = {name: [] for name in predictors}
    for weights in _resamples(len(samples), resamples, seed):
        for name, values in predictors.items():
            drawn[name].append(figures(values, collected["target"], weights))
    scores = {name: _intervals(chunks) for name, chunks in drawn.items()}
    return Evaluation(stitched.task, len(samples), samples.fingerprint, scores)


def check_labels(samples: Samples | Batch, classes: int) -> None:
    """Make sure that labels are classes that the target predicts; unlabelled samples pass.

    Raises:
        ValueError: If a label is missing or no class; the message names the sample.
    """
    for id_, label in zip(samples.ids, samples.labels or (), strict=False):
        if not 0 <= label < classes:
            raise ValueError(f"sample {id_!r} has label {label}, and the target predicts classes 0 to {classes - 1}")


def _check_same_tokens(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Make sure that both sides see the same tokens at the same places."""
    for name in ("input_ids", "attention_mask"):
        if name in source and name in target and not torch.equal(source[name], target[name].to(source[name].device)):
            raise ValueError(
                f"source and target see other {name} for the same text: next tokens can be compared only with one "
                "tokenizer that pads both on the same side"
            )


def _measure_classes(
    logits: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
) -> dict[str, dict[str, Array]]:
    """For each predictor and sample: its class, whether the target agrees; with labels, if right, cross-entropy."""
    predicted = {name: values.float().argmax(-1) for name, values in logits.items()}
    measured: dict[str, dict[str, Array]] = {}
    for name, values in logits.items():
        row = {"class": _array(predicted[name]), "agreement": _array(predicted[name] == predicted["target"])}
        if batch.labels is not None:
            check_labels(batch, values.shape[-1])
            labels = torch.as_tensor(batch.labels, device=values.device)
            row["label"] = _array(labels)
            row["right"] = _array(predicted[name] == labels)
            row["cross_entropy"] = _array(functional.cross_entropy(values.float(), labels, reduction="none"))
        measured[name] = row
    return measured


def _measure_tokens(
    logits: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
) -> dict[str, dict[str, Array]]:
    """For each predictor and sample: tokens predicted, their summed cross-entropy, on how many the target agrees."""
    labels = inputs["input_ids"][:, 1:]
    mask = (
        inputs["attention_mask"].bool()
        if "attention_mask" in inputs
        else torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    )
    real = mask[:, :-1] & mask[:, 1:]  # a text's first token has nothing before it, whichever side is padded
    best = logits["target"][:, :-1].argmax(-1)
    measured = {}
    for name, values in logits.items():
        if values.shape[:2] != inputs["input_ids"].shape:
            raise ValueError(
                f"the {name} model gives {values.shape[1]} tokens where the target has {labels.shape[1] + 1}: both "
                "need one tokenizer and rows='positions'"
            )
        ahead = values[:, :-1].float()
        loss = functional.cross_entropy(ahead.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        measured[name] = {
            "tokens": _array(real.sum(1)),
            "cross_entropy": _array((loss * real).sum(1)),
            "agreement": _array(((ahead.argmax(-1) == best) & real).sum(1)),
            "vocabulary": np.full(len(labels), float(values.shape[-1])),
        }
    return measured


def _with_chance(collected: dict[str, dict[str, Array]], task: str) -> dict[str, dict[str, Array]]:
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


def _class_figures(own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
    n = weights.sum(1)
    agreement = {"agreement": weights @ own["agreement"] / n}
    if "right" not in own:
        return agreement
    right, reference = weights @ own["right"], weights @ target["right"]
    return {
        "accuracy": right / n,
        "relative_accuracy": np.divide(right, reference, out=np.full_like(right, np.nan), where=reference > 0),
        "cross_entropy": weights @ own["cross_entropy"] / n,
        **agreement,
    }


def _language_figures(own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
    tokens = weights @ own["tokens"]
    loss, reference = weights @ own["cross_entropy"] / tokens, weights @ target["cross_entropy"] / tokens
    return {
        "perplexity": np.exp(loss),
        "relative_perplexity": np.exp(loss - reference),
        "cross_entropy": loss,
        "agreement": weights @ own["agreement"] / tokens,
    }


def _resamples(n: int, count: int, seed: int) -> Iterator[Array]:
    """How often each sample counts, some resamples at a time: first once each, then ``count`` bootstrap resamples."""
    random = np.random.default_rng(seed)
    yield np.ones((1, n))
    for start in range(0, count, 50):
        yield random.multinomial(n, np.full(n, 1 / n), size=min(50, count - start)).astype(float)


def _intervals(chunks: list[dict[str, Array]]) -> dict[str, Score]:
    """The value on all samples, which comes first, with the percentiles of the resamples."""
    found = {}
    for name in chunks[0]:
        values = np.concatenate([chunk[name] for chunk in chunks])
        low, high = np.nan, np.nan
        if not np.isnan(values[0]):
            low, high = np.nanquantile(values[1:], [0.025, 0.975])  # a resample may hold none that the target has right
        found[name] = Score(float(values[0]), float(low), float(high))
    return found


def _array(values: Tensor) -> Array:
    return values.double().cpu().numpy()
