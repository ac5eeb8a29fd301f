"""Base class of tasks: labels, measures of each sample, and figures of these measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples
from hf_stitch.printing import warn

Array = NDArray[np.float64]
Answers = Mapping[str, Any]
"""Measure (``right``, ``agreement``, ``cross_entropy``, …) -> one number, row or vector per sample."""
Side = tuple[Batch, Mapping[str, Any]]
"""Input of a network: a batch, and its preprocessed inputs."""
IGNORED = -100
"""Label of a token without a prediction, as in transformers."""


class Whole(Protocol):
    """Interface of the reference network for comparisons with predictors. Adapters implement it."""

    @property
    def processor(self) -> Any:
        """Function, tokenizer or image processor that turns raw samples into inputs."""

    def preprocess(self, samples: Sequence[Any], /) -> Mapping[str, Any]:
        """Convert raw samples to model inputs."""

    def forward(self, inputs: Any, /) -> Any:
        """Return the output of the network in eval mode."""


class Task(ABC):
    """Task of a head: labels, measures of each sample, figures and loss to score and train stitched models.

    A task is a class without state. It is registered in ``hf_stitch.registries.tasks`` by its name, which records
    contain, and selected by ``task=`` or by the head of the target.

    Attributes:
        name: Name in the registry.
        title: Predictions of heads of this task, in words.
        family: Tasks of one family score the same outputs: ``task=`` chooses among them.
        heads: Substrings in the class names of transformers models with such a head.
        models: Modality -> class of stitched models, as ``module:attribute``; ``""`` for all others.
        pipelines: Modality -> pipeline of transformers that runs the models; ``""`` for all others.
        problem_type: ``problem_type`` in the config of transformers, if defined.
        figures: Figure -> whether higher is better, in reading order.
        compared: Figures of a grid, the headline first.
        kept: Measures that a grid stores for each stitch.
        classifies: Whether labels are classes of the network, one per sample.
        describes_outputs: Whether an output represents the same class or number in all samples, and may have a name.
        has_probabilities: Whether outputs are logits of probabilities, so that a temperature applies.
        per_token: Whether each token has a separate prediction.
        causal: Whether the tokens of a text are predicted in sequence.
        record: Settings that affect figures in addition to the data, as JSON values for recipes.
        unused: Scored quantity that replaces labels; empty if labels are used.
        nothing: Error text for samples without any prediction.

    ``hf_stitch_testing.check_task`` checks these laws for every task, by name:

    - ``batches``: the measures of a sample do not depend on the rest of its batch.
    - ``resamples``, ``several``: weights are equivalent to repeated samples; several predictors at once equal separate
      figures.
    - ``itself``: the outputs of the target reproduce its figures, with a headline that chance does not beat.
    - ``loss``, ``imitation``: a loss is a mean with a gradient, which vanishes for the model's own outputs as labels.
    - ``saved``: a saved stitched model has the same task and bit-identical outputs.

    Example:
        >>> from hf_stitch.registry import registries
        >>> task = registries.tasks.build("image-classification")
        >>> task.compared, task.figures["cross_entropy"]
        (('relative_accuracy', 'accuracy', 'agreement'), False)
    """

    name: ClassVar[str]
    title: ClassVar[str]
    family: ClassVar[str] = ""
    heads: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[Mapping[str, str]]
    pipelines: ClassVar[Mapping[str, str]] = {}
    problem_type: ClassVar[Literal["regression", "multi_label_classification"] | None] = None
    figures: ClassVar[Mapping[str, bool]]
    compared: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()
    classifies: ClassVar[bool] = False
    describes_outputs: ClassVar[bool] = False
    has_probabilities: ClassVar[bool] = True
    per_token: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    record: ClassVar[Mapping[str, Any]] = {}
    unused: ClassVar[str] = ""
    nothing: ClassVar[str] = ""

    @classmethod
    def takes(cls, head: str, config: Any) -> bool:
        """Return whether this task can score a head of transformers.

        Args:
            head: Name of the class of the network.
            config: Its config, or ``None`` if it is unknown.
        """
        return any(substring in head for substring in cls.heads)

    def model_for(self, modality: str) -> Any:
        """Return the class of stitched models for samples of a modality.

        Args:
            modality: ``image``, ``text`` or ``tensor``.
        """
        return resolve_name(self.models.get(modality, self.models[""]))

    def about(self, network: Any) -> Self:
        """Return the task for a network, an adapter or a stitched model. It may use its tokenizer and config."""
        return self

    # -- labels -----------------------------------------------------------------------------------------------------
    def labels(self, samples: Samples | Batch) -> Sequence[Any] | None:
        """Return the labels of samples in the form of the task; ``None`` without labels or if they are not used."""
        return None

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:  # noqa: B027
        """Check that labels fit a network, before scoring its outputs. Unlabelled data pass.

        Args:
            samples: The samples.
            outputs: Number of outputs of the network per sample or token.
        """

    def numbered(self, samples: Samples, config: Any) -> Samples:
        """Return samples with labels numbered as the classes of a network."""
        return samples

    def warn_of_labels(self, samples: Samples, config: Any) -> None:
        """Warn about labels that differ from the classes of the network, or are not used."""
        if self.unused and samples.is_labelled:
            warn(f"the labels of the data are not used: {self.unused}")

    def check_some(self, some: bool, samples: Samples) -> None:
        """Raise an error if no sample has a prediction."""
        if not some:
            raise ValueError(f"{self.nothing} (first sample: {samples.ids[0]!r}); pass longer texts")

    # -- networks ---------------------------------------------------------------------------------------------------
    def difference(self, network: Adapter, output: Any) -> str:
        """Return the unmet requirement of this task on the output of a network; empty if the output can be scored.

        Args:
            network: The network, after a run on its example.
            output: Its output.

        Returns:
            Words that follow "requires".
        """
        return ""

    def inputs(self, network: Whole, samples: Sequence[Any]) -> Mapping[str, Any]:
        """Return the inputs of a network for fitting, training and scoring: by default the preprocessed samples."""
        return network.preprocess(samples)

    def sized_inputs(self, network: Whole, batch: Batch) -> tuple[Mapping[str, Any], Answers]:
        """Return the inputs of a network, and measures of the samples."""
        return self.inputs(network, batch.samples), {}

    # -- figures ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the outputs of predictors, including ``target``.

        Args:
            outputs: Name of a predictor -> its output for a batch.
            source: Batch and inputs for the predictors.
            target: Batch and inputs for ``target``.

        Returns:
            Name of a predictor -> measure -> one row per sample.
        """

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the measures of batches."""
        return {
            who: {name: concatenated([row[name] for row in rows]) for name in rows[0]} for who, rows in parts.items()
        }

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of a predictor that ignores the input."""
        raise NotImplementedError

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute the figures of predictors, on all samples and on resamples.

        Args:
            answers: Measure -> (samples, predictors, …).
            target: Measures of the target, (samples, 1, …).
            weights: How often each resample contains each sample, (resamples, samples); :func:`total` sums with them.

        Returns:
            Figure -> (resamples, predictors), the headline first.
        """
        raise NotImplementedError

    def drawn(self, measured: Mapping[str, Answers], *, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Compute the figures of every predictor on all samples, and on bootstrap resamples shared by all predictors.

        Measures of several predictors have an axis of predictors after the samples; measures of the target do not.
        """
        target = measured["target"]
        has_predictor_axis = {
            who: any(name in target and values.ndim > target[name].ndim for name, values in row.items())
            for who, row in measured.items()
        }
        rows = {
            who: {name: values if has_predictor_axis[who] else values[:, None] for name, values in row.items()}
            for who, row in measured.items()
        }
        chunks_of: dict[str, list[dict[str, Array]]] = {name: [] for name in measured}
        for weights in resampled(len(next(iter(target.values()))), resamples, seed):
            for who, measures in rows.items():
                figures = self.figures_of(measures, rows["target"], weights)
                if "error" in measures:
                    figures["structural_error"] = total(weights, measures["error"]) / total(weights, measures["norm"])
                chunks_of[who].append({name: v if has_predictor_axis[who] else v[:, 0] for name, v in figures.items()})
        return {
            who: {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
            for who, chunks in chunks_of.items()
        }

    # -- single samples ---------------------------------------------------------------------------------------------
    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the difference between the outputs of a predictor and of the target for each sample."""
        raise NotImplementedError

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the output of a predictor for a sample, in words."""
        raise NotImplementedError

    def label_shown(self, target: Answers, place: int, names: Mapping[int, str]) -> str | None:
        """Return the label of a sample in words; ``None`` without labels."""
        return None

    # -- training ---------------------------------------------------------------------------------------------------
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a stitched model in training: a mean over predictions, in float32 or wider.

        Args:
            logits: Its output.
            labels: Its labels, as in :meth:`hf_stitch.StitchedModel.forward`.

        Returns:
            A scalar tensor: by default the cross-entropy, ignoring tokens with the label :data:`IGNORED`.
        """
        logits, labels = widened(logits, labels)
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return labels as a tensor, one row per sample, for :meth:`summed_loss`.

        Args:
            network: The stitched model, which preprocesses the samples.
            samples: Raw samples.
            labels: Their labels from :meth:`labels`. A task per token also receives unlabelled samples.

        Returns:
            The tensor; :data:`IGNORED` for tokens without a prediction.
        """
        return torch.as_tensor(labels)

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss for labels of the data, summed over samples or tokens: by default the cross-entropy."""
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def imitation_loss(self, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the loss of each sample or token, with the outputs of a whole network as labels.

        By default this is the cross-entropy with its probabilities; both logits are divided by the temperature (Hinton
        et al. 2015).
        """
        soft = (target.to(logits.dtype) / temperature).softmax(-1)
        return -(soft * (logits / temperature).log_softmax(-1)).sum(-1)

    def decided(self, logits: Tensor) -> Tensor:
        """Return the labels that a network predicts: by default the classes."""
        return logits.argmax(-1)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count correct predictions; NaN for outputs that are neither right nor wrong."""
        return (self.decided(logits) == labels).sum()

    # -- card -------------------------------------------------------------------------------------------------------
    def usage(self) -> str:
        """Return the lines of a model card that print the output, after ``output = model(**inputs)``."""
        return ""


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of a model with a head."""
    if isinstance(output, Mapping):
        return output["logits"]
    return output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]


