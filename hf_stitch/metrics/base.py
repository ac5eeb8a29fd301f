"""Base classes of metrics of activations and of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hf_stitch.metrics._routes import Route, from_moments, from_rows
from hf_stitch.metrics._rows import RowMoments, Rows, paired
from hf_stitch.options import check_call, check_names, checked, defaults, plain
from hf_stitch.papers import Paper
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments, Weights
from hf_stitch.statistics.features import Features

Statistic = Literal["moments", "debiased", "grams", "features", "outputs", "weights"]
Operand = Literal["x", "y"]
Invariances = tuple[Literal["orthogonal", "scaling", "invertible", "permutation", "translation"], ...]


class Metric(ABC):
    """Base class of metrics: a score of two networks, layer by layer, from activations or from weights.

    The class attributes hold for the default options. If an option changes an attribute, the instance overrides it.

    Attributes:
        name: Name in the registry of metrics.
        title: Name in text, for example "linear CKA".
        papers: Papers that define the metric.
        function: The pure function ``function(x, y, **options)``. Its keyword-only parameters are the options, and
            their annotations are checked (:func:`hf_stitch.options.check`).
        statistic: Statistic that the metric requires of each side; see the subclasses.
        higher_is_better: Whether a higher value means more similar. If false, the metric is a distance and 0 means
            equal.
        triangle_inequality: Whether the metric is a distance that satisfies the triangle inequality.
        range: Smallest and largest value. Values are not clamped; rounding may exceed the range by 1e-12.
        symmetric: Whether ``(x, y)`` and ``(y, x)`` have the same value.
        options: All options of this instance, including defaults.

    Args:
        **options: Options of the function.

    Example:
        >>> from hf_stitch import registries
        >>> registries.metrics.build("linear_cka", debiased=True).label
        'linear_cka(debiased=True)'
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    function: ClassVar[Callable[..., Any]]
    statistic: Statistic
    higher_is_better: bool = True
    triangle_inequality: bool = False
    range: tuple[float, float] = (0.0, 1.0)
    symmetric: bool = True

    def __init__(self, **options: Any) -> None:
        check_names(self.name, options, defaults(self.function))
        check_call(self.function, options, f"{self.name}: ")
        self.options: dict[str, Any] = {**defaults(self.function), **{key: plain(options[key]) for key in options}}

    @property
    def label(self) -> str:
        """The name with all options that differ from their defaults: ``linear_cka(debiased=True)``."""
        default_options = defaults(self.function)
        changed = [
            f"{key}={value}"
            for key, value in self.options.items()
            if (type(value), value) != (type(default_options[key]), default_options[key])
        ]
        return self.name + (f"({', '.join(changed)})" if changed else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


class NotComparable(ValueError):
    """Raised by a metric of weights for two layers that it cannot compare.

    Args:
        layer: Name of the layer.
        why: The property that differs, and how to make the layers comparable.

    Example:
        >>> print(NotComparable("conv1", "the coefficients differ; share them first"))
        layer 'conv1': the coefficients differ; share them first
    """

    def __init__(self, layer: str, why: str) -> None:
        super().__init__(f"layer {layer!r}: {why}")
        self.layer, self.why = layer, why


class WeightMetric(Metric):
    """Base class of metrics that compare layers by their weights alone, without data.

    A metric reads a network once (:meth:`read`) and compares the readings (:meth:`value`). Readings are much smaller
    than the weights for most metrics. They can be saved, and compared without the network.

    ``function(x, y, **options)`` accepts the :class:`~hf_stitch.statistics.Weights` of two layers and returns a float.
    It raises :class:`NotComparable` if their value is undefined. It receives only layers with equal ``shared``, unless
    the metric overrides :meth:`check_shared`.

    Args:
        **options: Options of the function.

    Example:
        >>> import torch
        >>> class NormRatio(WeightMetric):
        ...     name, title = "norm_ratio", "ratio of the norms of two layers"
        ...     function = staticmethod(lambda x, y: min(x.tensors["norm"] / y.tensors["norm"],
        ...                                              y.tensors["norm"] / x.tensors["norm"]).item())
        ...
        ...     def read(self, model):
        ...         layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        ...         if not layers:
        ...             raise ValueError("norm_ratio requires a network with linear layers")
        ...         return {name: Weights(name, {"norm": m.weight.detach().cpu().norm()}) for name, m in layers.items()}
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> metric = NormRatio()
        >>> read = metric.read(net)
        >>> metric.value(read["0"], read["0"])
        1.0
    """

    statistic: Statistic = "weights"

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise an error if a subclass declares another statistic."""
        super().__init_subclass__(**arguments)
        if cls.statistic != "weights":
            raise TypeError(
                f"{cls.__name__}: statistic of a metric of weights must be 'weights', got {cls.statistic!r}"
            )

    @abstractmethod
    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Read the weights that the metric compares.

        Args:
            model: The network. It is not modified.

        Returns:
            Layer -> its reading, in the order of the modules.
        """

    def value(self, a: Weights, b: Weights) -> float:
        """Compare two layers.

        Args:
            a: Reading of a layer (:meth:`read`).
            b: Reading of a layer of the second network.

        Raises:
            NotComparable: The value is undefined: different shapes, different shared parts, or non-finite weights.
        """
        self.check_shared(a, b)
        for side in (a, b):
            if not all(bool(tensor.isfinite().all()) for tensor in side.tensors.values()):
                raise NotComparable(side.layer, "its weights contain NaN or infinity")
        return float(type(self).function(a, b, **self.options))

    def check_shared(self, a: Weights, b: Weights) -> None:
        """Check that two layers agree in their shared parts. A metric overrides it to name the difference.

        Args:
            a: Reading of a layer (:meth:`read`).
            b: Reading of a layer of the second network.

        Raises:
            NotComparable: They differ.
        """
        if a.shared != b.shared:
            raise NotComparable(a.layer, f"{self.label} requires layers that share {a.shared!r}, got {b.shared!r}")

    def combine(self, by_layer: Mapping[str, float]) -> float:
        """Compute the value of whole networks from the values of their layers.

        Args:
            by_layer: Layer -> value. At least one.

        Returns:
            The mean, or the value of a metric that combines values differently.
        """
        return sum(by_layer.values()) / len(by_layer)


class ActivationMetric(Metric):
    """Base class of metrics that compare two representations of the same samples, updated batch by batch.

    Attributes:
        statistic: The statistic to collect: ``"moments"`` (``Moments``), ``"debiased"`` (``LayerMoments``),
            ``"grams"`` (n × n products, batch by batch), ``"features"`` (rows) or ``"outputs"`` (one row of logits or
            probabilities per sample).
        invariances: Transformations of either side that do not change the value: ``"orthogonal"`` and ``"invertible"``
            maps, ``"scaling"`` by a positive number, ``"permutation"`` of the features, ``"translation"`` by a vector.
            Invariances that follow from another are listed too.
        differentiable: Whether the function has gradients with respect to both sides (first order, almost everywhere).
        equal_widths: Whether both sides must have the same width.
        independent_rows: Whether the metric is an unbiased estimate, about 0 for unrelated sides, that assumes
            independent samples as rows. Positions of one sample are not independent.
        minibatched: Whether the value is estimated from minibatches, and so depends on the order of the samples and on
            the number of processes.
        counts_rows: Whether duplicating all rows changes the value, as for neighbours, medians, sums and unbiased
            estimates.

    ``function(x, y, **options)`` accepts all rows at once.

    ``hf_stitch_testing.check_metric`` checks these laws for every metric, by name:

    - ``range``, ``symmetric``, ``triangle``, ``invariances``, ``gradient``: the declared attributes hold, the
      invariances for either side to 1e-7.
    - ``identity``: equal sides have distance 0, or the highest similarity.
    - ``order``: the value does not depend on the order of the samples (the same on both sides), even with equal rows.
    - ``repeated``: duplicating all rows does not change the value, unless ``counts_rows``.
    - ``streamed``, ``moments``: any batches, or the moments of all rows, give the value of all rows at once, to 1e-8.
    - ``pure``: the metric does not draw random numbers and does not change the rows.
    - ``dead``: an error names a side with all rows equal, if neither mean nor size of the rows matter.

    Args:
        **options: Options of the function.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> metric = registries.metrics.build("linear_cka")
        >>> x = torch.randn(20, 3)
        >>> for batch in x.split(5):
        ...     _ = metric.update(batch, -batch)
        >>> round(metric.compute(), 6)
        1.0
    """

    invariances: Invariances = ()
    differentiable: bool = False
    equal_widths: bool = False
    independent_rows: bool = False
    minibatched: bool = False
    counts_rows: bool = False
    _widths: tuple[int, int] | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise an error if a subclass declares the statistic of weights."""
        super().__init_subclass__(**arguments)
        if getattr(cls, "statistic", None) == "weights":
            raise TypeError(f"{cls.__name__} compares weights: derive it from WeightMetric")

    @property
    def routes(self) -> tuple[Route, ...]:
        """Ways to compute the values for all pairs of layers; empty if the metric does not compare layers."""
        return ()

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return the smallest number of rows for a defined value.

        Args:
            side: ``"x"`` or ``"y"``.
            width: Number of features of this side.
        """
        return 2

    def sample_matrix(self, rows: Tensor) -> Tensor | None:
        """Return the matrix M of one side, if the value is the cosine ``⟨M(x), M(y)⟩ / (‖M(x)‖ ‖M(y)‖)``.

        Permuting samples permutes rows and columns of the matrix. Permutation tests use this: they compute the matrices
        of all layers once, and one inner product per permutation and pair of layers.

        Args:
            rows: ``(n, d)`` float64.

        Returns:
            ``(n, n)`` float64; None if the metric is not such a cosine.
        """
        return None

    def _prepared(self, side: Operand, rows: Tensor) -> Any:
        """Return the part of a side that a permutation test computes once, for all permutations and pairs."""
        return rows.double()

    def _permuted(self, x: Any, y: Any, order: Tensor) -> float:
        """Return the value for rows of y in another order, to 1e-9, from both prepared sides."""
        return self._value(x, y[order]).item()

    @abstractmethod
    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows.

        Args:
            x_rows: ``(n, dx)``, floating point. Row i of both sides must be the same sample.
            y_rows: ``(n, dy)``, floating point.
        """

    @abstractmethod
    def compute(self) -> float:
        """Compute the value of all rows so far.

        Returns:
            The same value as ``function`` of all rows at once, up to rounding.

        Raises:
            ValueError: The value is undefined for these rows; the message contains the reason.
        """

    def _value(self, x: Tensor, y: Tensor) -> Tensor:
        return type(self).function(x, y, **self.options)

    def _paired(self, x_rows: Rows, y_rows: Rows, exact: bool = True) -> tuple[Tensor, Tensor]:
        """Check the batch and convert it to tensors, if ``exact`` to float64."""
        x, y = paired(self.name, x_rows, y_rows, exact)
        widths = (x.shape[1], y.shape[1])
        if self._widths not in (None, widths):
            raise ValueError(f"{self.name}: the widths of x and y must stay {self._widths}, got {widths}")
        self._widths = widths
        return x, y

    def _require(self, statistic: Any) -> Any:
        if statistic is None:
            raise ValueError(f"{self.name}: compute requires rows; call update first")
        return statistic


class MomentsMetric(ActivationMetric):
    """Base class of metrics computed from ``Moments``: counts, means and co-moments.

    Attributes:
        formula: Function ``formula(moments, **options)`` that returns a 0-d tensor.

    Args:
        **options: Options of the function.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> from hf_stitch.statistics import Moments
        >>> x = torch.randn(20, 3)
        >>> metric = registries.metrics.build("procrustes", squared=True)
        >>> round(metric.from_moments(Moments(3, 3).update(x, -x)), 6)
        0.0
    """

    formula: ClassVar[Callable[..., Tensor]]
    statistic: Statistic = "moments"
    _by_axes: ClassVar[bool] = False  # whether a permutation test may replace features by (fewer) principal axes
    _of_own_rows: ClassVar[bool] = False  # whether the value depends on rounding errors of the dtype of the rows
    _moments: Moments | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        """From the moments of each pair of layers, or from their rows."""
        rows = from_rows(self._value, self.symmetric, compares_samples=False)
        return (from_moments(self.from_moments, self.symmetric), rows)

    def _prepared(self, side: Operand, rows: Tensor) -> Any:
        along_axes = self._by_axes and {"orthogonal", "translation"} <= {*self.invariances}
        along_axes = along_axes and not self.options.get("ridge")  # a ridge depends on the width
        rows = rows if self._of_own_rows else rows.double()
        moments = RowMoments.of_axes(rows) if along_axes else RowMoments(rows, rows)
        moments.kept = {side: {}}
        return moments

    def _permuted(self, x: Any, y: Any, order: Tensor) -> float:
        moments = copy(x)
        eps = torch.stack([x.eps[0], y.eps[1]])
        vars(moments).update(y=y.x[order], mean_y=y.mean_x, sxx=x.sxx, syy=y.sxx, kept=x.kept | y.kept, eps=eps)
        return type(self).formula(moments, **self.options).item()

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, as in ``ActivationMetric``; moments stay on the device of the first rows."""
        x, y = self._paired(x_rows, y_rows, exact=False)
        if self._moments is None:
            self._moments = Moments(x.shape[1], y.shape[1], x.device)
        self._moments.update(x, y)
        return self

    def compute(self) -> float:
        """Compute the value of all rows so far, as in ``ActivationMetric``."""
        return self.from_moments(self._require(self._moments))

    def from_moments(self, moments: Moments) -> float:
        """Compute the value from moments."""
        return type(self).formula(moments, **self.options).item()


class FeaturesMetric(ActivationMetric):
    """Base class of metrics that require all rows at once.

    ``update`` stores every row. To bound the memory, collect ``Features`` with a limit and call ``from_features``.

    Args:
        **options: Options of the function.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> from hf_stitch.statistics import Features
        >>> x = torch.randn(200, 3)
        >>> kept = Features(limit=50).update(x, 2 * x)
        >>> round(registries.metrics.build("rsa").from_features(kept), 6)
        1.0
    """

    statistic: Statistic = "features"
    _features: Features | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        """From the rows of each pair of layers."""
        return (from_rows(self._value, self.symmetric, compares_samples=True),)

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, as in ``ActivationMetric``; the rows are stored in float64."""
        self._features = self._features or Features()
        self._features.update(*self._paired(x_rows, y_rows))
        return self

    def compute(self) -> float:
        """Compute the value of all rows so far, as in ``ActivationMetric``."""
        return self.from_features(self._require(self._features))

    def from_features(self, features: Features) -> float:
        """Compute the value from stored rows."""
        return type(self).function(features.x, features.y, **self.options).item()


class MeanMetric(ActivationMetric):
    """Base class of metrics that are a mean over rows; only the sum is stored.

    Attributes:
        values: Function ``values(x, y, **options)`` that returns one number per row, ``(n,)``.

    Args:
        **options: Options of the function.

    Example:
        >>> import torch
        >>> from hf_stitch import registries
        >>> metric = registries.metrics.build("disagreement")
        >>> metric.update(torch.eye(4), torch.eye(4).flip(0)).compute()
        1.0
    """

    values: ClassVar[Callable[..., Tensor]]
    _sum: Tensor | None = None
    _n = 0

    @property
    def routes(self) -> tuple[Route, ...]:
        """From the rows of each pair of layers; empty for metrics of outputs."""
        return () if self.statistic == "outputs" else (from_rows(self._value, self.symmetric, compares_samples=False),)

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, as in ``ActivationMetric``."""
        values = type(self).values(*self._paired(x_rows, y_rows), **self.options).detach()
        self._sum = values.sum() if self._sum is None else self._sum + values.sum()
        self._n += len(values)
        return self

    def compute(self) -> float:
        """Compute the value of all rows so far, as in ``ActivationMetric``."""
        total = self._require(self._sum)
        if self._n < 2:
            raise ValueError(f"{self.name} requires at least 2 rows, got {self._n}; pass more rows")
        return (total / self._n).item()


def activation_metric(metric: str | Mapping[str, Any] | Metric, **options: Any) -> ActivationMetric:
    """Build a metric of activations or outputs."""
    instance = registries.metrics.build(metric, **options)
    if not isinstance(instance, ActivationMetric):
        raise ValueError(
            f"metric must compare activations, got {instance.label}, which compares {instance.statistic}; call "
            "hf_stitch.compare or hf_stitch.compare_all with it, or its read and value"
        )
    return instance
