"""What several stitches of one place do on the same samples: every one's answers, sample by sample, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.outputs import logits_of
from hf_stitch.data import Batch, Samples, check_same_order, paired_batches
from hf_stitch.stitches import StitchingLayer

Array = NDArray[np.float64]
Answers = Mapping[str, Array]
"""Key (``right``, ``agreement``, ``cross_entropy``, …) -> a number for each sample."""


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


class Whole(Protocol):
    """The network that predictors are measured against: an adapter does."""

    def preprocess(self, samples: Sequence[Any], /) -> Mapping[str, Any]:
        """Raw samples as its inputs."""

    def forward(self, inputs: Any, /) -> Any:
        """Its output, in eval mode."""


@dataclass(frozen=True)
class _Unswapped:
    """A stitched model as the reference: what it was before another encoder took the place of its own."""

    model: StitchedModel

    def preprocess(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        return self.model.preprocess(samples)

    def forward(self, inputs: Any) -> Any:
        with evaluating(self.model):
            return self.model(**inputs)


@torch.no_grad()
def answers(
    stitched: StitchedModel,
    layers: Mapping[str, StitchingLayer],
    samples: Samples,
    whole: Whole,
    other: Samples | None = None,
    *,
    batch_size: int = 64,
    progress: bool = True,
) -> dict[str, Answers]:
    """What each of several stitches answers to each sample, and what the target does.

    The source's half and the target run once for each batch. Stitches pass through the target's half one after the
    other: side by side in one batch they would take longer on a CPU and change the last bits of the answers.

    Args:
        stitched: The model whose halves are used, with a head.
        layers: Name (any but ``target``) -> a stitching layer of the model's place.
        samples: Raw samples.
        whole: The whole target.
        other: Where the target is to see other samples, in the same order.
        batch_size: Samples per forward.
        progress: Show a progress bar.

    Returns:
        Name -> answers, ``target`` among them.

    Raises:
        ValueError: If the model has no head, samples do not correspond, or labels are no classes of the target.
    """
    if stitched.task is None:
        raise ValueError(f"{type(stitched).__name__} has no head that could be scored; stitch with a task")
    twins = samples if other is None else other
    check_same_order(samples, twins)
    language = stitched.task == "text-generation"
    parts: dict[str, list[Answers]] = {}
    for batch, twin in paired_batches(samples, twins, batch_size, progress="scoring" if progress else None):
        inputs, reference = stitched.preprocess(batch.samples), whole.preprocess(twin.samples)
        if language:
            _check_same_tokens(inputs, reference)
        with evaluating(stitched):
            representation = stitched.source(**stitched.source_inputs(inputs))
            logits = {name: stitched.head(layer(representation)).logits for name, layer in layers.items()}
        logits["target"] = logits_of(whole.forward(reference))
        measured = _measure_tokens(logits, reference) if language else _measure_classes(logits, batch)
        for name, found in measured.items():
            parts.setdefault(name, []).append(found)
    return {
        name: {key: np.concatenate([p[key] for p in chunks]) for key in chunks[0]} for name, chunks in parts.items()
    }


def figures_of(
    predictors: Mapping[str, Answers], task: str, *, resamples: int, seed: int
) -> dict[str, dict[str, Array]]:
    """The figures of every predictor on all samples, and on bootstrap resamples of them that all predictors share.

    Args:
        predictors: From :func:`answers`.
        task: Of the model.
        resamples: How many.
        seed: Of the resamples.

    Returns:
        Predictor -> figure -> (1 + resamples,): first the figure on all samples.
    """
    of_task = _language_figures if task == "text-generation" else _class_figures
    target = predictors["target"]
    drawn: dict[str, list[dict[str, Array]]] = {name: [] for name in predictors}
    for weights in resampled(len(target["agreement"]), resamples, seed):
        for name, values in predictors.items():
            drawn[name].append(of_task(values, target, weights))
    return {
        name: {figure: np.concatenate([chunk[figure] for chunk in chunks]) for figure in chunks[0]}
        for name, chunks in drawn.items()
    }


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
    """The relative accuracy of each stitch, on all samples and on resamples of them that all stitches share.

    Args:
        stitched: The model whose halves are used, with a head that classifies.
        layers: Name -> a stitching layer of the model's place.
        data: Held-out raw samples with labels.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        batch_size: Samples per forward.
        seed: Of the bootstrap.
        resamples: Number of bootstrap resamples.
        progress: Show a progress bar.

    Returns:
        Name -> (1 + resamples,): first the figure on all samples.

    Raises:
        ValueError: If a layer is of another place, there are no labels, or the target has none right.
    """
    for name, layer in layers.items():
        check_place(stitched, name, layer)
    samples = Samples.of(data)
    if stitched.task == "text-generation" or samples.labels is None:
        raise ValueError("relative accuracy needs a head that classifies and samples with labels")
    found = answers(stitched, layers, samples, whole_target(stitched, target), batch_size=batch_size, progress=progress)
    if not found["target"]["right"].any():
        raise ValueError(f"the target has none of the {len(samples)} samples right: no accuracy is relative to that")
    drawn = figures_of(found, str(stitched.task), resamples=resamples, seed=seed)
    return {name: drawn[name]["relative_accuracy"] for name in layers}


def check_place(stitched: StitchedModel, name: str, layer: StitchingLayer) -> None:
    """Make sure that a layer joins what the model's own stitch joins.

    Raises:
        ValueError: If it does not; the message says what either joins.
    """
    own, got = (f"{side.source} to {side.target} ({side.pooling})" for side in (stitched.stitch, layer))
    if own != got:
        raise ValueError(f"stitch {name!r} maps {got}, and this model is stitched from {own}")


def whole_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """The whole target of a stitched model: as given, or the one that it was made of.

    Raises:
        ValueError: If it is neither given nor live nor named.
    """
    return stitched.parent("target") if target is None else load(target)


def reference(stitched: StitchedModel, target: Any = None) -> Whole:
    """What predictors are measured against: the whole target, or a stitched model that is given in its place.

    Raises:
        ValueError: As :func:`whole_target`.
    """
    return _Unswapped(target) if isinstance(target, StitchedModel) else whole_target(stitched, target)


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


def _measure_classes(logits: Mapping[str, Tensor], batch: Batch) -> dict[str, Answers]:
    """For each predictor and sample: its class, whether the target agrees; with labels, if right, cross-entropy."""
    predicted = {name: values.float().argmax(-1) for name, values in logits.items()}
    measured: dict[str, Answers] = {}
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


def _measure_tokens(logits: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Answers]:
    """For each predictor and sample: tokens predicted, their summed cross-entropy, on how many the target agrees."""
    labels = inputs["input_ids"][:, 1:]
    mask = (
        inputs["attention_mask"].bool()
        if "attention_mask" in inputs
        else torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    )
    real = mask[:, :-1] & mask[:, 1:]  # a text's first token has nothing before it, whichever side is padded
    best = logits["target"][:, :-1].argmax(-1)
    measured: dict[str, Answers] = {}
    for name, values in logits.items():
        if values.shape[:2] != inputs["input_ids"].shape:
            raise ValueError(
                f"the {name} model gives {values.shape[1]} tokens where the target has {labels.shape[1] + 1}: both "
                "need one tokenizer and pooling='none'"
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


def resampled(n: int, count: int, seed: int) -> Iterator[Array]:
    """How often each sample counts, some resamples at a time: first once each, then ``count`` bootstrap resamples."""
    random = np.random.default_rng(seed)
    yield np.ones((1, n))
    for start in range(0, count, 50):
        yield random.multinomial(n, np.full(n, 1 / n), size=min(50, count - start)).astype(float)


def as_score(drawn: Array) -> Score:
    """The figure on all samples, which comes first, with the percentiles of the resamples."""
    low, high = np.nan, np.nan
    if not np.isnan(drawn[0]):
        low, high = np.nanquantile(drawn[1:], [0.025, 0.975])  # a resample may hold none that the target has right
    return Score(float(drawn[0]), float(low), float(high))


def _array(values: Tensor) -> Array:
    return values.double().cpu().numpy()
