"""Similarity functions between vectors and anchors, and their invariances."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.options import Configured, Count, Within
from hf_stitch.papers import MOSCHELLA_2023, Paper

Invariances = tuple[Literal["orthogonal", "scaling", "invertible", "permutation", "translation"], ...]
Bound = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Similarity(Configured, ABC):
    """Base class of similarities between vectors and anchors: frozen dataclasses with their options as fields.

    The options are checked against their annotations (:class:`hf_stitch.options.Configured`). A similarity may also be
    a distance: relative representations only need equal values for equal vectors.

    Attributes:
        title: Name in text.
        papers: Papers that define the similarity.
        invariances: Transformations of vectors and anchors *together* that do not change the values:
            ``"orthogonal"`` and ``"invertible"`` maps, ``"scaling"`` by a positive number, ``"permutation"`` of the
            features, ``"translation"`` by a vector. Implied invariances are listed too.

    Example:
        >>> from hf_stitch import registries
        >>> cosine = registries.similarities.build("cosine")
        >>> cosine(torch.tensor([3.0, 4.0]), torch.eye(2))
        tensor([0.6000, 0.8000])
    """

    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    invariances: ClassVar[Invariances]

    @abstractmethod
    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors; computations that depend only on the anchors are done once.

        Args:
            anchors: ``(k, d)``, float32 or float64; the rows must have the same dtype.

        Returns:
            Function from rows ``(n, d)`` to similarities ``(n, k)``; it maps each row independently.
        """

    def __call__(self, x: Tensor, anchors: Tensor) -> Tensor:
        """Compute the similarity of every vector to every anchor."""
        if anchors.ndim != 2 or not len(anchors) or x.shape[-1:] != anchors.shape[1:]:
            raise ValueError(
                f"{self.name}: anchors must have the shape (k, {x.shape[-1] if x.ndim else 'd'}), got "
                f"{tuple(anchors.shape)} for vectors {tuple(x.shape)}"
            )
        if not x.is_floating_point() or x.dtype != anchors.dtype:
            raise ValueError(
                f"{self.name}: vectors and anchors must have the same floating-point dtype, got {x.dtype} and "
                f"{anchors.dtype}"
            )
        rows = computable(x).reshape(-1, x.shape[-1])
        return self.against(computable(anchors))(rows).to(x.dtype).reshape(*x.shape[:-1], len(anchors))


def computable(x: Tensor) -> Tensor:
    """Convert dtypes narrower than float32 to float32."""
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
    invariances: ClassVar[Invariances] = ("orthogonal", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        return lambda x: x @ anchors.T


@dataclasses.dataclass(frozen=True)
class Cosine(Similarity):
    """The cosine ``⟨x, a⟩ / (‖x‖ ‖a‖)`` (Moschella et al. 2023, §3).

    A zero vector or anchor raises ``ValueError``, because its direction is undefined.

    Example:
        >>> Cosine()(torch.tensor([3.0, 4.0]), torch.eye(2))
        tensor([0.6000, 0.8000])
    """

    name: ClassVar[str] = "cosine"
    title: ClassVar[str] = "cosine"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)
    invariances: ClassVar[Invariances] = ("orthogonal", "scaling", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        unit = _unit(anchors, self.name, "anchor")
        return lambda x: _unit(x, self.name, "vector") @ unit.T


@dataclasses.dataclass(frozen=True)
class Angular(Similarity):
    """The angle between x and a, in radians from 0 to π.

    Computed as ``2 atan2(‖x̂ - â‖, ‖x̂ + â‖)`` (Kahan 2006, "How futile are mindless assessments of roundoff…", §12).
    Unlike the arccosine of the cosine, it is accurate and has a finite gradient at angles near 0 and π.

    Example:
        >>> Angular()(torch.tensor([0.0, 2.0]), torch.eye(2))
        tensor([1.5708, 0.0000])
    """

    name: ClassVar[str] = "angular"
    title: ClassVar[str] = "angular similarity"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)
    invariances: ClassVar[Invariances] = ("orthogonal", "scaling", "permutation")

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        unit = _unit(anchors, self.name, "anchor")

        def angles(x: Tensor) -> Tensor:
            x = _unit(x, self.name, "vector")
            return 2 * torch.atan2(_distances(x, unit), _distances(x, -unit))

        return angles


