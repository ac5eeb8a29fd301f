"""Centred kernel alignment (Cortes et al. 2012; Kornblith et al. 2019)."""

from __future__ import annotations

from typing import Annotated, Any, Self

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._routes import Route, from_hsic, of_grams
from hf_stitch.metrics._rows import RowMoments, Rows, centred, check_count, check_variation, of_rows, pairwise, upper
from hf_stitch.metrics.base import ActivationMetric, FeaturesMetric, MomentsMetric, Operand
from hf_stitch.options import Positive, Within, checked
from hf_stitch.papers import KORNBLITH_2019, NGUYEN_2021
from hf_stitch.statistics.grams import HSIC, MinibatchGrams, unbiased_hsic
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.statistics.spectrum import SecondMoments

_LEAST_UNBIASED = 4  # smallest number of rows for unbiased HSIC
_UNBIASED = ", as the unbiased estimate of HSIC is undefined below"


@of_rows
def linear_cka(x: Tensor, y: Tensor, *, debiased: bool = False) -> Tensor:
    """Linear centred kernel alignment: ``‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`` for centred X and Y (Kornblith et al. 2019, §3).

    The value is in [0, 1], or in [-1, 1] if debiased, and 1 if the sides differ only by an orthogonal map, a scaling
    and a translation. The function computes either d × d or n × n products, whichever are smaller; both give the same
    value.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        debiased: Whether to use the unbiased estimator of HSIC (Song et al. 2012). For independent rows the value is
            then close to 0 at any width, and may be negative. Each row must be a different sample, not a position of a
            sample.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 8)
        >>> round(linear_cka(x, 3 * x.flip(1)).item(), 6)
        1.0
    """
    return _linear_cka(RowMoments(x, y), debiased=debiased)


def _linear_cka(moments: SecondMoments, *, debiased: bool = False) -> Tensor:
    if debiased and not isinstance(moments, RowMoments):
        raise ValueError("debiased linear_cka requires LayerMoments, got Moments; use LayerMoments.hsic")
    check_variation("linear_cka", moments)
    if debiased:
        check_count("debiased linear_cka", moments.n, _LEAST_UNBIASED, _UNBIASED)
    if isinstance(moments, RowMoments):
        return _cosine("linear_cka", _unbiased(moments) if debiased else _squares(moments))
    return _cosine("linear_cka", _squares_of(moments))


@built_in("linear_cka")
class LinearCKA(MomentsMetric):
    """Streaming ``linear_cka``, from ``LayerMoments`` if debiased and from ``Moments`` otherwise.

    Args:
        **options: Options of ``linear_cka``: ``debiased``.

    Example:
        >>> import torch
        >>> x = torch.randn(60, 8)
        >>> metric = LinearCKA(debiased=True)
        >>> for batch in x.split(16):
        ...     _ = metric.update(batch, batch)
        >>> round(metric.compute(), 6)
        1.0
    """

    papers = (KORNBLITH_2019,)
    function = staticmethod(linear_cka)
    formula = staticmethod(_linear_cka)
    _by_axes = True
    differentiable = True
    _layers: LayerMoments | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["debiased"]:
            self.statistic, self.range = "debiased", (-1.0, 1.0)
            self.independent_rows = self.counts_rows = True

    @property
    def routes(self) -> tuple[Route, ...]:
        """HSIC of all pairs at once, from co-moments (d × d) or from Gram matrices (n × n)."""
        debiased = self.options["debiased"]
        return (
            from_hsic("moments", "moments", lambda moments: moments.hsic(debiased)),
            from_hsic("grams", "rows", lambda rows: rows.grams.hsic(debiased), after=of_grams),
        )

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return 4 if debiased, the smallest number of rows for unbiased HSIC; 2 otherwise."""
        return _LEAST_UNBIASED if self.options["debiased"] else 2

    def sample_matrix(self, rows: Tensor) -> Tensor:
        """Return the centred Gram matrix; U-centred if debiased (Székely and Rizzo 2014, section 3)."""
        rows = rows - rows.mean(0)
        gram = rows @ rows.T
        return _u_centred(gram) if self.options["debiased"] else gram

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, as in ``ActivationMetric``."""
        if not self.options["debiased"]:
            return super().update(x_rows, y_rows)
        x, y = self._paired(x_rows, y_rows)
        if self._layers is None:
            self._layers = LayerMoments([x.mean(0)], [y.mean(0)])
        self._layers.update([x], [y])
        return self

    def compute(self) -> float:
        """Compute the value of all rows so far, as in ``ActivationMetric``."""
        if not self.options["debiased"]:
            return super().compute()
        layers = self._require(self._layers)
        check_variation("linear_cka", layers.moments(0, 0))
        check_count("debiased linear_cka", layers.n, _LEAST_UNBIASED, _UNBIASED)
        return _of_pair("linear_cka", layers.hsic(debiased=True))


@of_rows
def minibatch_cka(x: Tensor, y: Tensor, *, batch_size: Annotated[int, Within(4)] = 256) -> Tensor:
    """Minibatch linear CKA, in [-1, 1]: unbiased HSIC summed over batches of consecutive rows (Nguyen et al. 2021).

    This estimator differs from debiased ``linear_cka``: the value depends on the order of the rows and on the batch
    size. It does not depend on the sizes of the updates when the rows are streamed. Each batch is weighted by its size;
    up to 3 remaining rows join the last batch.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        batch_size: Rows per batch, at least 4.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 8)
        >>> round(minibatch_cka(x, 2 * x, batch_size=10).item(), 6)
        1.0
    """
    sums, rest = _full_batches(x, y, batch_size)
    return _cosine("minibatch_cka", sums + _batch(*rest))


