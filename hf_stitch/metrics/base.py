"""What every metric declares, and how the four kinds of them stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from hf_stitch.metrics._options import check_names, check_values, defaults
from hf_stitch.metrics._routes import Route, from_moments, from_rows
from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.papers import Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.features import Features

Statistic = Literal["moments", "debiased", "grams", "features", "outputs"]
Operand = Literal["x", "y"]
Invariances = tuple[Literal["orthogonal", "scaling", "invertible", "permutation", "translation"], ...]


class Metric(ABC):
    """A score of two representations of the same samples that streams; the pure function is ``function``.

    The declarations hold for the default options; where an option changes one, the instance says so.

    Attributes:
        name: What the registry of metrics calls it.
        title: What it is called in prose.
        papers: Where it comes from.
        function: ``function(x, y, **options)`` on all rows at once. Its options are its keyword-only parameters, and
            their annotations (``bool``, ``Literal[…]``, ``Annotated[float, Within(…)]``) are checked.
        statistic: What must be collected: ``"moments"`` (``Moments``), ``"debiased"`` (``DebiasedMoments``),
            ``"grams"`` (n × n products, batch by batch), ``"features"`` (rows) or ``"outputs"`` (rows of logits or
            probabilities, one per sample).
        higher_is_better: Whether a higher value means more similar; for a distance it is false, and 0 means equal.
        triangle_inequality: Whether, as a distance, it obeys it.
        range: Least and greatest value. Rounding may overstep it by 1e-12; it is not clamped.
        symmetric: Whether ``(x, y)`` and ``(y, x)`` score the same.
        invariances: What either side may be put through without changing the value: ``"orthogonal"`` and
            ``"invertible"`` maps, ``"scaling"`` by a positive number, ``"permutation"`` of the features,
            ``"translation"`` by a vector. An invariance implied by another is declared too.
        differentiable: Whether gradients reach both sides (once; almost everywhere).
        equal_widths: Whether both sides must have the same width.
        independent_rows: Whether it takes rows for independent samples, which positions of one sample are not.
        minibatched: Whether it is an estimate from minibatches, which depends on the order of the samples and on the
            number of processes.
        labelled: Whether ``function`` and ``update`` also take the true ``labels``.
        options: The options in force, defaults included.

    Args:
        **options: Of the function.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of its range.
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
    invariances: Invariances = ()
    differentiable: bool = False
    equal_widths: bool = False
    independent_rows: bool = False
    minibatched: bool = False
    labelled: bool = False
    _widths: tuple[int, int] | None = None

    def __init__(self, **options: Any) -> None:
        check_names(self.name, self.function, options)
        check_values(self.name, self.function, options)
        self.options: dict[str, Any] = {**defaults(self.function), **options}

    @property
    def routes(self) -> tuple[Route, ...]:
        """The ways to its values for all pairs of layers; none where it is no metric of layers."""
        return ()

    def min_rows(self, side: Operand, width: int) -> int:
        """The fewest rows that a side of this width takes; with fewer the metric is known to be undefined."""
        return 2

    @abstractmethod
    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows, ``(n, dx)`` and ``(n, dy)``; row i of both is the same sample.

        Returns:
            This metric.

        Raises:
            ValueError: A side is no matrix of finite real floating-point numbers, or the sides do not pair up.
        """

    @abstractmethod
    def compute(self) -> float:
        """The value for the rows that came, as if they had come at once.

        Raises:
            ValueError: The rows do not determine a value; the message says why.
        """

    @property
    def label(self) -> str:
        """The name, with the options that are not the default: ``linear_cka(debiased=True)``."""
        usual = defaults(self.function)
        changed = [f"{key}={value}" for key, value in self.options.items() if value is not usual[key]]
        return self.name + (f"({', '.join(changed)})" if changed else "")

    def __repr__(self) -> str:
        """The class and its options."""
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"

    def _value(self, x: Tensor, y: Tensor) -> Tensor:
        return type(self).function(x, y, **self.options)

    def _paired(self, x_rows: Rows, y_rows: Rows) -> tuple[Tensor, Tensor]:
        """The batch in float64, once nothing speaks against it."""
        x, y = paired(self.name, x_rows, y_rows)
        widths = (x.shape[1], y.shape[1])
        if self._widths not in (None, widths):
            raise ValueError(f"{self.name}: the widths of x and y were {self._widths} before, got {widths}")
        self._widths = widths
        return x, y

    def _require(self, statistic: Any) -> Any:
        if statistic is None:
            raise ValueError(f"{self.name}: no rows have come yet; call update first")
        return statistic


class MomentsMetric(Metric):
    """A metric that follows from ``Moments``.

    Attributes:
        formula: ``formula(moments, **options)``, a 0-d tensor.
    """

    formula: ClassVar[Callable[..., Tensor]]
    statistic: Statistic = "moments"
    _moments: Moments | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        """By the moments of each pair of layers, or by their rows."""
        rows = from_rows(self._value, self.symmetric, compares_samples=False)
        return (from_moments(self.from_moments, self.symmetric), rows)

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """As in ``Metric``; the moments are kept where the first rows are."""
        x, y = self._paired(x_rows, y_rows)
        if self._moments is None:
            self._moments = Moments(x.shape[1], y.shape[1], x.device)
        self._moments.update(x, y)
        return self

    def compute(self) -> float:
        """As in ``Metric``."""
        return self.from_moments(self._require(self._moments))

    def from_moments(self, moments: Moments) -> float:
        """The value for the rows of these moments.

        Raises:
            ValueError: They do not determine a value; the message says why.
        """
        return type(self).formula(moments, **self.options).item()


class FeaturesMetric(Metric):
    """A metric of the rows themselves; to bound its memory, give it ``Features`` with a limit."""

    statistic: Statistic = "features"
    _features: Features | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        """By the rows of each pair of layers."""
        return (from_rows(self._value, self.symmetric, compares_samples=True),)

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """As in ``Metric``; the rows are kept in float64."""
        self._features = self._features or Features()
        self._features.update(*self._paired(x_rows, y_rows))
        return self

    def compute(self) -> float:
        """As in ``Metric``."""
        return self.from_features(self._require(self._features))

    def from_features(self, features: Features) -> float:
        """The value for the rows kept.

        Raises:
            ValueError: They do not determine a value; the message says why.
        """
        return type(self).function(features.x, features.y, **self.options).item()


class MeanMetric(Metric):
    """A metric that is a mean over the rows, of which only the sum is kept.

    Attributes:
        values: ``values(x, y, **options)``: one number per row, ``(n,)``.
    """

    values: ClassVar[Callable[..., Tensor]]
    _sum: Tensor | None = None
    _n = 0

    @property
    def routes(self) -> tuple[Route, ...]:
        """By the rows of each pair of layers; none where it compares outputs."""
        return () if self.statistic == "outputs" else (from_rows(self._value, self.symmetric, compares_samples=False),)

    def update(self, x_rows: Rows, y_rows: Rows, **labels: Any) -> Self:
        """As in ``Metric``; a labelled metric also takes ``labels``."""
        values = type(self).values(*self._paired(x_rows, y_rows), **self.options, **labels).detach()
        self._sum = values.sum() if self._sum is None else self._sum + values.sum()
        self._n += len(values)
        return self

    def compute(self) -> float:
        """As in ``Metric``."""
        total = self._require(self._sum)
        if self._n < 2:
            raise ValueError(f"{self.name} takes at least 2 rows, got {self._n}; give more rows")
        return (total / self._n).item()
