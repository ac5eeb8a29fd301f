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
    """A detector that was fitted to the activations of a network at one layer.

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
            activations: Activations of the layer, in the layout of those that the detector was fitted to.

        Returns:
            ``(batch,)`` float64, larger for stranger samples.
        """


def sample_means(activations: Representation, values: Tensor) -> Tensor:
    """Return the mean over the positions of each sample."""
    owners = activations.row_samples("none").to(values.device)
    counts = values.new_zeros(activations.batch).index_add(0, owners, torch.ones_like(values))
    if activations.mask is not None and not bool(counts.all()):
        raise ValueError(
            f"sample {int((counts == 0).nonzero()[0])} of the batch has no position, so it has no score: leave it out"
        )
    totals = values.new_zeros(activations.batch).index_add(0, owners, values)
    return totals / counts


Reads = Literal["positions", "samples", "whole"]
"""What a detector scores: positions, one vector for each sample, or the whole activation."""

Auxiliary = Literal["none", "outliers", "stitched"]
"""Which other activations a detector is fitted to."""


@dataclasses.dataclass(frozen=True)
class Detector(Configured, ABC):
    """Base class of detectors: frozen dataclasses that learn what activations of a network at a layer look like.

    The fields of a detector are its options, checked against their annotations (:class:`hf_stitch.options.Configured`).

    A subclass implements ``_fit(activations)``, with the further parameters ``labels`` and ``auxiliary`` if it declares
    that it needs them.

    Attributes:
        title: Name in text.
        papers: Papers that define the detector.
        reads: What is scored. ``"positions"``: each position of a sample by itself; the score of the sample is the
            mean. ``"samples"``: one vector for each sample, the mean of its positions. Both leave out prefix tokens and
            masked positions. ``"whole"``: the arrangement of the positions, with prefix tokens.
        two_sided: Whether unusually small scores are strange, too: activations that are shrunk towards the mean.
        needs_labels: Whether the detector needs the class of each sample.
        auxiliary: Other activations that it is fitted to. ``"none"``; ``"outliers"``: those of the same network on
            other data; ``"stitched"``: those that a stitch hands over for the same samples. A detector of stitched
            activations learns what tells these from the network's own, so it scores samples to which it was not fitted.

    Laws, by the names of the parts of ``hf_stitch_testing.check_detector``, which runs them on every detector:

    - ``independent``: the score of a sample does not depend on the others of its batch.
    - ``batches``: nor do the batches to which it was fitted matter.
    - ``far``: samples that are far from those that it knows score higher than these.
    - ``scores``: there is one finite float64 number per sample.
    - ``needs``, ``width``: what is missing, or of another width, is named.
    - ``random_state``: fitting and scoring leave the shared generators as they are.

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
            activations: Batches of activations at one layer; they may be iterated several times.
            labels: Class of each sample, in the same order. Only detectors with ``needs_labels`` read them.
            auxiliary: Batches of the activations that :attr:`auxiliary` names. Other detectors do not read them.
        """
        given: dict[str, Any] = {}
        if self.needs_labels:
            if labels is None:
                raise ValueError(f"detector {self.label} needs the class of each sample: pass labels")
            given["labels"] = torch.as_tensor(labels)
        if self.auxiliary != "none":
            if auxiliary is None:
                raise ValueError(f"detector {self.label} needs auxiliary activations ({_ABOUT[self.auxiliary]})")
            given["auxiliary"] = auxiliary
        return self._fit(activations, **given)

    @abstractmethod
    def _fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        """Fit the detector to what it declares to need."""


_ABOUT = {
    "outliers": "of the same network on other data",
    "stitched": "those that a stitch hands over for the same samples",
}