@built_in("minibatch_cka")
class MinibatchCKA(ActivationMetric):
    """Streaming ``minibatch_cka``; it stores less than two batches of rows."""

    papers = (NGUYEN_2021,)
    function = staticmethod(minibatch_cka)
    statistic = "grams"
    differentiable = True
    independent_rows = counts_rows = True
    minibatched = True
    _grams: MinibatchGrams | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        """HSIC of all pairs at once, from the Gram matrices of minibatches."""
        size = {"size": self.options["batch_size"]}
        return (from_hsic("minibatches", "minibatches", lambda grams: grams.hsic(), options=size),)

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return the smallest number of rows for unbiased HSIC."""
        return _LEAST_UNBIASED

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, as in ``ActivationMetric``."""
        x, y = (side.detach() for side in self._paired(x_rows, y_rows))
        if self._grams is None:
            self._grams = MinibatchGrams(self.options["batch_size"], 1, 1, device=x.device)
        self._grams.update([x.clone()], [y.clone()])
        return self

    def compute(self) -> float:
        """Compute the value of all rows so far, as in ``ActivationMetric``."""
        return _of_pair(self.name, self._require(self._grams).hsic())


@of_rows
def rbf_cka(x: Tensor, y: Tensor, *, bandwidth: Positive = 0.5) -> Tensor:
    """CKA of Gaussian kernels ``exp(-‖xᵢ - xⱼ‖² / 2σ²)`` (Kornblith et al. 2019, §3), biased, in [0, 1].

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        bandwidth: σ as a multiple of the median distance between two rows, computed for each side separately.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 8)
        >>> round(rbf_cka(x, x).item(), 6)
        1.0
    """
    check_variation("rbf_cka", RowMoments(x, y))
    kernel_x, kernel_y = (centred(_rbf(side, rows, bandwidth)) for side, rows in (("x", x), ("y", y)))
    return _cosine("rbf_cka", _products(kernel_x, kernel_y))


@built_in("rbf_cka")
class RBFCKA(FeaturesMetric):
    """Streaming ``rbf_cka``."""

    papers = (KORNBLITH_2019,)
    function = staticmethod(rbf_cka)
    differentiable = counts_rows = True

    def sample_matrix(self, rows: Tensor) -> Tensor:
        """Return the centred kernel matrix."""
        return centred(_rbf("a side", rows, self.options["bandwidth"]))


def _cosine(name: str, hsic: Tensor) -> Tensor:
    """Compute ``⟨K, L⟩ / (‖K‖ ‖L‖)`` from ``⟨K, K⟩``, ``⟨K, L⟩`` and ``⟨L, L⟩``."""
    for side, square in zip("xy", (hsic[0], hsic[2]), strict=True):
        if square <= 0:
            raise ValueError(
                f"{name}: HSIC of {side} with itself is {square.item():.1e}, so the value is undefined; pass more rows"
            )
    return hsic[1] / (hsic[0].sqrt() * hsic[2].sqrt())


def _products(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([(x * x).sum(), (x * y).sum(), (y * y).sum()])


def _squares(rows: RowMoments) -> Tensor:
    """Compute ``‖XᵀX‖²``, ``‖XᵀY‖²`` and ``‖YᵀY‖²``, from d × d or n × n products, whichever are smaller."""
    if rows.n < max(rows.x.shape[1], rows.y.shape[1]):
        return _products(rows.x @ rows.x.T, rows.y @ rows.y.T)
    return _squares_of(rows)


def _squares_of(moments: SecondMoments) -> Tensor:
    return torch.stack([s.square().sum() for s in (moments.sxx, moments.sxy, moments.syy)])


def _of_pair(name: str, hsic: HSIC) -> float:
    """Compute the value from HSIC of a single pair of layers."""
    return _cosine(name, torch.stack([hsic.xx[0], hsic.xy[0, 0], hsic.yy[0]])).item()


def _unbiased(rows: RowMoments) -> Tensor:
    lengths = torch.stack([rows.x.square().sum(1), rows.y.square().sum(1)])
    return unbiased_hsic(rows.n, _squares(rows), lengths.sum(1), lengths @ lengths.T)


def _batch(x: Tensor, y: Tensor) -> Tensor:
    """Compute the three HSIC values of a batch, multiplied by its size."""
    check_count("minibatch_cka", len(x), _LEAST_UNBIASED, _UNBIASED)
    check_variation("a batch of minibatch_cka", rows := RowMoments(x, y))
    return rows.n * _unbiased(rows)


def _full_batches(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the sum over the batches that leave at least 4 rows, and the remaining rows."""
    full = range(0, max(len(x) - 4, 0) // size * size, size)
    sums = sum((_batch(x[i : i + size], y[i : i + size]) for i in full), x.new_zeros(3))
    return sums, (x[len(full) * size :], y[len(full) * size :])


def _u_centred(gram: Tensor) -> Tensor:
    """Return the matrix with inner products ``n (n - 3)`` times the unbiased HSIC; rows sum to 0 off the diagonal."""
    n = len(gram)
    gram = gram - gram.diagonal().diag()
    sums = gram.sum(1)
    centred_gram = gram - (sums + sums[:, None]) / (n - 2) + sums.sum() / ((n - 1) * (n - 2))
    return centred_gram.fill_diagonal_(0)


def _rbf(side: str, rows: Tensor, bandwidth: float) -> Tensor:
    distances = pairwise(rows, "euclidean")
    ordered = upper(distances).sort().values
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    if median == 0:
        raise ValueError(
            f"rbf_cka: the median distance between rows of {side} is 0, so the bandwidth is undefined; "
            "remove duplicate rows"
        )
    return (-(distances / (bandwidth * median)).square() / 2).exp()
