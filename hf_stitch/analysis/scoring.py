"""Per-sample measures of several stitching layers at the same cuts, computed in one pass over the samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.prefixes import PrefixAdapter, PrefixFront
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.pairs.pair import check_finite
from hf_stitch.processes import joined
from hf_stitch.reference import ModelReference
from hf_stitch.running import Run
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks import check_head, check_labels, logits_of, task_of

Array = NDArray[np.float64]
Answers = Mapping[str, Array]
"""Measure (``right``, ``agreement``, ``cross_entropy``, …) -> (n,) float64, one number per sample."""
NULLS = ("identity", "mean_only", "chance")
"""Baselines that carry nothing over from the source."""
LOSSES = ("perplexity", "relative_perplexity", "cross_entropy", "bits_per_character", "bits_per_byte")
"""Figures of which lower is better."""


@dataclass(frozen=True)
class Score:
    """A figure with its 95% confidence interval (percentile bootstrap over samples).

    Attributes:
        value: The figure on all samples.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> print(Score(0.913, 0.902, 0.923))
        0.913 [0.902, 0.923]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the figure with its interval, e.g. ``0.913 [0.902, 0.923]``; a dash if it is undefined."""
        return "–" if np.isnan(self.value) else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Whole(Protocol):
    """Interface of the reference network that predictors are compared with. Adapters implement it."""

    def preprocess(self, samples: Sequence[Any], /) -> Mapping[str, Any]:
        """Convert raw samples to model inputs."""

    def forward(self, inputs: Any, /) -> Any:
        """Return the output of the network in eval mode."""


@dataclass(frozen=True)
class _Unswapped:
    """A stitched model as the reference: the model before its encoder was exchanged."""

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
    samples: PairedSamples,
    whole: Whole,
    run: Run,
    *,
    alone: Whole | None = None,
) -> dict[str, Answers]:
    """Compute per-sample measures of several stitching layers and of the target.

    The source and the whole target run once per batch. The outputs of the stitching layers pass through the rest of the
    target one after the other: concatenated into one batch they would take longer on a CPU, and the last bits of the
    logits would change.
    """
    if stitched.task is None:
        raise ValueError(f"{type(stitched).__name__} has no head to score; pass task= to stitch")
    language = stitched.task == "text-generation"
    for layer in layers.values() if language else ():
        layer.check_causal()
    parts: dict[str, list[Answers]] = {}
    for _, batch, twin in samples.batches(run, "scoring"):
        inputs = stitched.preprocess(batch.samples)
        reference, sizes = _inputs(whole, twin.samples) if language else (whole.preprocess(twin.samples), {})
        if language:
            check_same_tokens(inputs, reference)
        with evaluating(stitched):
            representation = stitched.source(**stitched.source_inputs(inputs))
            check_finite(representation, f"layer {stitched.source.cut.layer!r} of the source", batch)
            logits = {name: stitched.head(layer(representation)).logits for name, layer in layers.items()}
        others = isinstance(stitched.source, PrefixFront)  # the source alone reads other tokens than the target
        if alone is not None and not others:
            logits["source"] = logits_of(alone.forward(alone.preprocess(batch.samples)))
        logits["target"] = logits_of(whole.forward(reference))
        measured = measure_tokens(logits, reference, twin) if language else measure_classes(logits, batch)
        if language:
            measured = {name: {**found, **sizes} for name, found in measured.items()}
        if isinstance(alone, Adapter) and others:
            measured["source"] = _measure_other_tokens(alone, batch)
        if not language:
            distances = {name: {"distance": _distance(logits[name], logits["target"])} for name in layers}
            measured = {name: {**found, **distances.get(name, {})} for name, found in measured.items()}
        for name, found in measured.items():
            parts.setdefault(name, []).append(found)
    return join_answers(joined(run.processes.gather(parts)), samples.a)


def join_answers(parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
    """Concatenate the measures of batches."""
    joined: dict[str, Answers] = {
        name: {key: np.concatenate([p[key] for p in chunks]) for key in chunks[0]} for name, chunks in parts.items()
    }
    if "tokens" in joined["target"] and not joined["target"]["tokens"].any():
        raise ValueError(
            f"no text has a second token to predict, neither sample {samples.ids[0]!r} nor any other: pass longer texts"
        )
    return joined


def figures_of(
    predictors: Mapping[str, Answers], task: str, *, resamples: int, seed: int
) -> dict[str, dict[str, Array]]:
    """Compute the figures of every predictor on all samples, and on bootstrap resamples shared by all predictors."""
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


def source_alone(stitched: StitchedModel, source: Any, target: Whole) -> tuple[Adapter | None, str]:
    """Return the whole source of a stitched model if its head can be scored like that of the target."""
    if source is None and stitched.parents is None:
        return None, "it is not in memory; pass source="
    found = stitched.parent("source") if source is None else load(source)
    known = stitched.config.source["reference"].get("weights_hash")
    if source is not None and known not in (None, found.pinned.weights_hash):
        warnings.warn(
            "the source has other weights than the source of this model, so its score says nothing about this model: "
            "pass the network from which the model was made",
            stacklevel=3,
        )
    why = head_difference(found, target, str(stitched.task))
    return (None, why) if why else (found, "")


def head_difference(source: Adapter, target: Whole, task: str) -> str:
    """Return why the head of a source cannot be scored like that of the target; empty if it can."""
    if source.unscored or source.task != task:
        return f"it has no head for {task}"
    if isinstance(source, PrefixAdapter):
        return "its tokens are not those of the target"
    if task == "text-generation" or not isinstance(target, Adapter):
        return ""
    (count, names), (others, theirs) = _classes(source), _classes(target)
    if count == others and (names == theirs or not names or not theirs):
        return ""
    order = count == others and sorted(names) == sorted(theirs)
    return "its head has the same classes in another order" if order else "its head has other classes"


def _classes(network: Adapter) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes, and their names if the network has some."""
    config: Any = getattr(network.model, "config", None)
    names = getattr(config, "id2label", None) or {}
    with torch.no_grad():
        count = int(logits_of(network.forward(network.example)).shape[-1])
    known = tuple(str(names.get(i, "")) for i in range(count))
    generic = all(name in ("", f"LABEL_{i}") for i, name in enumerate(known))
    return count, () if generic else known