@dataclasses.dataclass(frozen=True)
class Lp(Similarity):
    """The distance ``‖x - a‖ₚ``.

    It is invariant to rotations only for p = 2.

    Attributes:
        p: Order of the norm, at least 1; ``math.inf`` is the maximum norm.

    Example:
        >>> Lp(p=1)(torch.tensor([3.0, 4.0]), torch.zeros(1, 2))
        tensor([7.])
    """

    name: ClassVar[str] = "lp"
    title: ClassVar[str] = "negative Lp distance"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)

    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.p, str) and self.p == "inf":  # from to_dict, because JSON does not have infinity
            object.__setattr__(self, "p", math.inf)
        super().__post_init__()
        if not self.p >= 1:
            raise ValueError(f"p must be a number >= 1 or math.inf, got {self.p!r}")

    @property
    def invariances(self) -> Invariances:  # type: ignore[override]
        """Translations and permutations; for p = 2 all isometries."""
        return ("orthogonal", "permutation", "translation") if self.p == 2 else ("permutation", "translation")

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        return lambda x: _distances(x, anchors, self.p)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as in ``Similarity``; infinity is written as ``"inf"``."""
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
    invariances: ClassVar[Invariances] = ("orthogonal", "permutation", "translation")

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        return lambda x: _distances(x, anchors)


@dataclasses.dataclass(frozen=True)
class ChangeOfBasis(Similarity):
    """The coordinates of x with respect to the anchors: the c of minimum norm with ``Σ cⱼ aⱼ = x``.

    The anchors must span the space; others raise ``ValueError``, because they are invariant only to orthogonal maps and
    scaling. With spanning anchors, the coordinates are invariant to every invertible linear map (and to every affine
    map, if vectors and anchors are centred by the mean of the anchors).

    Attributes:
        rcond: The anchors span the space if their smallest singular value exceeds ``rcond`` times the largest, in [0,
            1). None means the eps of the dtype times k.

    Example:
        >>> ChangeOfBasis()(torch.tensor([2.0, 6.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([2., 3.])
    """

    name: ClassVar[str] = "change_of_basis"
    title: ClassVar[str] = "change of basis"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)
    invariances: ClassVar[Invariances] = ("invertible", "orthogonal", "scaling", "permutation")

    rcond: Annotated[float, Within(0, 1, below=True)] | None = None

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        k, d = anchors.shape
        remedy = "use more or more diverse anchors, or another similarity"
        if k < d:
            raise ValueError(f"{self.name}: {k} anchors cannot span {d} features; {remedy}")
        # Of A = QR, the shortest c with Aᵀc = x is Q R⁻ᵀ x.
        q, r = torch.linalg.qr(anchors)
        singular = torch.linalg.svdvals(r.detach())
        threshold = k * torch.finfo(anchors.dtype).eps if self.rcond is None else self.rcond
        rank = int((singular > threshold * singular[0]).sum())
        if rank < d:
            raise ValueError(
                f"{self.name}: the {k} anchors span {rank} of {d} dimensions (centring reduces the rank by one); "
                f"{remedy}"
            )
        return lambda x: torch.linalg.solve_triangular(r, x, upper=True, left=False) @ q.T


@dataclasses.dataclass(frozen=True)
class Geodesic(Similarity):
    """The length of the shortest path from x to an anchor through neighbouring anchors.

    The graph connects each anchor to its nearest anchors by Euclidean distance, as in Isomap (Tenenbaum et al. 2000). A
    vector enters the graph through its nearest anchors, so the values of an anchor are its graph distances to all
    anchors. Gradients reach the vectors, not the anchors.

    Attributes:
        neighbours: Number of nearest anchors to connect each anchor and each vector to, at least 1.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
        >>> Geodesic(neighbours=1)(torch.tensor([0.0, 0.0]), corner)
        tensor([0., 1., 2.])
    """

    name: ClassVar[str] = "geodesic"
    title: ClassVar[str] = "geodesic distance"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)
    invariances: ClassVar[Invariances] = ("orthogonal", "permutation", "translation")

    neighbours: Count = 10

    def against(self, anchors: Tensor) -> Bound:
        """Bind the similarity to anchors, as in ``Similarity``."""
        if len(anchors) <= self.neighbours:
            raise ValueError(
                f"{self.name}: neighbours must be below the number of anchors, got neighbours={self.neighbours} and "
                f"{len(anchors)} anchors"
            )
        paths = self._paths(anchors.detach())

        def lengths(x: Tensor) -> Tensor:
            distances = _distances(x, anchors.detach())
            steps, gates = distances.topk(self.neighbours, dim=1, largest=False)
            best = steps[:, :1] + paths[gates[:, 0]]
            for gate in range(1, self.neighbours):
                best = torch.minimum(best, steps[:, gate, None] + paths[gates[:, gate]])
            return best

        return lengths

    def _paths(self, anchors: Tensor) -> Tensor:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import shortest_path

        distances = _distances(anchors, anchors)
        k, near = len(anchors), self.neighbours
        # An anchor is not its own neighbour, and a distance of 0 to another anchor must not become a missing edge.
        without_self = distances.clone().fill_diagonal_(torch.inf)
        steps, ends = without_self.topk(near, dim=1, largest=False)
        starts = torch.arange(k).repeat_interleave(near)
        edges = steps.flatten().double().cpu().clamp_min(torch.finfo(torch.float64).tiny).numpy()
        # If two anchors are mutual neighbours, both edges have the same length and are not added up.
        edge_indices = starts.int().numpy(), ends.flatten().int().cpu().numpy()  # SciPy 1.14 takes int32 only
        graph = coo_array((edges, edge_indices), shape=(k, k)).tocsr()
        lengths = torch.from_numpy(shortest_path(graph, directed=False))
        if not lengths.isfinite().all():
            components = len(lengths.isfinite().unique(dim=0))
            raise ValueError(
                f"{self.name}: the graph of {k} anchors has {components} disconnected parts with neighbours={near}; "
                "raise neighbours, or use anchors that are closer together"
            )
        return lengths.to(anchors)


def _distances(x: Tensor, anchors: Tensor, p: float = 2.0) -> Tensor:
    """Compute distances from differences: inner products would lose half of the digits and depend on the batch size."""
    return torch.cdist(x, anchors, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _unit(rows: Tensor, name: str, label: str) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    # Compiled or exported code cannot raise errors that depend on values: a zero vector gives NaN there.
    if not torch.compiler.is_compiling() and bool((lengths == 0).any()):
        index = int((lengths[:, 0] == 0).nonzero()[0])
        raise ValueError(
            f"{name}: {label} {index} of {len(rows)} is 0, so its direction is undefined (with center=True, it equals "
            "the mean of the anchors); drop it, set center=True if it is off, or use a similarity that is defined for "
            "it (inner, euclidean)"
        )
    return rows / lengths
