"""Which samples become anchors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.data import Id, Samples
from hf_stitch.data.splits import apportion, chance
from hf_stitch.registry import registries
from hf_stitch.relative.neighbours import nearest

_DOMAIN_ROWS = 4096
"""Rows of the domain that are looked at at a time."""


@dataclasses.dataclass(frozen=True)
class Selection(ABC):
    """A frozen dataclass whose fields are its options, each validated in ``__post_init__``.

    Attributes:
        name: What the registry of anchors calls it.
        needs: What it selects by: ``"labels"`` of the samples, ``"features"``, or nothing but the samples.
    """

    name: ClassVar[str]
    needs: ClassVar[Literal["labels", "features"] | None] = None

    @abstractmethod
    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """The places of ``count`` different samples, in the order of the anchors.

        Args:
            samples: To choose from.
            count: From 1 to their number.
            features: ``(n, d)`` float64, a row for each sample, where this selection needs them.
        """


def select_anchors(
    data: Any, count: int, selection: str | Selection = "random", *, features: Tensor | None = None, **options: Any
) -> Samples:
    """Choose the samples that are to be anchors.

    For out-of-domain anchors (Moschella et al. 2023, "OOD anchors") give other data than the task's; ``ood`` keeps what
    is like the task's out of them.

    Args:
        data: Raw samples: what :meth:`hf_stitch.Samples.of` takes.
        count: How many.
        selection: A name in the registry of anchors, or a selection.
        features: ``(n, d)``: a representation of every sample, for selections that look at them.
        **options: Of the selection, where it is given by name.

    Returns:
        The samples, in the order of the anchors.

    Raises:
        ValueError: There are fewer samples than anchors, or what the selection needs is missing or does not determine
            so many anchors.

    Example:
        >>> select_anchors(["good", "bad", "fine", "poor"], 2, "parallel", ids=[3, 0]).ids
        (3, 0)
    """
    samples, chosen = Samples.of(data), registries.anchors.build(selection, **options)
    if not 1 <= count <= len(samples):
        raise ValueError(f"the number of anchors must be from 1 to {len(samples)}, that of the samples, got {count}")
    if chosen.needs == "labels" and samples.labels is None:
        raise ValueError(f"selection {chosen.name!r} goes by labels, and these samples have none; use 'random'")
    if chosen.needs == "features":
        features = _checked(chosen.name, features, len(samples))
    return samples.select(chosen.select(samples, count, features))


def _checked(name: str, features: Tensor | None, samples: int) -> Tensor:
    if features is None:
        raise ValueError(f"selection {name!r} goes by representations: pass features, a row for each sample")
    if features.ndim != 2 or len(features) != samples or not features.is_floating_point():
        raise ValueError(
            f"features must be floating-point of shape ({samples}, d), a row for each sample, got {features.dtype} of "
            f"{tuple(features.shape)}"
        )
    if not features.isfinite().all():
        row = int(features.isfinite().all(1).logical_not().nonzero()[0])
        raise ValueError(f"row {row} of the features holds NaN or infinity; leave that sample out")
    return features.detach().double()


@dataclasses.dataclass(frozen=True)
class Random(Selection):
    """Any samples, each as likely as any other.

    Chance is a hash of seed and id, so that the choice does not depend on the order of the samples.

    Attributes:
        seed: Another seed gives other anchors.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``."""
        return _shuffled(samples, range(len(samples)), self.seed)[:count]


@dataclasses.dataclass(frozen=True)
class Stratified(Selection):
    """Random samples, of every class in proportion to its size.

    What does not divide goes to the classes with the largest remainders, smaller labels first.

    Attributes:
        seed: Another seed gives other anchors.
    """

    name: ClassVar[str] = "stratified"
    needs: ClassVar[Literal["labels", "features"] | None] = "labels"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``."""
        strata: dict[int, list[int]] = {}
        for place, label in enumerate(samples.labels or ()):
            strata.setdefault(label, []).append(place)
        classes = [strata[label] for label in sorted(strata)]
        quotas = apportion(count, [len(places) for places in classes])
        chosen = [
            place
            for places, quota in zip(classes, quotas, strict=True)
            for place in _shuffled(samples, places, self.seed)[:quota]
        ]
        return _shuffled(samples, chosen, self.seed)