def check_place(stitched: StitchedModel, name: str, layer: StitchingLayer) -> None:
    """Check that a stitching layer has the same source, target and pooling as the one of the model."""
    own, got = (f"{side.source} to {side.target} ({side.pooling})" for side in (stitched.stitch, layer))
    if own != got:
        raise ValueError(f"stitch {name!r} maps {got}, but the stitching layer of this model maps {own}")


def whole_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target network of a stitched model; warn if the one that is given is another."""
    if target is None:
        return stitched.parent("target")
    given = load(target)
    if changes := target_changes(stitched, given):
        warnings.warn(
            f"target= is not the target of the stitched model: it differs in {', '.join(changes)} "
            f"({'; '.join(text for texts in changes.values() for text in texts)}). Figures relative to it are not "
            "comparable with those of the recorded target",
            stacklevel=4,
        )
    return given


def scored_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target as :func:`whole_target`, with which a stitched model is scored."""
    whole = whole_target(stitched, target)
    for each in (whole, stitched):
        check_head(each)
    task_of(whole, stitched.task)
    return whole


def target_changes(stitched: StitchedModel, whole: Adapter) -> dict[str, list[str]]:
    """Compare a network with the recorded target of a stitched model."""
    record = (stitched.config.target or {}).get("reference")
    if record is None or record.get("weights_hash") is None:
        return {}
    return ModelReference.from_dict(record).changes(whole.pinned)


def reference(stitched: StitchedModel, target: Any = None) -> Whole:
    """Return the reference that predictors are compared with: the whole target, or a stitched model given instead."""
    if not isinstance(target, StitchedModel):
        return scored_target(stitched, target)
    for each in (stitched, target):
        check_head(each)
    return _Unswapped(target)


def _check_predictions(totals: Tensor, batch: Batch) -> None:
    """Check ``logsumexp`` of the logits of the target, (samples, predictions): with it, they give probabilities."""
    bad = ~totals.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the logits of the target are NaN or infinite for sample {batch.ids[int(bad.nonzero()[0])]!r}: leave it "
            "out, or run the target in a wider dtype"
        )


