"""Similarity functions: how a vector stands to the anchors, and what that does not depend on."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from hf_stitch.papers import MOSCHELLA_2023, Paper

Invariances = tuple[Literal["orthogonal", "scaling", "invertible", "permutation", "translation"], ...]
Bound = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Similarity(ABC):
    """A frozen dataclass whose fields are its options, each validated in ``__post_init__``.

    It may be a distance: what a relative representation needs is that equal vectors have equal values.

    Attributes:
        name: What the registry of similarities calls it.
        title: What it is called in prose.
        papers: Where it comes from.
        invariances: What vectors and anchors may be put through *together* without changing a value: ``"orthogonal"``
            and ``"invertible"`` maps, ``"scaling"`` by a positive number, ``"permutation"`` of the features,
            ``"translation"`` by a vector. An invariance implied by another is declared too.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()

    @property
    @abstractmethod
    def invariances(self) -> Invariances:
        """Which invariances it promises."""

    @abstractmethod
    def against(self, anchors: Tensor) -> Bound:
        """The similarities to these anchors as a function of rows ``(n, d)`` that gives ``(n, k)``.

        What depends on the anchors alone is computed here, once for any number of rows; every row is mapped by itself.

        Args:
            anchors: ``(k, d)``, float32 or float64; the rows must have their dtype.

        Raises:
            ValueError: The anchors will not do, or (from the function) a row has no similarity.
        """

    def __call__(self, x: Tensor, anchors: Tensor) -> Tensor:
        """The similarity of every vector to every anchor.

        Args:
            x: ``(..., d)``, real floating-point.
            anchors: ``(k, d)``, of the same dtype.

        Returns:
            ``(..., k)``, of the dtype of ``x``; bfloat16 and float16 are computed in float32. Differentiable.

        Raises:
            ValueError: Shapes or dtypes do not fit, the anchors will not do, or a vector has no similarity.
        """
        if anchors.ndim != 2 or not len(anchors) or x.shape[-1:] != anchors.shape[1:]:
            raise ValueError(
                f"{self.name}: anchors must have the shape (k, {x.shape[-1] if x.ndim else 'd'}) of the vectors, got "
                f"{tuple(anchors.shape)} for vectors {tuple(x.shape)}"
            )
        if not x.is_floating_point() or x.dtype != anchors.dtype:
            raise ValueError(
                f"{self.name}: vectors and anchors must have one floating-point dtype, got {x.dtype} and "
                f"{anchors.dtype}"
            )
        rows = computable(x).reshape(-1, x.shape[-1])
        return self.against(computable(anchors))(rows).to(x.dtype).reshape(*x.shape[:-1], len(anchors))

    def to_dict(self) -> dict[str, Any]:
        """The name and every option as JSON values; ``registries.similarities.build`` reads it."""
        return {"name": self.name, **dataclasses.asdict(self)}


