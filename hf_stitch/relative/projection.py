"""The relative projection: a stitch that maps a vector to its similarities to anchors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.data import Id, check_same_order
from hf_stitch.options import Count, Positive, checked
from hf_stitch.papers import MOSCHELLA_2023, Paper
from hf_stitch.printing import warn
from hf_stitch.registry import registries
from hf_stitch.relative.similarities import Bound, Similarity, computable
from hf_stitch.stitches import Stitch
from hf_stitch.stitches.base import as_dtype

Aggregate = Literal["concatenate", "mlp_sum"]
Normalise = Literal["l2", "layer"]
_ALIKE = 100
"""Two rows are equal if the norm of their difference is at most this multiple of eps times their norm."""
_NEARBY = 4
"""Number of neighbours along a direction to compare."""
_Named = str | Similarity | Mapping[str, Any]


@runtime_checkable
class Array(Protocol):
    """A tensor, an array, or an object with the same interface, such as an h5py or zarr dataset."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


class RelativeProjection(Stitch):
    """Relative representation: ``x ↦ (sim(x, a₁), …, sim(x, aₖ))`` (Moschella et al. 2023, eq. 1).

    Several similarities form a product of invariances (Cannistraci et al. 2024). Each similarity, on each of the
    ``subspaces`` equal parts of the features, defines a space of k values. Spaces are concatenated (all subspaces of
    the first similarity, then of the next), or summed after one MLP per space.

    The steps are: centring, rounding of the features, similarities, rounding, normalisation, aggregation. Each vector
    is mapped independently. Rounding has the gradient of the identity (straight-through; Bengio et al. 2013).

    Attributes:
        anchors: ``(k, in_features)``, a persistent buffer without gradients; zeros until loaded.
        similarities: Similarities in the order of the spaces.
        ids: Ids of the samples; ``None`` if unknown, for example after loading.

    Args:
        in_features: Width d of the vectors.
        anchors: Number k of anchors.
        similarities: A name, a similarity, a dict of ``name`` and options, or several of these.
        center: Whether to subtract the mean of the anchors from vectors and anchors, for invariance to translation.
        feature_step: Round features (after centring) to multiples of this value; None: no rounding.
        similarity_step: Round similarities to multiples of this value; None: no rounding.
        normalise: Normalisation of each space: ``"l2"`` to length 1, ``"layer"`` to mean 0 and variance 1 over the
            anchors, None for no normalisation.
        subspaces: Number of equal parts of consecutive features to split vectors and anchors into. Above 1, maps that
            mix the parts change the result.
        aggregate: ``"concatenate"``, or ``"mlp_sum"``: the sum of ``tanh(linear(layer_norm(space)))``, k values. The
            weights must be trained with the following layers (as in the authors' code: latentis,
            ``NonLinearSumAggregation``).
        dtype: Dtype of anchors and weights.

    Example:
        >>> projection = RelativeProjection.of(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), similarities=["cosine", "inner"])
        >>> projection(torch.tensor([[3.0, 4.0]]))
        tensor([[ 0.6000,  0.8000,  6.0000, 12.0000]])
    """

    name: ClassVar[str] = "relative"
    title: ClassVar[str] = "its similarities to anchors, and nothing fitted,"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023,)
    anchors: Tensor
    ids: tuple[Id, ...] | None = None

    @checked
    def __init__(
        self,
        in_features: int,
        anchors: Count,
        similarities: _Named | Iterable[_Named] = "cosine",
        *,
        center: bool = False,
        feature_step: Positive | None = None,
        similarity_step: Positive | None = None,
        normalise: Normalise | None = None,
        subspaces: Count = 1,
        aggregate: Aggregate = "concatenate",
        dtype: torch.dtype | str = torch.float32,
    ) -> None:
        similarity_list = [similarities] if isinstance(similarities, str | Similarity | Mapping) else list(similarities)
        if not similarity_list:
            raise ValueError("a relative projection requires at least one similarity, got none")
        if in_features % subspaces:
            raise ValueError(f"subspaces must divide the {in_features} features, got {subspaces}")
        spaces = len(similarity_list) * subspaces
        super().__init__(in_features, anchors * (spaces if aggregate == "concatenate" else 1))
        self.similarities = tuple(registries.similarities.build(similarity) for similarity in similarity_list)
        self.center, self.feature_step, self.similarity_step = center, feature_step, similarity_step
        self.normalise, self.subspaces, self.aggregate = normalise, subspaces, aggregate
        self.register_buffer("anchors", torch.zeros(anchors, in_features, dtype=as_dtype(dtype)))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(anchors, dtype=as_dtype(dtype)),
                nn.Linear(anchors, anchors, dtype=as_dtype(dtype)),
                nn.Tanh(),
            )
            for _ in range(spaces if aggregate == "mlp_sum" else 0)
        )

    @classmethod
    def of(
        cls,
        anchors: Tensor,
        similarities: _Named | Iterable[_Named] = "cosine",
        *,
        ids: Sequence[Id] | None = None,
        **options: Any,
    ) -> Self:
        """Create a projection from a copy of anchors.

        Args:
            anchors: ``(k, d)``: the vectors of the anchors, floating point.
            similarities: As for the class.
            ids: Ids of the samples (``AnchorSet.ids``), for comparison in :meth:`with_anchors`. They are not saved.
            **options: As for the class, except ``dtype``: the projection has the dtype of the anchors.
        """
        check_anchors(anchors)
        projection = cls(anchors.shape[1], len(anchors), similarities, dtype=anchors.dtype, **options)
        projection.ids = None if ids is None else tuple(ids)
        return projection.to(anchors.device)._set_anchors(anchors)

    @torch.no_grad()
    def with_anchors(self, anchors: Tensor, ids: Sequence[Id] | None = None) -> RelativeProjection:
        """Return the same projection for a new encoder, with copies of all weights except the anchors.

        The layers after the projection then work with that encoder without training.

        Args:
            anchors: ``(k, d)``: representations of the same samples by the new encoder, in the same order; d may
                differ.
            ids: Ids of these samples (``AnchorSet.ids``), compared with the ids of the projection. ``None`` (default)
                gives a warning, because wrong samples would silently make the following layers useless.

        Example:
            >>> x, anchors, ids = torch.randn(5, 3), torch.randn(4, 3), range(4)
            >>> turn = torch.linalg.qr(torch.randn(3, 3)).Q
            >>> one = RelativeProjection.of(anchors, ids=ids)
            >>> torch.allclose(one.with_anchors(anchors @ turn, ids)(x @ turn), one(x), atol=1e-5)
            True
        """
        check_anchors(anchors)
        if ids is None:
            warn(
                "with_anchors cannot check that these are the samples of the projection, in the same order: pass ids=, "
                "for example AnchorSet.ids, to with_anchors and to RelativeProjection.of"
            )
        elif self.ids is not None:
            try:
                check_same_order(self.ids, tuple(ids))
            except ValueError as error:
                raise ValueError(f"these are not the anchors of the projection: {error}") from error
        if len(anchors) != len(self.anchors):
            raise ValueError(
                f"the projection has {len(self.anchors)} anchors, got {len(anchors)}; "
                "pass the representations of the same samples in the same order"
            )
        options = {**self.config(), "in_features": anchors.shape[1]}
        projection = type(self)(**options).to(self.anchors.device)
        projection.mlps.load_state_dict(self.mlps.state_dict())
        projection.fitted = dict(self.fitted)
        projection.ids = self.ids if ids is None else tuple(ids)
        return projection._set_anchors(anchors)

    def transform(self, x: Tensor) -> Tensor:
        """Compute the relative representation, in at least float32.

        See :meth:`hf_stitch.stitches.Stitch.transform`.
        """
        return self._bind(x.dtype)(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)

    @checked
    def stream(self, rows: Array, chunk: Count = 4096) -> Iterator[Tensor]:
        """Compute the relative representations of many rows in chunks, with constant memory and without gradients.

        Computations that depend only on the anchors are done once.

        Args:
            rows: ``(n, d)``: a tensor, an array (possibly memory-mapped), or an h5py or zarr dataset; one chunk is read
                at a time.
            chunk: Rows per chunk.

        Yields:
            Tensors ``(at most chunk, out_features)``, in the dtype and on the device of the anchors.

        Example:
            >>> projection = RelativeProjection.of(torch.eye(3))
            >>> [part.shape for part in projection.stream(np.ones((10, 3), np.float32), chunk=8)]
            [torch.Size([8, 3]), torch.Size([2, 3])]
        """
        if len(rows.shape) != 2 or rows.shape[1] != self.in_features:
            raise ValueError(f"rows must have the shape (n, {self.in_features}), got {tuple(rows.shape)}")
        return self._stream(rows, chunk)

    def _stream(self, rows: Array, chunk: int) -> Iterator[Tensor]:
        with torch.no_grad():
            project = self._bind(self.anchors.dtype)
        for start in range(0, len(rows), chunk):
            chunk_rows = rows[start : start + chunk]
            # Copy, because torch does not support read-only arrays.
            chunk_rows = chunk_rows if isinstance(chunk_rows, Tensor) else torch.from_numpy(np.array(chunk_rows))
            with torch.no_grad():
                yield project(chunk_rows.to(self.anchors))

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON values."""
        return {
            "in_features": self.in_features,
            "anchors": len(self.anchors),
            "similarities": [similarity.to_dict() for similarity in self.similarities],
            "center": self.center,
            "feature_step": self.feature_step,
            "similarity_step": self.similarity_step,
            "normalise": self.normalise,
            "subspaces": self.subspaces,
            "aggregate": self.aggregate,
            "dtype": str(self.anchors.dtype).removeprefix("torch."),
        }

    def _set_anchors(self, anchors: Tensor) -> Self:
        """Copy the anchors and raise an error if a similarity does not accept them."""
        self.anchors.copy_(anchors.detach())
        self._bind(self.anchors.dtype)
        return self

    def _bind(self, dtype: torch.dtype) -> Bound:
        """Return a function that projects rows ``(n, d)`` of this dtype, bound to the current anchors."""
        anchors = self.anchors.to(torch.promote_types(dtype, torch.float32))
        mean = anchors.mean(0) if self.center else 0.0

        def subspaces_of(rows: Tensor) -> Sequence[Tensor]:
            return _round(rows - mean, self.feature_step).chunk(self.subspaces, dim=1)

        bound_similarities = [
            [similarity.against(subspace) for subspace in subspaces_of(anchors)] for similarity in self.similarities
        ]

        def project(rows: Tensor) -> Tensor:
            subspaces = subspaces_of(computable(rows))
            spaces = [
                self._normalised(_round(space(subspace), self.similarity_step))
                for similarity in bound_similarities
                for space, subspace in zip(similarity, subspaces, strict=True)
            ]
            if self.aggregate == "concatenate":
                return torch.cat(spaces, 1).to(dtype)
            mapped = [mlp(space.to(self.anchors.dtype)) for mlp, space in zip(self.mlps, spaces, strict=True)]
            return torch.stack(mapped).sum(0).to(dtype)

        return project

    def _normalised(self, space: Tensor) -> Tensor:
        if self.normalise == "l2":
            return functional.normalize(space, dim=1)
        if self.normalise == "layer":
            # Unlike in LayerNorm, no constant is added to the variance, because cosines close to 1 hardly vary.
            return functional.normalize(space - space.mean(1, keepdim=True), dim=1) * math.sqrt(space.shape[1])
        return space


def check_anchors(anchors: Tensor) -> None:
    """Raise an error unless anchors are a matrix of finite vectors that differ by more than float32 rounding error.

    Two anchors give a warning.
    """
    if anchors.ndim != 2 or not anchors.numel() or not anchors.is_floating_point():
        raise ValueError(
            f"anchors must be floating-point vectors of shape (k, d), got {anchors.dtype} of {tuple(anchors.shape)}"
        )
    if len(anchors) == 1:
        raise ValueError("a relative representation requires several anchors, got 1")
    if len(anchors) == 2:
        warn("2 anchors describe a vector by two numbers; use at least as many as the features have dimensions")
    is_finite = anchors.isfinite().all(1)
    if not is_finite.all():
        raise ValueError(
            f"anchor {int(is_finite.logical_not().nonzero()[0])} contains NaN or infinity; choose another sample"
        )
    repeated = _repeated(computable(anchors.detach()))
    if 0 < len(repeated) == len(anchors) - 1:
        raise ValueError(f"all {len(anchors)} anchors have the same representation; is the layer dead?")
    if repeated:
        first, second = min(sorted(pair) for pair in repeated.items())
        raise ValueError(
            f"anchors {first} and {second} have the same representation, so the second is redundant "
            f"({len(anchors) - len(repeated)} of {len(anchors)} differ); choose different samples, or another layer"
        )


def _repeated(rows: Tensor) -> dict[int, int]:
    """Map rows to earlier rows that they repeat up to rounding error, for example of another batch size.

    Equal rows are neighbours when all rows are sorted along any direction, so only neighbours are compared.
    """
    direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows)
    order = (rows @ direction).argsort()
    tolerance = _ALIKE * torch.finfo(rows.dtype).eps * rows.norm(dim=1)
    repeated: dict[int, int] = {}
    for shift in range(1, min(_NEARBY + 1, len(rows))):
        a, b = order[:-shift], order[shift:]
        is_equal = (rows[a] - rows[b]).norm(dim=1) <= torch.maximum(tolerance[a], tolerance[b])
        for first, second in zip(a[is_equal].tolist(), b[is_equal].tolist(), strict=True):
            repeated.setdefault(second, first)
    return repeated


def _round(values: Tensor, step: float | None) -> Tensor:
    """Round to multiples of a step, with the gradient of the identity."""
    return values if step is None else values + ((values / step).round() * step - values).detach()