@dataclasses.dataclass(frozen=True)
class FarthestPoint(Selection):
    """Each anchor is the sample farthest from those chosen before (Gonzalez 1985).

    Attributes:
        seed: Chooses the first.
    """

    name: ClassVar[str] = "farthest_point"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``, by Euclidean distance.

        Raises:
            ValueError: Fewer samples differ than there are to be anchors.
        """
        assert features is not None
        chosen = _shuffled(samples, range(len(samples)), self.seed)[:1]
        gap = features.new_full((len(features),), torch.inf)
        while len(chosen) < count:
            gap = torch.minimum(gap, (features - features[chosen[-1]]).norm(dim=1))
            farthest = int(gap.argmax())
            if gap[farthest] == 0:
                raise ValueError(
                    f"only {len(chosen)} of {len(samples)} samples have different features, and {count} anchors are "
                    "wanted; lower their number"
                )
            chosen.append(farthest)
        return chosen


@dataclasses.dataclass(frozen=True)
class KMeans(Selection):
    """Of each of k-means' clusters the sample nearest to its centroid.

    Attributes:
        seed: Of the starts of k-means (k-means++).
    """

    name: ClassVar[str] = "kmeans"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    seed: int = 0

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``.

        Raises:
            ValueError: Fewer samples differ than there are to be anchors.
        """
        from sklearn.cluster import KMeans as Clustering

        assert features is not None
        different = len(features.unique(dim=0))
        if different < count:
            raise ValueError(
                f"only {different} of {len(samples)} samples have different features, and {count} anchors are wanted; "
                "lower their number"
            )
        found = Clustering(count, random_state=self.seed, n_init=1).fit(features.cpu().numpy())
        clusters = torch.from_numpy(found.labels_)
        away = (features.cpu() - torch.from_numpy(found.cluster_centers_)[clusters]).norm(dim=1)
        chosen = []
        for cluster in range(count):
            members = (clusters == cluster).nonzero()[:, 0]
            chosen.append(int(members[away[members].argmin()]))
        return chosen


@dataclasses.dataclass(frozen=True)
class Frequency(Selection):
    """The most frequent samples: of words, those that occur most often.

    Attributes:
        counts: How often each occurs, by id; samples without a count never.
    """

    name: ClassVar[str] = "frequency"

    counts: Mapping[Id, int]

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``, the most frequent first; of equal counts the samples that come first.

        Raises:
            ValueError: Fewer samples than there are to be anchors have a count above 0.
        """
        ranked = sorted(range(len(samples)), key=lambda place: -self.counts.get(samples.ids[place], 0))
        if self.counts.get(samples.ids[ranked[count - 1]], 0) <= 0:
            known = sum(self.counts.get(id_, 0) > 0 for id_ in samples.ids)
            raise ValueError(f"{known} of {len(samples)} samples have a count above 0, and {count} anchors are wanted")
        return ranked[:count]


@dataclasses.dataclass(frozen=True)
class Parallel(Selection):
    """Samples by their ids, in the order given: what corresponds on two sides, such as a text and its translation.

    Attributes:
        ids: Of at least as many samples as there are to be anchors; the first of them are taken.
    """

    name: ClassVar[str] = "parallel"

    ids: Sequence[Id]

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``.

        Raises:
            ValueError: There are fewer ids than anchors, or one is not that of a sample.
        """
        if len(self.ids) < count:
            raise ValueError(f"{count} parallel anchors are wanted, and {len(self.ids)} ids are given")
        places = {id_: place for place, id_ in enumerate(samples.ids)}
        if missing := [id_ for id_ in self.ids[:count] if id_ not in places]:
            raise ValueError(
                f"{len(missing)} of {count} ids of parallel anchors are not among the samples, the first {missing[0]!r}"
            )
        return [places[id_] for id_ in self.ids[:count]]


@dataclasses.dataclass(frozen=True, eq=False)
class OutOfDomain(Selection):
    """Random samples that are unlike the task's.

    A sample is out of the domain if it is farther from the domain's nearest sample than nearly all of the domain's
    samples are from theirs (the score of Sun et al. 2022, arXiv 2204.06507, with k = 1).

    Attributes:
        domain: ``(m, d)``: samples of the task, in the representation of ``features``; at least 2.
        quantile: Which part of the domain's own samples is nearer to its neighbour, in (0, 1].
        seed: Another seed gives other anchors.

    Raises:
        ValueError: If there are less than 2 samples of the domain, or the quantile is out of its range.
    """

    name: ClassVar[str] = "ood"
    needs: ClassVar[Literal["labels", "features"] | None] = "features"

    domain: Tensor
    quantile: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.domain.ndim != 2 or len(self.domain) < 2:
            raise ValueError(f"domain must be of shape (m, d) with m >= 2, got {tuple(self.domain.shape)}")
        if not 0 < self.quantile <= 1:
            raise ValueError(f"quantile must be in (0, 1], got {self.quantile}")

    def select(self, samples: Samples, count: int, features: Tensor | None) -> Sequence[int]:
        """As in ``Selection``, by Euclidean distance.

        Raises:
            ValueError: The widths differ, or fewer samples than there are to be anchors are out of the domain.
        """
        assert features is not None
        if self.domain.shape[1] != features.shape[1]:
            raise ValueError(f"domain is {self.domain.shape[1]} wide, and the features {features.shape[1]}")
        domain = self.domain.to(features)
        own = nearest(domain, domain.split(_DOMAIN_ROWS), 2, "euclidean")[0][:, 1]
        away = nearest(features, domain.split(_DOMAIN_ROWS), 1, "euclidean")[0][:, 0]
        outside = (away > own.quantile(self.quantile)).nonzero()[:, 0].tolist()
        if len(outside) < count:
            raise ValueError(
                f"{len(outside)} of {len(samples)} samples are out of the domain, and {count} anchors are wanted; give "
                "samples from elsewhere"
            )
        return _shuffled(samples, outside, self.seed)[:count]


def _shuffled(samples: Samples, places: Sequence[int], seed: int) -> list[int]:
    return sorted(places, key=lambda place: chance(seed, samples.ids[place]))
