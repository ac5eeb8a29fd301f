"""Selection of the samples that serve as anchors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.data import Id, Samples
from hf_stitch.data.samples import apportion, chance
from hf_stitch.options import Configured, Count, Within
from hf_stitch.registry import registries
from hf_stitch.relative.neighbours import nearest
from hf_stitch.relative.projection import RelativeProjection, check_anchors


@dataclasses.dataclass(frozen=True)
class Selection(Configured, ABC):
    """Base class of anchor selections: frozen dataclasses with their options as fields.

    The options are checked against their annotations (:class:`hf_stitch.options.Configured`).

    Attributes:
        needs: Required input in addition to the samples: ``"labels"``, ``"features"`` or None.

    Example:
        >>> from hf_stitch import registries
        >>> stratified = registries.anchors.build("stratified", seed=0)
        >>> sorted(stratified.select(Samples.of(["a", "b"], label=[0, 1]), 2, None))
        [0, 1]
    """

    needs: ClassVar[Literal["labels", "features"] | None] = None

    @abstractmethod
    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors.

        Args:
            samples: Samples to choose from.
            count: Number of anchors, from 1 to the number of samples.
            features: ``(n, d)`` float64, one row per sample, if the selection requires features.

        Returns:
            Indices of ``count`` different samples, in the order of the anchors.
        """


def select_anchors(
    data: Any, count: int, selection: str | Selection = "random", *, features: Tensor | None = None, **options: Any
) -> Samples:
    """Select the samples that serve as anchors.

    For out-of-domain anchors (Moschella et al. 2023, "OOD anchors"), pass data from outside the task; the selection
    ``ood`` also excludes samples that resemble samples of the task.

    Args:
        data: Raw samples, as for :meth:`hf_stitch.Samples.of`.
        count: Number of anchors.
        selection: Name in the registry of anchors, or a selection.
        features: ``(n, d)``, floating point: a representation of every sample, for selections that require it.
        **options: Options of a selection given by name.

    Example:
        >>> select_anchors(["good", "bad", "fine", "poor"], 2, "parallel", ids=[3, 0]).ids
        (3, 0)
    """
    samples, method = Samples.of(data), registries.anchors.build(selection, **options)
    if not 1 <= count <= len(samples):
        raise ValueError(f"the number of anchors must be from 1 to {len(samples)}, the number of samples, got {count}")
    if method.needs == "labels" and samples.labels is None:
        raise ValueError(f"selection {method.name!r} requires samples with labels; pass labels, or use 'random'")
    if method.needs == "features":
        features = _checked(method.name, features, len(samples))
    return samples.select(method.select(samples, count, features))


def _checked(name: str, features: Tensor | None, samples: int) -> Tensor:
    if features is None:
        raise ValueError(f"selection {name!r} requires representations: pass features with one row per sample")
    if features.ndim != 2 or len(features) != samples or not features.is_floating_point():
        raise ValueError(
            f"features must be floating-point of shape ({samples}, d), one row per sample, got {features.dtype} of "
            f"shape {tuple(features.shape)}"
        )
    if not features.isfinite().all():
        row = int(features.isfinite().all(1).logical_not().nonzero()[0])
        raise ValueError(f"row {row} of the features contains NaN or infinity; drop that sample")
    return features.detach().double()


@dataclasses.dataclass(frozen=True)
class Random(Selection):
    """Uniformly random samples.

    Samples are ordered by a hash of seed and id, so the selection does not depend on the order of the samples.

    Attributes:
        seed: Seed of the hash.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors. See :meth:`hf_stitch.relative.selection.Selection.select`."""
        return _shuffled(samples, range(len(samples)), self.seed)[:count]


@dataclasses.dataclass(frozen=True)
class Stratified(Selection):
    """Random samples of every class, in proportion to the class size.

    Left-over anchors go to the classes with the largest remainders, smaller labels first.

    Attributes:
        seed: Seed of the hash.
    """

    name: ClassVar[str] = "stratified"
    needs: ClassVar[Literal["labels", "features"] | None] = "labels"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors. See :meth:`hf_stitch.relative.selection.Selection.select`."""
        strata: dict[int, list[int]] = {}
        for index, label in enumerate(samples.labels or ()):
            strata.setdefault(label, []).append(index)
        classes = [strata[label] for label in sorted(strata)]
        quotas = apportion(count, [len(members) for members in classes])
        indices = [
            index
            for members, quota in zip(classes, quotas, strict=True)
            for index in _shuffled(samples, members, self.seed)[:quota]
        ]
        return _shuffled(samples, indices, self.seed)


@dataclasses.dataclass(frozen=True)
class FarthestPoint(Selection):
    """Farthest-point sampling: each anchor is the sample farthest from the previous anchors (Gonzalez 1985).

    Attributes:
        seed: Seed for the first anchor.
    """

    name: ClassVar[str] = "farthest_point"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors, by Euclidean distance."""
        assert features is not None
        indices = _shuffled(samples, range(len(samples)), self.seed)[:1]
        distances = features.new_full((len(features),), torch.inf)
        while len(indices) < count:
            distances = torch.minimum(distances, (features - features[indices[-1]]).norm(dim=1))
            farthest = int(distances.argmax())
            if distances[farthest] == 0:
                raise ValueError(
                    f"only {len(indices)} of {len(samples)} samples have different features, but {count} anchors were "
                    "requested; lower count"
                )
            indices.append(farthest)
        return indices


