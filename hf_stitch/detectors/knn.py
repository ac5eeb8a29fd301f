"""Distance to the nearest neighbours among the activations of a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.detectors.base import Detector, Reads, Scorer
from hf_stitch.options import Count
from hf_stitch.papers import SUN_2022, Paper
from hf_stitch.representation import Representation


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """Distance to the k-th nearest neighbour among the network's activations (Sun et al. 2022).

    Activations that are shrunk into the middle of the others have nearer neighbours than these: this detector is
    two-sided.

    Attributes:
        k: Which neighbour, from 1.
        normalize: Whether vectors are divided by their norms, as in the paper. Differences of scale, such as shrinkage,
            then have no effect.

    Example:
        >>> known = Representation(torch.tensor([[0.0], [1.0], [3.0]]), "bd")
        >>> NearestNeighbours(k=1).fit([known]).score(Representation(torch.tensor([[7.0]]), "bd"))
        tensor([4.], dtype=torch.float64)
    """

    name: ClassVar[str] = "knn"
    title: ClassVar[str] = "distance to nearest neighbours"
    papers: ClassVar[tuple[Paper, ...]] = (SUN_2022,)
    reads: ClassVar[Reads] = "samples"
    two_sided: ClassVar[bool] = True

    k: Count = 10
    normalize: bool = False

    @torch.no_grad()
    def _fit(self, activations: Iterable[Representation]) -> Scorer:
        kept = [_vectors(batch, self.normalize) for batch in activations]
        if (count := sum(map(len, kept))) < self.k:
            raise ValueError(f"the {self.k}-th nearest neighbour needs at least {self.k} samples, got {count}")
        return _Neighbours(torch.cat(kept), self.k, self.normalize)


class _Neighbours(Scorer):
    def __init__(self, known: Tensor, k: int, normalize: bool) -> None:
        self.known, self.k, self.normalize = known, k, normalize

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        vectors = _vectors(activations, self.normalize).to(self.known)
        if vectors.shape[1] != self.known.shape[1]:
            raise ValueError(f"the detector was fitted to {self.known.shape[1]} features, got {vectors.shape[1]}")
        return torch.cdist(vectors, self.known).kthvalue(self.k, 1).values


def _vectors(batch: Representation, normalize: bool) -> Tensor:
    vectors = batch.rows("mean").double()
    return functional.normalize(vectors, dim=1) if normalize else vectors
