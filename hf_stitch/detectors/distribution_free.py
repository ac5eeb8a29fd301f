"""Detectors without an assumed distribution: nearest neighbours, and a classifier."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.detectors.base import Auxiliary, Detector, Reads, Scorer, sample_means
from hf_stitch.options import Count, Natural, NonNegative
from hf_stitch.papers import LOPEZ_PAZ_2017, SUN_2022, Paper
from hf_stitch.representation import Representation

STEPS = 500
"""Minimum number of steps of Adam."""


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """Distance to the k-th nearest neighbour among the network's activations (Sun et al. 2022).

    Activations that are shrunk towards the middle have unusually near neighbours: this detector is two-sided.

    Attributes:
        k: Index of the neighbour, from 1.
        normalize: Whether vectors are divided by their norms, as in the paper. Scores then ignore differences of scale,
            such as shrinkage.

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
        vectors = [_vectors(batch, self.normalize) for batch in activations]
        if (count := sum(map(len, vectors))) < self.k:
            raise ValueError(f"the {self.k}-th nearest neighbour requires at least {self.k} samples, got {count}")
        return _Neighbours(torch.cat(vectors), self.k, self.normalize)


class _Neighbours(Scorer):
    def __init__(self, reference: Tensor, k: int, normalize: bool) -> None:
        self.reference, self.k, self.normalize = reference, k, normalize

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        vectors = _vectors(activations, self.normalize).to(self.reference)
        if vectors.shape[1] != self.reference.shape[1]:
            raise ValueError(f"the detector was fitted to {self.reference.shape[1]} features, got {vectors.shape[1]}")
        return torch.cdist(vectors, self.reference).kthvalue(self.k, 1).values


def _vectors(batch: Representation, normalize: bool) -> Tensor:
    vectors = batch.rows("mean").double()
    return functional.normalize(vectors, dim=1) if normalize else vectors


@dataclass(frozen=True)
class Classifier(Detector):
    """Small network that learns to distinguish stitched positions from the network's own (Lopez-Paz & Oquab 2017).

    It does not assume a distribution, so it finds differences beyond means and covariances. The score of a position is
    its logit. Features are standardised with the network's own activations.

    Attributes:
        hidden: Number of hidden units (ReLU); 0 for logistic regression (L-BFGS, to convergence), which finds shifts
            only.
        epochs: Number of passes over the positions (Adam, learning rate 1e-3, batches of 200). Few positions are passed
            more often, for at least 500 steps. Training ends earlier if the loss has not fallen by 1e-4 for ten epochs.
        weight_decay: L2 penalty.
        seed: Seed of the initial weights and of the order of the positions.

    Example:
        >>> x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> own, stitched = Representation(x, "bd"), Representation(x / 2, "bd")
        >>> scorer = Classifier().fit([own], auxiliary=[stitched])
        >>> bool(scorer.score(stitched).mean() > scorer.score(own).mean())
        True
    """

    name: ClassVar[str] = "classifier"
    title: ClassVar[str] = "classifier of stitched activations"
    papers: ClassVar[tuple[Paper, ...]] = (LOPEZ_PAZ_2017,)
    reads: ClassVar[Reads] = "positions"
    auxiliary: ClassVar[Auxiliary] = "stitched"

    hidden: Natural = 64
    epochs: Count = 10
    weight_decay: NonNegative = 1e-4
    seed: Natural = 0

    def _fit(self, activations: Iterable[Representation], auxiliary: Iterable[Representation]) -> Scorer:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier

        sides = [[batch.rows("none").detach().double().cpu() for batch in side] for side in (activations, auxiliary)]
        if not all(sides):
            raise ValueError("the classifier requires positions of both sides, got none; pass more samples")
        network_rows, stitched_rows = (torch.cat(side) for side in sides)
        mean, scale = network_rows.mean(0), network_rows.std(0)
        if not scale.any():
            raise ValueError(f"all {len(network_rows)} positions are equal: is the layer dead?")
        # Dead features get the mean scale: any deviation there is strange.
        scale = torch.where(scale == 0, scale.mean(), scale)
        rows = ((torch.cat([network_rows, stitched_rows]) - mean) / scale).float().numpy()
        labels = np.repeat([0, 1], [len(network_rows), len(stitched_rows)])
        sizes, batch = (self.hidden,) if self.hidden else (), min(200, len(rows))
        epochs = max(self.epochs, math.ceil(STEPS * batch / len(rows)))
        solver = {"solver": "adam", "max_iter": epochs} if self.hidden else {"solver": "lbfgs", "max_iter": 1000}
        model = MLPClassifier(sizes, alpha=self.weight_decay, batch_size=batch, random_state=self.seed, **solver)
        with warnings.catch_warnings():
            if self.hidden:  # the number of epochs is an option; logistic regression should converge
                warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(rows, labels)
        weights, biases = (
            [torch.from_numpy(layer).double() for layer in layers] for layers in (model.coefs_, model.intercepts_)
        )
        return _Logit(mean, scale, weights, biases)


class _Logit(Scorer):
    def __init__(self, mean: Tensor, scale: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
        self.mean, self.scale, self.weights, self.biases = mean, scale, weights, biases

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("none").to(self.mean)
        if rows.shape[1] != len(self.mean):
            raise ValueError(f"the detector was fitted to {len(self.mean)} features, got {rows.shape[1]}")
        values = (rows - self.mean) / self.scale
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = (values.relu() if number else values) @ weight + bias
        return sample_means(activations, values[:, 0])
