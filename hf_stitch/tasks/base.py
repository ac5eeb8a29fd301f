"""What a task is: which labels it reads, what it measures of each sample, and the figures of these measures."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.data import Batch, Samples

Array = NDArray[np.float64]
Answers = Mapping[str, Any]
"""Measure (``right``, ``agreement``, ``cross_entropy``, …) -> one number, row or vector per sample."""
Side = tuple[Batch, Mapping[str, Any]]
"""What a network reads: a batch, and the inputs that it is made into."""
HIGHER = ("relative_accuracy", "accuracy", "agreement", "r2", "cosine", "cka", "knn_overlap")
"""Figures of which higher is better."""


class Whole(Protocol):
    """Interface of the reference network that predictors are compared with. Adapters implement it."""

    def preprocess(self, samples: Sequence[Any], /) -> Mapping[str, Any]:
        """Convert raw samples to model inputs."""

    def forward(self, inputs: Any, /) -> Any:
        """Return the output of the network in eval mode."""


class Task(ABC):
    """What stitched models are scored by."""

    classifies: ClassVar[bool] = False  # whether labels are classes of the network
    causal: ClassVar[bool] = False  # whether the tokens of a text are predicted one after the other
    unused: ClassVar[str] = ""  # what is scored in the place of labels
    kept: ClassVar[tuple[str, ...]] = ()  # measures that a grid keeps of each stitch
    figures: ClassVar[tuple[str, ...]] = ()  # figures of a grid, the headline first

    def numbered(self, samples: Samples, config: Any) -> Samples:
        """Return samples whose labels are numbered as the classes of a network."""
        return samples

    def warn_of_labels(self, samples: Samples, config: Any) -> None:
        """Warn of labels that are not those of the network, or are not used."""
        if samples.is_labelled:
            warnings.warn(f"the labels of the data are not used: {self.unused}", stacklevel=3)

    def inputs(self, network: Whole, samples: Sequence[Any]) -> tuple[Mapping[str, Any], Answers]:
        """Return the inputs of a network, and what is measured of the samples themselves."""
        return network.preprocess(samples), {}

    @abstractmethod
    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the outputs of predictors, ``target`` among them."""

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the measures of batches."""
        return {
            who: {name: np.concatenate([row[name] for row in rows]) for name in rows[0]} for who, rows in parts.items()
        }

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the predictor that ignores the input."""
        raise NotImplementedError

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], n: Array) -> dict[str, Array]:
        """Compute the figures of a predictor from sums of its measures over samples, (resamples, predictors)."""
        raise NotImplementedError

    def drawn(self, measured: Mapping[str, Answers], *, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Compute the figures of every predictor on all samples, and on bootstrap resamples shared by all predictors.

        Measures with an axis behind the samples are those of several predictors.
        """
        found: dict[str, list[dict[str, Array]]] = {name: [] for name in measured}
        for weights in resampled(len(measured["target"]["agreement"]), resamples, seed):
            sums = {
                who: {name: (weights @ values).reshape(len(weights), -1) for name, values in row.items()}
                for who, row in measured.items()
            }
            for who, own in sums.items():
                figures = self.figures_of(own, sums["target"], weights.sum(1)[:, None])
                if "error" in own:
                    figures["structural_error"] = own["error"] / own["norm"]
                shape = (len(weights), *measured[who]["agreement"].shape[1:])
                found[who].append({name: values.reshape(shape) for name, values in figures.items()})
        return {
            who: {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
            for who, chunks in found.items()
        }


def resampled(n: int, count: int, seed: int) -> Iterator[Array]:
    """Generate weights of the samples in chunks: first all ones, then ``count`` bootstrap resamples."""
    random = np.random.default_rng(seed)
    yield np.ones((1, n))
    for start in range(0, count, 50):
        yield random.multinomial(n, np.full(n, 1 / n), size=min(50, count - start)).astype(float)


def check_predictions(totals: Tensor, batch: Batch) -> None:
    """Check ``logsumexp`` of the logits of the target, (samples, predictions): with it, they give probabilities."""
    bad = ~totals.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(
            f"the logits of the target are NaN or infinite for sample {batch.ids[int(bad.nonzero()[0])]!r}: leave it "
            "out, or run the target in a wider dtype"
        )


def as_array(values: Tensor) -> Array:
    """Return a tensor as an array of float64."""
    return values.double().cpu().numpy()
