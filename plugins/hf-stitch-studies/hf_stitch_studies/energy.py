"""Detector of unusual activations, which scores them by the energy of a classifier trained on activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.detectors.base import Auxiliary, Detector, Reads, Scorer
from hf_stitch.options import Count, Natural, NonNegative, Within
from hf_stitch.papers import BALOGH_2025, Paper, arxiv
from hf_stitch.representation import Representation, concatenate
from hf_stitch_studies.energy_networks import GridClassifier, TokenClassifier

LIU_2020 = arxiv("Liu et al.: Energy-based Out-of-distribution Detection", "2010.03759")

PRESETS: dict[str, dict[str, Any]] = {
    "balogh2025": {},
    "small": {"width": 16, "blocks": 2, "size": 16, "epochs": 8, "fine_tune_epochs": 4, "batch_size": 32},
}
"""Options of the published experiment, and of a narrow network with few epochs for two CPU cores."""

MIN_SAMPLES = 4
"""Minimum number of samples."""


@dataclass(frozen=True)
class Energy(Detector):
    """Energy ``−log Σ exp(logits)`` of a classifier trained on the activations (Balogh and Jelasity 2025).

    A ResNet-18 classifies resized grids, and the blocks of a ViT classify tokens. Fine-tuning then pushes the energies
    of the data below ``margin_in`` and the energies of auxiliary data above ``margin_out`` (Liu et al. 2020). The
    defaults follow the paper; ``Energy.preset("small")`` is for two CPU cores.

    The loss contains the auxiliary data, so do not also test the detector on them as far samples.

    Attributes:
        width: Channels of the first stage of the ResNet.
        blocks: Number of transformer blocks.
        size: Height and width of the resized grids.
        epochs: Number of epochs with cross-entropy alone.
        fine_tune_epochs: Number of epochs with the energy penalty; half of each batch is auxiliary data.
        margin_in: Energies of the data above this margin are penalised.
        margin_out: Energies of auxiliary data below this margin are penalised.
        weight: Weight of the energy penalty, relative to the cross-entropy.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty.
        batch_size: Number of samples per step.
        seed: Seed of the initial weights and of the order of the samples.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> inliers, outliers = Representation(x, "bd"), Representation(x + torch.tensor([9, 0, 0, 0]), "bd")
        >>> detector = Energy.preset("small", epochs=3)
        >>> scorer = detector.fit([inliers], labels=[0, 1, 2] * 20, auxiliary=[outliers])
        >>> bool(scorer.score(outliers).mean() > scorer.score(inliers).mean())
        True
    """

    name: ClassVar[str] = "energy"
    title: ClassVar[str] = "energy of a classifier of activations"
    papers: ClassVar[tuple[Paper, ...]] = (BALOGH_2025, LIU_2020)
    reads: ClassVar[Reads] = "whole"
    needs_labels: ClassVar[bool] = True
    auxiliary: ClassVar[Auxiliary] = "outliers"

    width: Count = 64
    blocks: Count = 12
    size: Annotated[int, Within(8)] = 32
    epochs: Natural = 100
    fine_tune_epochs: Natural = 20
    margin_in: float = -25.0
    margin_out: float = -7.0
    weight: NonNegative = 0.1
    lr: NonNegative = 1e-3
    weight_decay: NonNegative = 1e-5
    batch_size: Annotated[int, Within(4)] = 64
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.margin_in < self.margin_out:
            raise ValueError(f"margin_in must be below margin_out, got {self.margin_in} and {self.margin_out}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Create a detector with the options of a preset.

        Args:
            name: Name of the preset in :data:`PRESETS`: ``balogh2025`` or ``small``.
            **changes: Options that override the preset.

        Returns:
            The detector.

        Raises:
            ValueError: If the preset does not exist, or an option is out of range.

        Example:
            >>> Energy.preset("small", epochs=1).label
            'energy(width=16, blocks=2, size=16, epochs=1, fine_tune_epochs=4, batch_size=32)'
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return cls(**{**PRESETS[name], **changes})

    def _fit(
        self, activations: Iterable[Representation], labels: Tensor, auxiliary: Iterable[Representation]
    ) -> Scorer:
        inliers = _SampleStore(activations)
        outliers = _SampleStore(auxiliary, inliers.like)
        if len(labels) != len(inliers):
            raise ValueError(f"labels must have one entry per sample ({len(inliers)}), got {len(labels)}")
        if min(len(inliers), len(outliers)) < MIN_SAMPLES:
            raise ValueError(
                f"Energy requires at least {MIN_SAMPLES} samples and {MIN_SAMPLES} auxiliary samples, got "
                f"{len(inliers)} and {len(outliers)}"
            )
        classes, class_indices = labels.unique(return_inverse=True)
        sample = inliers.take([0])
        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(self.seed)  # of the CPU, where the network is created
            network = self._network(sample, len(classes)).train()
            optimizer = torch.optim.Adam(network.parameters(), self.lr, weight_decay=self.weight_decay)
            outlier_batches = _shuffled_batches(len(outliers), self.batch_size // 2, generator)
            inlier_batches = _shuffled_batches(len(inliers), self.batch_size, generator)
            for _ in range(self.epochs * _steps_per_epoch(len(inliers), self.batch_size)):
                indices = next(inlier_batches)
                logits = network(inliers.take(indices))
                _optimizer_step(optimizer, functional.cross_entropy(logits, class_indices[indices].to(logits.device)))
            inlier_batches = _shuffled_batches(len(inliers), self.batch_size // 2, generator)
            for _ in range(self.fine_tune_epochs * _steps_per_epoch(len(inliers), self.batch_size // 2)):
                indices = next(inlier_batches)
                # One batch for both, because separate BatchNorm statistics would hide their differences.
                logits = network(inliers.take(indices, outliers.samples(next(outlier_batches))))
                _optimizer_step(optimizer, self._loss(logits, class_indices[indices].to(logits.device)))
        return _EnergyScorer(network.eval(), sample.width)

    def _network(self, first: Representation, classes: int) -> nn.Module:
        network: nn.Module
        if first.layout in ("bchw", "bhwc"):
            network = GridClassifier(first.width, classes, self.width, self.size)
        else:
            network = TokenClassifier(first.width, classes, self.blocks)
        return network.to(first.values.device)

    def _loss(self, logits: Tensor, class_indices: Tensor) -> Tensor:
        """Return the cross-entropy of the labelled samples (the first ones) plus the energy penalty of all samples."""
        energies = -logits.logsumexp(1)
        count = len(class_indices)
        excess_in, excess_out = energies[:count] - self.margin_in, self.margin_out - energies[count:]
        penalty = excess_in.relu().square().mean() + excess_out.relu().square().mean()
        return functional.cross_entropy(logits[:count], class_indices) + self.weight * penalty


class _EnergyScorer(Scorer):
    def __init__(self, network: nn.Module, width: int) -> None:
        self.network, self.width = network, width

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        if activations.width != self.width:
            raise ValueError(f"activations must have {self.width} features, as in fit, got {activations.width}")
        device = next(self.network.parameters()).device
        mask = None if activations.mask is None else activations.mask.to(device)
        activations = activations.replace(values=activations.values.to(device), mask=mask)
        return -self.network(activations).double().logsumexp(1)


Item = tuple[Tensor, Tensor | None]
"""Values and mask of a sample."""


class _SampleStore:
    """Random access to the samples of batches. They are stored on the CPU, and return to their device in ``take``."""

    def __init__(self, batches: Iterable[Representation], like: Representation | None = None) -> None:
        self._values: list[Item] = []
        self._indices: list[tuple[int, int]] = []
        self.like = like
        for batch_number, batch in enumerate(batches):
            self.like = batch if self.like is None else self.like
            if batch.spec != self.like.spec:
                raise ValueError(
                    f"Energy requires activations of one shape, got {self.like.spec} first, then {batch.spec} in "
                    f"{'auxiliary ' if like else ''}batch {batch_number}; pass samples of the same size"
                )
            self._values.append((batch.values.cpu(), None if batch.mask is None else batch.mask.cpu()))
            self._indices += [(batch_number, index) for index in range(batch.batch)]

    def __len__(self) -> int:
        return len(self._indices)

    def samples(self, indices: Iterable[int]) -> list[Item]:
        samples: list[Item] = []
        for index in indices:
            batch_number, row = self._indices[index]
            values, mask = self._values[batch_number]
            samples.append((values[row : row + 1], None if mask is None else mask[row : row + 1]))
        return samples

    def take(self, indices: Iterable[int], extra: Sequence[Item] = ()) -> Representation:
        """Return samples, followed by extra samples, as one batch."""
        assert self.like is not None
        values, masks = zip(*self.samples(indices), *extra, strict=True)
        device, mask = self.like.values.device, None
        if any(m is not None for m in masks):
            unmasked = [torch.ones_like(v[..., 0], dtype=torch.bool) for v in values]
            mask = concatenate([u if m is None else m for u, m in zip(unmasked, masks, strict=True)]).to(device)
        return self.like.replace(values=concatenate(values).to(device), mask=mask)


def _steps_per_epoch(count: int, size: int) -> int:
    return max(1, count // size)


def _shuffled_batches(count: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches of shuffled indices without end. An epoch with a full batch drops its incomplete last batch."""
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        for step in range(_steps_per_epoch(count, size)):
            yield order[step * size : (step + 1) * size]


def _optimizer_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
