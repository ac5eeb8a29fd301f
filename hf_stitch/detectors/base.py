"""Base classes of detectors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.options import Configured
from hf_stitch.papers import Paper
from hf_stitch.representation import Representation


class Scorer(ABC):
    """Detector fitted to the activations of a network at one layer.

    Example:
        >>> from hf_stitch import registries
        >>> known = [Representation(torch.randn(200, 4), "bd")]
        >>> scorer = registries.detectors.build("mahalanobis").fit(known)
        >>> far = scorer.score(Representation(torch.full((1, 4), 9.0), "bd"))
        >>> bool(far > scorer.score(known[0]).max())
        True
    """

    @abstractmethod
    def score(self, activations: Representation) -> Tensor:
        """Score a batch of activations.

        Args:
            activations: Activations of the layer, in the same layout as for the fit.

        Returns:
            ``(batch,)`` float64, larger for stranger samples.
        """


def sample_means(activations: Representation, values: Tensor) -> Tensor:
    """Return the mean over the positions of each sample."""
    owners = activations.row_samples("none").to(values.device)
    counts = values.new_zeros(activations.batch).index_add(0, owners, torch.ones_like(values))
    if activations.mask is not None and not bool(counts.all()):
        raise ValueError(
            f"sample {int((counts == 0).nonzero()[0])} of the batch lacks positions to score; leave it out"
        )
    totals = values.new_zeros(activations.batch).index_add(0, owners, values)
    return totals / counts


Reads = Literal["positions", "samples", "whole"]
"""Input of a detector: positions, one vector for each sample, or the whole activation."""

Auxiliary = Literal["none", "outliers", "stitched"]
"""Additional activations for the fit of a detector."""


@dataclasses.dataclass(frozen=True)
class Detector(Configured, ABC):
    """Base class of detectors: frozen dataclasses that learn the distribution of activations at a layer.

    The fields of a detector are its options, checked against their annotations (:class:`hf_stitch.options.Configured`).

    A subclass implements ``_fit(activations)``, with the parameters ``labels`` and ``auxiliary`` if it declares them.

    Attributes:
        title: Name in text.
        papers: Papers that define the detector.
        reads: Input of the detector. ``"positions"``: each position of a sample separately; the score of the sample is
            the mean. ``"samples"``: one vector for each sample, the mean of its positions. Both leave out prefix tokens
            and masked positions. ``"whole"``: the arrangement of the positions, with prefix tokens.
        two_sided: Whether unusually small scores are strange, too: activations that are shrunk towards the mean.
        needs_labels: Whether the detector requires the class of each sample.
        auxiliary: Additional activations for the fit: ``"none"``; ``"outliers"``: of the same network on other data;
            ``"stitched"``: the output of a stitch for the same samples. A detector of stitched activations learns to
            distinguish them from the network's own, so it is applied to samples outside its fit.

    ``hf_stitch_testing.check_detector`` checks these laws for every detector, by name:

    - ``independent``: the score of a sample does not depend on the rest of its batch.
    - ``batches``: the fit does not depend on the split into batches.
    - ``far``: samples far from the samples of the fit score higher.
    - ``scores``: the scores are one finite float64 number per sample.
    - ``needs``, ``width``: errors name missing inputs and wrong widths.
    - ``random_state``: fitting and scoring do not change the shared generators.

    Example:
        >>> from hf_stitch import registries
        >>> registries.detectors.build("knn", k=5).to_dict()
        {'name': 'knn', 'k': 5, 'normalize': False}
    """

    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    reads: ClassVar[Reads]
    two_sided: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    auxiliary: ClassVar[Auxiliary] = "none"

    def fit(
        self,
        activations: Iterable[Representation],
        labels: Sequence[int] | None = None,
        auxiliary: Iterable[Representation] | None = None,
    ) -> Scorer:
        """Fit the detector to the activations of a network.

        Args:
            activations: Batches of activations at one layer; must allow several iterations (not a generator).
            labels: Class of each sample, in the same order; used only by detectors with ``needs_labels``.
            auxiliary: Batches of the activations that :attr:`auxiliary` names; ignored by other detectors.
        """
        fit_inputs: dict[str, Any] = {}
        if self.needs_labels:
            if labels is None:
                raise ValueError(f"detector {self.label} requires the class of each sample; pass labels")
            fit_inputs["labels"] = torch.as_tensor(labels)
        if self.auxiliary != "none":
            if auxiliary is None:
                raise ValueError(f"detector {self.label} requires auxiliary activations ({_ABOUT[self.auxiliary]})")
            fit_inputs["auxiliary"] = auxiliary
        return self._fit(activations, **fit_inputs)

    @abstractmethod
    def _fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        """Fit the detector to its declared inputs."""


_ABOUT = {"outliers": "of the same network on other data", "stitched": "the output of a stitch for the same samples"}