@dataclasses.dataclass(frozen=True)
class KMeans(Selection):
    """The sample nearest to the centroid of each k-means cluster.

    Attributes:
        seed: Seed of the k-means++ initialisation.
    """

    name: ClassVar[str] = "kmeans"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors."""
        from sklearn.cluster import KMeans as Clustering

        assert features is not None
        distinct_count = len(features.unique(dim=0))
        if distinct_count < count:
            raise ValueError(
                f"only {distinct_count} of {len(samples)} samples have different features, but {count} were requested; "
                "lower count"
            )
        clustering = Clustering(count, random_state=self.seed, n_init=1).fit(features.cpu().numpy())
        clusters = torch.from_numpy(clustering.labels_)
        distances = (features.cpu() - torch.from_numpy(clustering.cluster_centers_)[clusters]).norm(dim=1)
        indices = []
        for cluster in range(count):
            members = (clusters == cluster).nonzero()[:, 0]
            indices.append(int(members[distances[members].argmin()]))
        return indices


@dataclasses.dataclass(frozen=True)
class Frequency(Selection):
    """The most frequent samples, for example the most frequent words.

    Attributes:
        counts: Frequencies by id; samples without an entry count as 0.
    """

    name: ClassVar[str] = "frequency"

    counts: Mapping[Id, int]

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors, most frequent first; samples with equal counts keep their order."""
        ranked = sorted(range(len(samples)), key=lambda index: -self.counts.get(samples.ids[index], 0))
        if self.counts.get(samples.ids[ranked[count - 1]], 0) <= 0:
            with_count = sum(self.counts.get(id_, 0) > 0 for id_ in samples.ids)
            raise ValueError(f"{with_count} of {len(samples)} samples have a count above 0, but {count} were requested")
        return ranked[:count]


@dataclasses.dataclass(frozen=True)
class Parallel(Selection):
    """Samples given by ids, for corresponding samples of two encoders, for example a text and its translation.

    Attributes:
        ids: Ids of at least as many samples as anchors; the first ids are used.
    """

    name: ClassVar[str] = "parallel"

    ids: Sequence[Id]

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors, in the order of the ids."""
        if len(self.ids) < count:
            raise ValueError(f"{count} parallel anchors were requested, but only {len(self.ids)} ids were given")
        index_of_id = {id_: index for index, id_ in enumerate(samples.ids)}
        if missing := [id_ for id_ in self.ids[:count] if id_ not in index_of_id]:
            raise ValueError(
                f"{len(missing)} of {count} ids of parallel anchors are not among the samples, first {missing[0]!r}"
            )
        return [index_of_id[id_] for id_ in self.ids[:count]]


@dataclasses.dataclass(frozen=True, eq=False)
class OutOfDomain(Selection):
    """Random samples that do not resemble samples of the task.

    A sample is out of domain if its distance to the nearest domain sample exceeds almost all nearest-neighbour
    distances within the domain (the score of Sun et al. 2022, arXiv 2204.06507, with k = 1).

    Attributes:
        domain: ``(m, d)``: samples of the task, in the same representation as ``features``; at least 2.
        quantile: Threshold, as a quantile of the nearest-neighbour distances within the domain, in (0, 1].
        seed: Seed of the hash.
    """

    name: ClassVar[str] = "ood"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    domain: Tensor
    quantile: Annotated[float, Within(0, 1, above=True)] = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.domain.ndim != 2 or len(self.domain) < 2:
            raise ValueError(f"domain must be of shape (m, d) with m >= 2, got {tuple(self.domain.shape)}")

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors, by Euclidean distance."""
        assert features is not None
        if self.domain.shape[1] != features.shape[1]:
            raise ValueError(
                f"domain has width {self.domain.shape[1]}, but the features have width {features.shape[1]}"
            )
        domain = self.domain.to(features)
        domain_distances = nearest(domain, domain, 2, "euclidean")[0][:, 1]
        distances = nearest(features, domain, 1, "euclidean")[0][:, 0]
        outside = (distances > domain_distances.quantile(self.quantile)).nonzero()[:, 0].tolist()
        if len(outside) < count:
            raise ValueError(
                f"{len(outside)} of {len(samples)} samples are out of domain, but {count} were requested; use samples "
                "from another domain"
            )
        return _shuffled(samples, outside, self.seed)[:count]