def widened(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in float32 or a wider dtype, and labels on their device."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.to(logits.device)


def divergence(logs: Tensor, target_logs: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergences of log-probabilities from the target's, in nats."""
    return (target_logs.exp() * (target_logs - logs).where(target_logs > -torch.inf, 0)).sum(-1)


def concatenated(arrays: Sequence[Array]) -> Array:
    """Concatenate measures of batches; shorter rows of tokens are padded with NaN."""
    if len({array.shape[1:] for array in arrays}) > 1:
        width = max(array.shape[-1] for array in arrays)
        paddings = ([(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])] for array in arrays)
        arrays = [
            np.pad(array, padding, constant_values=np.nan) for array, padding in zip(arrays, paddings, strict=True)
        ]
    return np.concatenate(arrays)


def total(weights: Array, values: Array) -> Array:
    """Sum measures over the samples of each resample."""
    return (weights @ values.reshape(len(values), -1)).reshape(len(weights), *values.shape[1:])


def ratio(values: Array, reference: Array) -> Array:
    """Divide figures by a reference; NaN for a reference of 0."""
    shape = np.broadcast_shapes(values.shape, reference.shape)
    return np.divide(values, reference, out=np.full(shape, np.nan), where=reference > 0)


def resampled(n: int, count: int, seed: int) -> Iterator[Array]:
    """Generate weights of the samples in chunks: first all ones, then ``count`` bootstrap resamples.

    A single sample is not resampled, because it does not show the spread.
    """
    random = np.random.default_rng(seed)
    yield np.ones((1, n))
    for start in range(0, count if n > 1 else 0, 50):
        yield random.multinomial(n, np.full(n, 1 / n), size=min(50, count - start)).astype(float)


def most_likely(logits: Tensor) -> Tensor:
    """Return the class of each prediction; -1 if a logit is NaN, because ``argmax`` returns its place."""
    predicted = logits.argmax(-1, keepdim=True)
    return predicted.masked_fill(logits.gather(-1, predicted).isnan(), -1).squeeze(-1)


def check_predictions(values: Tensor, batch: Batch, subject: str = "the logits of the target are") -> None:
    """Raise an error if values of a sample are not finite; a finite ``logsumexp`` of logits gives probabilities."""
    is_bad = ~values.isfinite().all(1)
    if bool(is_bad.any()):
        raise ValueError(
            f"{subject} NaN or infinite for sample {batch.ids[int(is_bad.nonzero()[0])]!r}; drop it, or run the target "
            "in a wider dtype"
        )


def as_arrays(measured: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Return tensors as float64 arrays, copied from their device in one transfer."""
    tensors = [values for row in measured.values() for values in row.values()]
    flat = iter(
        torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    )
    return {name: {key: next(flat).view(v.shape).numpy() for key, v in row.items()} for name, row in measured.items()}