def check_same_tokens(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Check that both networks receive the same tokens at the same positions."""
    for name in ("input_ids", "attention_mask"):
        if name in source and name in target and not torch.equal(source[name], target[name].to(source[name].device)):
            raise ValueError(
                f"source and target receive different {name} for the same text: comparing next tokens requires the "
                "same tokenizer and padding side for both networks"
            )


def measure_classes(logits: Mapping[str, Tensor], batch: Batch) -> dict[str, Answers]:
    """Per-sample measures of classifiers: class and agreement; with labels also correctness and cross-entropy."""
    _check_predictions(logits["target"].float().logsumexp(-1, keepdim=True), batch)
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


def _distance(own: Tensor, target: Tensor) -> Array:
    """Total variation distance between class probabilities, (n,), from 0 to 1."""
    return _array((own.float().softmax(-1) - target.float().softmax(-1)).abs().sum(-1) / 2)


def measure_tokens(logits: Mapping[str, Tensor], inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Answers]:
    """Per-sample measures of language models: number of tokens, summed cross-entropy, tokens that agree."""
    labels = inputs["input_ids"][:, 1:]
    mask = (
        inputs["attention_mask"].bool()
        if "attention_mask" in inputs
        else torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    )
    real = mask[:, :-1] & mask[:, 1:]  # the first token of a text has no context, whichever side is padded
    _check_predictions(logits["target"][:, :-1].float().logsumexp(-1).where(real, 0), batch)
    best = logits["target"][:, :-1].argmax(-1)
    measured: dict[str, Answers] = {}
    for name, values in logits.items():
        if values.shape[:2] != inputs["input_ids"].shape:
            raise ValueError(
                f"the {name} model outputs {values.shape[1]} tokens where the target has {labels.shape[1] + 1}: use "
                "the same tokenizer for both networks and pooling='none'"
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


def _inputs(network: Whole, samples: Sequence[Any]) -> tuple[Mapping[str, Any], Answers]:
    """Return the inputs of a network; of texts also the characters and bytes that it predicts, if they are known."""
    tokenizer = network.processor if isinstance(network, Adapter) else None
    if not getattr(tokenizer, "is_fast", False) or not all(isinstance(sample, str) for sample in samples):
        return network.preprocess(samples), {}
    assert isinstance(network, Adapter)
    inputs = network.preprocess(samples, offsets=True)
    spans, mask = inputs.pop(OFFSETS), inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    sizes: list[tuple[int, int]] = []
    for row, (text, span) in enumerate(zip(samples, spans.tolist(), strict=True)):
        real = [True] * len(span) if mask is None else mask[row].tolist()
        predicted = [s for i, s in enumerate(span) if i and real[i] and real[i - 1] and s[1]]
        part = text[min(s[0] for s in predicted) : max(s[1] for s in predicted)] if predicted else ""
        sizes.append((len(part), len(part.encode())))
    characters, size = np.array(sizes, dtype=np.float64).T
    return inputs, {"characters": characters, "bytes": size}


def _measure_other_tokens(network: Adapter, batch: Batch) -> Answers:
    """Measure a language model on its own tokens, which cannot be compared with those of the target."""
    inputs, sizes = _inputs(network, batch.samples)
    found = measure_tokens({"target": logits_of(network.forward(inputs))}, inputs, batch)["target"]
    return {**found, **sizes, "agreement": np.full(len(found["tokens"]), np.nan)}


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
    figures = {
        "perplexity": np.exp(loss),
        "relative_perplexity": np.exp(loss - reference),
        "cross_entropy": loss,
        "agreement": weights @ own["agreement"] / tokens,
    }
    if np.isnan(own["agreement"]).any():  # on other tokens than the target
        figures = {name: np.full_like(values, np.nan) for name, values in figures.items()}
    if "characters" in own and "characters" in target:
        bits = weights @ own["cross_entropy"] / np.log(2)
        figures |= {f"bits_per_{unit}": bits / (weights @ own[f"{unit}s"]) for unit in ("character", "byte")}
    return figures


def resampled(n: int, count: int, seed: int) -> Iterator[Array]:
    """Generate weights of the samples in chunks: first all ones, then ``count`` bootstrap resamples."""
    random = np.random.default_rng(seed)
    yield np.ones((1, n))
    for start in range(0, count, 50):
        yield random.multinomial(n, np.full(n, 1 / n), size=min(50, count - start)).astype(float)


def not_beaten(drawn: Mapping[str, Mapping[str, Array]], rivals: Iterable[str] = NULLS) -> tuple[str, ...]:
    """Return the baselines that a stitched model does not beat, by the first figure that is defined.

    A baseline is beaten if the 95% interval of the paired difference over the resamples lies above 0.
    """
    own = drawn["stitched"]
    figure = next((name for name, values in own.items() if not np.isnan(values[0])), None)
    if figure is None:
        return ()
    sign = -1 if figure in LOSSES else 1
    apart = {name: sign * (own[figure] - drawn[name][figure])[1:] for name in rivals if name in drawn}
    return tuple(name for name, values in apart.items() if np.nanquantile(values, 0.025) <= 0)


def as_score(drawn: Array) -> Score:
    """Return the figure on all samples with the percentiles of the resamples."""
    low, high = np.nan, np.nan
    if not np.isnan(drawn[0]):
        low, high = np.nanquantile(drawn[1:], [0.025, 0.975])  # NaN where the target has no correct sample
    return Score(float(drawn[0]), float(low), float(high))


def _array(values: Tensor) -> Array:
    return values.double().cpu().numpy()
