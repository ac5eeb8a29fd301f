"""Detectors of pytorch-ood for hf-stitch: KNN, Mahalanobis, RMD and GMM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.options import Count, NonNegative
from hf_stitch.papers import SUN_2022, Paper, arxiv
from hf_stitch.representation import Representation

__all__ = ["GMM", "KNN", "RMD", "Mahalanobis"]


@dataclass(frozen=True)
class KNN(Detector):
    """Distance of normalised vectors to the k-th nearest neighbour (Sun et al. 2022).

    Attributes:
        k: Rank of the neighbour, from 1.
        normalize: Whether to divide vectors by their norms, so that differences of scale, such as shrinkage, are
            ignored.

    Raises:
        ValueError: If ``k`` is below 1.

    Example:
        >>> known = Representation(torch.tensor([[1.0, 0], [1, 1], [0, 1]]), "bd")
        >>> KNN(k=1, normalize=False).fit([known]).score(Representation(torch.tensor([[3.0, 0]]), "bd"))
        tensor([2.], dtype=torch.float64)
    """

    name: ClassVar[str] = "ood_knn"
    title: ClassVar[str] = "distance to nearest neighbours (pytorch-ood)"
    papers: ClassVar[tuple[Paper, ...]] = (SUN_2022,)
    reads = "samples"
    two_sided: ClassVar[bool] = True

    k: Count = 50
    normalize: bool = True

    def _fit(self, activations: Iterable[Representation]) -> Scorer:
        from pytorch_ood.detector import KNN as PytorchOodDetector

        vectors = _vectors(activations)
        detector = PytorchOodDetector(None, self.k, self.normalize)
        return _DetectorScorer(detector, vectors, torch.zeros(len(vectors), dtype=torch.long))


@dataclass(frozen=True)
class Mahalanobis(Detector):
    """Half the squared Mahalanobis distance to the nearest class mean (Lee et al. 2018).

    Example:
        >>> known = Representation(torch.randn(90, 2), "bd")
        >>> scorer = Mahalanobis().fit([known], labels=[0, 1, 2] * 30)
        >>> bool(scorer.score(Representation(torch.full((1, 2), 50.0), "bd")) > scorer.score(known).max())
        True
    """

    name: ClassVar[str] = "ood_mahalanobis"
    title: ClassVar[str] = "Mahalanobis distance to the nearest class (pytorch-ood)"
    papers: ClassVar[tuple[Paper, ...]] = (
        arxiv(
            "Lee et al.: A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
            "1807.03888",
        ),
    )
    reads = "samples"
    two_sided: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    def _fit(self, activations: Iterable[Representation], labels: Tensor) -> Scorer:
        from pytorch_ood.detector import Mahalanobis as PytorchOodDetector

        return _DetectorScorer(PytorchOodDetector(None), _vectors(activations), labels)


@dataclass(frozen=True)
class RMD(Detector):
    """Mahalanobis distance to the nearest class mean, minus the distance to the global mean (Ren et al. 2021).

    Example:
        >>> known = Representation(torch.randn(90, 2), "bd")
        >>> RMD().fit([known], labels=[0, 1, 2] * 30).score(known).shape
        torch.Size([90])
    """

    name: ClassVar[str] = "ood_rmd"
    title: ClassVar[str] = "relative Mahalanobis distance (pytorch-ood)"
    papers: ClassVar[tuple[Paper, ...]] = (
        arxiv("Ren et al.: A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", "2106.09022"),
    )
    reads = "samples"
    needs_labels: ClassVar[bool] = True

    def _fit(self, activations: Iterable[Representation], labels: Tensor) -> Scorer:
        from pytorch_ood.detector import RMD as PytorchOodDetector

        return _DetectorScorer(PytorchOodDetector(None), _vectors(activations), labels)


@dataclass(frozen=True)
class GMM(Detector):
    """Negative log-likelihood under a mixture with one normal distribution per class.

    Attributes:
        reg: Variance added to each feature.

    Raises:
        ValueError: If ``reg`` is negative.

    Example:
        >>> known = Representation(torch.randn(90, 2), "bd")
        >>> scorer = GMM().fit([known], labels=[0, 1, 2] * 30)
        >>> bool(scorer.score(Representation(torch.full((1, 2), 50.0), "bd")) > scorer.score(known).max())
        True
    """

    name: ClassVar[str] = "ood_gmm"
    title: ClassVar[str] = "Gaussian mixture of the classes (pytorch-ood)"
    reads = "samples"
    two_sided: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    reg: NonNegative = 1e-6

    def _fit(self, activations: Iterable[Representation], labels: Tensor) -> Scorer:
        from pytorch_ood.detector import GMM as PytorchOodDetector

        return _DetectorScorer(PytorchOodDetector(None, self.reg), _vectors(activations), labels)


class _DetectorScorer(Scorer):
    """Scorer with a fitted detector of pytorch-ood."""

    def __init__(self, detector: Any, vectors: Tensor, labels: Tensor) -> None:
        self.detector, self.width = detector, vectors.shape[1]
        if len(labels) != len(vectors):
            raise ValueError(f"labels must have one label per sample ({len(vectors)}), got {len(labels)}")
        # Classes without a sample are dropped: pytorch-ood requires contiguous numbers.
        detector.fit_features(vectors, labels.unique(return_inverse=True)[1])

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        """Score a batch; see :meth:`hf_stitch.detectors.Scorer.score`."""
        if activations.width != self.width:
            raise ValueError(f"the detector was fitted to {self.width} features, got {activations.width}")
        return self.detector.predict_features(_vectors([activations])).double()


def _vectors(activations: Iterable[Representation]) -> Tensor:
    """Return the mean over positions of each sample, ``(n, d)`` float32 on the CPU."""
    return torch.cat([batch.rows("mean").detach().float().cpu() for batch in activations])