def computable(x: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclasses.dataclass(frozen=True)
class Inner(Similarity):
    """The inner product ``⟨x, a⟩``.

    Example:
        >>> Inner()(torch.tensor([1.0, 2.0]), torch.eye(2))
        tensor([1., 2.])
    """

    name: ClassVar[str] = "inner"
    title: ClassVar[str] = "inner product"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    @property
    def invariances(self) -> Invariances:
        """Orthogonal maps."""
        return ("orthogonal", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        return lambda x: x @ anchors.T


@dataclasses.dataclass(frozen=True)
class Cosine(Similarity):
    """The cosine ``⟨x, a⟩ / (‖x‖ ‖a‖)`` (Moschella et al. 2023, §3).

    A vector or anchor of 0 is refused, as it has no direction.

    Example:
        >>> Cosine()(torch.tensor([3.0, 4.0]), torch.eye(2))
        tensor([0.6000, 0.8000])
    """

    name: ClassVar[str] = "cosine"
    title: ClassVar[str] = "cosine"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    @property
    def invariances(self) -> Invariances:
        """Angle-preserving maps; the length of each vector by itself does not matter either."""
        return ("orthogonal", "scaling", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        unit = _unit(anchors, self.name, "anchor")
        return lambda x: _unit(x, self.name, "vector") @ unit.T


@dataclasses.dataclass(frozen=True)
class Angular(Similarity):
    """The angle between x and a, in radians from 0 to π.

    Computed as ``2 atan2(‖x̂ - â‖, ‖x̂ + â‖)`` (Kahan 2006, "How futile are mindless assessments of roundoff…", §12),
    which is exact, and has a finite gradient, where the arccosine of the cosine has not: at angles near 0 and π.

    Example:
        >>> Angular()(torch.tensor([0.0, 2.0]), torch.eye(2))
        tensor([1.5708, 0.0000])
    """

    name: ClassVar[str] = "angular"
    title: ClassVar[str] = "angular similarity"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    @property
    def invariances(self) -> Invariances:
        """As of the cosine."""
        return ("orthogonal", "scaling", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        unit = _unit(anchors, self.name, "anchor")

        def angles(x: Tensor) -> Tensor:
            x = _unit(x, self.name, "vector")
            return 2 * torch.atan2(_distances(x, unit), _distances(x, -unit))

        return angles


@dataclasses.dataclass(frozen=True)
class Lp(Similarity):
    """The distance ``‖x - a‖ₚ``.

    Rotations change it unless p is 2.

    Attributes:
        p: 1 or more, ``math.inf`` for the largest difference of a feature.

    Example:
        >>> Lp(p=1)(torch.tensor([3.0, 4.0]), torch.zeros(1, 2))
        tensor([7.])
    """

    name: ClassVar[str] = "lp"
    title: ClassVar[str] = "negative Lp distance"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.p, str) and self.p == "inf":  # as to_dict wrote it: JSON has no infinity
            object.__setattr__(self, "p", math.inf)
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not self.p >= 1:
            raise ValueError(f"p must be a number >= 1 or math.inf, got {self.p!r}")

    @property
    def invariances(self) -> Invariances:
        """Translations and permutations; with p = 2 isometries."""
        return ("orthogonal", "permutation", "translation") if self.p == 2 else ("permutation", "translation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        return lambda x: _distances(x, anchors, self.p)

    def to_dict(self) -> dict[str, Any]:
        """As in ``Similarity``; infinity as ``"inf"``."""
        return {"name": self.name, "p": "inf" if self.p == math.inf else self.p}


@dataclasses.dataclass(frozen=True)
class Euclidean(Similarity):
    """The distance ``‖x - a‖``.

    Example:
        >>> Euclidean()(torch.tensor([3.0, 4.0]), torch.zeros(1, 2))
        tensor([5.])
    """

    name: ClassVar[str] = "euclidean"
    title: ClassVar[str] = "negative Euclidean distance"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    @property
    def invariances(self) -> Invariances:
        """Isometries."""
        return ("orthogonal", "permutation", "translation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        return lambda x: _distances(x, anchors)


@dataclasses.dataclass(frozen=True)
class ChangeOfBasis(Similarity):
    """The coordinates of x in the anchors: the c of least norm with ``Σ cⱼ aⱼ = x``.

    Anchors that span the space make it invariant to every invertible linear map (to every affine one, if both sides are
    centred by the anchors' mean); others would leave only orthogonal maps and scaling, and are refused.

    Attributes:
        rcond: The anchors span if their least singular value exceeds ``rcond`` times the largest, in [0, 1). None:
            ``max(k, d)`` times the rounding of the dtype.

    Example:
        >>> ChangeOfBasis()(torch.tensor([2.0, 6.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([2., 3.])
    """

    name: ClassVar[str] = "change_of_basis"
    title: ClassVar[str] = "change of basis"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    rcond: float | None = None

    def __post_init__(self) -> None:
        if self.rcond is not None and not (isinstance(self.rcond, float | int) and 0 <= self.rcond < 1):
            raise ValueError(f"rcond must be None or in [0, 1), got {self.rcond!r}")

    @property
    def invariances(self) -> Invariances:
        """Invertible linear maps."""
        return ("invertible", "orthogonal", "scaling", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        k, d = anchors.shape
        remedy = "take more or more varied anchors, or another similarity"
        if k < d:
            raise ValueError(f"{self.name}: {k} anchors cannot span {d} features; {remedy}")
        # Of A = QR, the shortest c with Aᵀc = x is Q R⁻ᵀ x.
        q, r = torch.linalg.qr(anchors)
        singular = torch.linalg.svdvals(r.detach())
        threshold = k * torch.finfo(anchors.dtype).eps if self.rcond is None else self.rcond
        rank = int((singular > threshold * singular[0]).sum())
        if rank < d:
            raise ValueError(
                f"{self.name}: the {k} anchors span {rank} of {d} dimensions (centred anchors one less than others); "
                f"{remedy}"
            )
        return lambda x: torch.linalg.solve_triangular(r, x, upper=True, left=False) @ q.T


@dataclasses.dataclass(frozen=True)
class Geodesic(Similarity):
    """The length of the shortest path from x to a by way of anchors that are neighbours.

    The graph joins each anchor with its nearest ones, in Euclidean distance, as Isomap does (Tenenbaum et al. 2000); a
    vector enters it through its own nearest anchors. An anchor is thus at its graph distance from the others. Gradients
    reach the vectors, not the anchors.

    Attributes:
        neighbours: How many nearest anchors an anchor is joined with, and a vector enters through; at least 1.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
        >>> Geodesic(neighbours=1)(torch.tensor([0.0, 0.0]), corner)
        tensor([0., 1., 2.])
    """

    name: ClassVar[str] = "geodesic"
    title: ClassVar[str] = "geodesic distance"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    neighbours: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.neighbours, int) or isinstance(self.neighbours, bool) or self.neighbours < 1:
            raise ValueError(f"neighbours must be an integer >= 1, got {self.neighbours!r}")

    @property
    def invariances(self) -> Invariances:
        """Isometries."""
        return ("orthogonal", "permutation", "translation")

    def against(self, anchors: Tensor) -> Bound:
        """As in ``Similarity``."""
        if len(anchors) <= self.neighbours:
            raise ValueError(
                f"{self.name}: neighbours must be below the number of anchors, got neighbours={self.neighbours} and "
                f"{len(anchors)} anchors"
            )
        paths = self._paths(anchors.detach())

        def lengths(x: Tensor) -> Tensor:
            apart = _distances(x, anchors.detach())
            steps, gates = apart.topk(self.neighbours, dim=1, largest=False)
            best = steps[:, :1] + paths[gates[:, 0]]
            for gate in range(1, self.neighbours):
                best = torch.minimum(best, steps[:, gate, None] + paths[gates[:, gate]])
            return best

        return lengths

    def _paths(self, anchors: Tensor) -> Tensor:
        apart = _distances(anchors, anchors)
        k, near = len(anchors), self.neighbours
        # The anchor itself is no neighbour, nor is distance 0 to another an absent edge.
        others = apart.clone().fill_diagonal_(torch.inf)
        steps, ends = others.topk(near, dim=1, largest=False)
        starts = torch.arange(k).repeat_interleave(near)
        edges = steps.flatten().double().cpu().clamp_min(torch.finfo(torch.float64).tiny).numpy()
        # Where two anchors are neighbours of each other, both edges have the same length: no sum of duplicates.
        graph = coo_array((edges, (starts.numpy(), ends.flatten().cpu().numpy())), shape=(k, k)).tocsr()
        lengths = torch.from_numpy(shortest_path(graph, directed=False))
        if not lengths.isfinite().all():
            parts = len(lengths.isfinite().unique(dim=0))
            raise ValueError(
                f"{self.name}: the graph of {k} anchors falls into {parts} parts with neighbours={near}, and there is "
                "no path between them; raise neighbours, or take anchors that lie closer"
            )
        return lengths.to(anchors)


def _distances(x: Tensor, anchors: Tensor, p: float = 2.0) -> Tensor:
    """Of differences: by inner products they would lose half of the digits, and depend on the size of the batch."""
    return torch.cdist(x, anchors, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _unit(rows: Tensor, name: str, what: str) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    # What is compiled or exported has no errors that depend on values: a zero vector gives NaN there.
    if not torch.compiler.is_compiling() and bool((lengths == 0).any()):
        place = int((lengths[:, 0] == 0).nonzero()[0])
        raise ValueError(
            f"{name}: {what} {place} of {len(rows)} is 0 and has no direction; leave it out, centre both sides, or use "
            "a similarity that does without (inner, euclidean)"
        )
    return rows / lengths