@dataclasses.dataclass(frozen=True, eq=False)
class Bootstrap(Selection):
    """Find the counterparts of a second encoder's anchors from a few known pairs (Cannistraci et al. 2023, 2303.00721).

    Relative to the known pairs, the samples of both encoders are comparable. Each anchor of the second encoder is
    assigned a different sample of this encoder, such that the sum of squared distances between relative representations
    is minimal. In each round, the number of known pairs doubles by the most reliable new pairs, and all pairs except
    the seeds are reassigned, until all anchors are assigned and the assignment does not change.

    The paper optimises free vectors by gradient descent with a soft assignment from Sinkhorn's algorithm. Here each
    anchor is a sample, and the assignment is the exact limit of Sinkhorn's for temperature 0. If the spaces of the
    encoders are equal up to rotation, translation and scaling, the result is exact, provided that the seeds distinguish
    all samples.

    Attributes:
        anchors: ``(k, d)``: representations of the anchors by the second encoder, starting with the seeds.
        seeds: Ids of samples of this encoder that correspond to the first anchors, in the same order; at least 3.
        rounds: Maximum number of reassignments once all anchors are assigned.
    """

    name: ClassVar[str] = "bootstrap"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    anchors: Tensor
    seeds: Sequence[Id]
    rounds: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_anchors(self.anchors)
        if not 3 <= len(self.seeds) < len(self.anchors) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"bootstrap of {len(self.anchors)} anchors requires at least 3 different seeds, and fewer seeds "
                f"than anchors; got {len(self.seeds)} seeds, {len(set(self.seeds))} different"
            )

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """Select the anchors."""
        assert features is not None
        if count != len(self.anchors):
            raise ValueError(f"count must be {len(self.anchors)}, the number of anchors, got {count}")
        index_of_id = {id_: index for index, id_ in enumerate(samples.ids)}
        if unknown := [id_ for id_ in self.seeds if id_ not in index_of_id]:
            raise ValueError(f"{len(unknown)} seeds are not among the samples, first {unknown[0]!r}")
        second_anchors = self.anchors.detach().to(features)
        pairs = torch.tensor([index_of_id[id_] for id_ in self.seeds])
        known_anchors = torch.arange(len(pairs))  # anchors of the second encoder with a counterpart so far
        rounds_left = self.rounds
        while rounds_left:
            assigned, margin = self._assigned(second_anchors, features, known_anchors, pairs)
            assigned[: len(self.seeds)], margin[: len(self.seeds)] = pairs[: len(self.seeds)], torch.inf
            if len(known_anchors) == count:
                rounds_left = 0 if torch.equal(assigned, pairs) else rounds_left - 1
            known_anchors = margin.topk(min(2 * len(known_anchors), count)).indices.sort().values
            pairs = assigned[known_anchors]
        return [int(index) for index in pairs]

    def _assigned(
        self, second_rows: Tensor, own_rows: Tensor, known_anchors: Tensor, pairs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sample assigned to each anchor, and the distance ratio of the next best sample as a margin."""
        from scipy.optimize import linear_sum_assignment

        sides = (second_rows, known_anchors), (own_rows, pairs)
        relative = [RelativeProjection.of(rows[anchors], center=True)(rows) for rows, anchors in sides]
        costs = torch.cdist(*relative).square()
        seeds = len(self.seeds)
        free = costs[seeds:].clone()
        free[:, pairs[:seeds]] = costs.max() + 1  # the counterparts of seeds are fixed
        _, columns = linear_sum_assignment(free.cpu().numpy())
        assigned = torch.cat([pairs[:seeds], torch.from_numpy(columns)])
        cost = costs.gather(1, assigned[:, None].to(costs.device))
        next_best = costs.scatter(1, assigned[:, None].to(costs.device), torch.inf).min(1).values
        return assigned, (next_best / cost[:, 0].clamp_min(torch.finfo(costs.dtype).tiny)).cpu()


def _shuffled(samples: Samples, indices: Sequence[int], seed: int) -> list[int]:
    return sorted(indices, key=lambda index: chance(seed, samples.ids[index]))
