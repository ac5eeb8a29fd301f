"""Base classes of detectors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from torch import Tensor

from hf_stitch.papers import Paper
from hf_stitch.registry import label_of
from hf_stitch.representation import Representation


class Scorer(ABC):
    """A detector that was fitted to the activations of a network at one layer.

    Example:
        >>> import torch
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

        Raises:
            ValueError: The activations have another width than those that the detector was fitted to.
        """


@dataclasses.dataclass(frozen=True)
class Detector(ABC):
    """Base class of detectors: frozen dataclasses that learn what activations of a network at a layer look like.

    Attributes:
        name: Name in the registry of detectors.
        title: Name in text.
        papers: Papers that define the detector.
        reads: What is scored: each of the ``"positions"`` of a sample, of which the mean counts, or one vector for each
            sample (``"samples"``), the mean of its positions. Prefix tokens and masked positions are left out.
        two_sided: Whether unusually small scores are strange, too: activations that are shrunk towards the mean.

    Example:
        >>> from hf_stitch import registries
        >>> registries.detectors.build("knn", k=5).to_dict()
        {'name': 'knn', 'k': 5, 'normalize': False}
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    reads: ClassVar[Literal["positions", "samples"]]
    two_sided: ClassVar[bool] = False

    @abstractmethod
    def fit(self, activations: Iterable[Representation]) -> Scorer:
        """Fit the detector to the activations of a network.

        Args:
            activations: Batches of activations at one layer; they may be iterated several times.

        Returns:
            The fitted detector.

        Raises:
            ValueError: There are too few samples, or they do not vary.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the name and all options as JSON values, for ``registries.detectors.build``."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @property
    def label(self) -> str:
        """The name with all options that differ from their defaults: ``knn(k=5)``."""
        return label_of(self)
