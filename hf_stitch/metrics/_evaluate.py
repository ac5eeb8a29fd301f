"""Metrics with the interface of the ``evaluate`` library; no access to the Hub."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_stitch.metrics.base import Metric, activation_metric

try:
    import evaluate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "SimilarityMetric requires the evaluate library, which is not installed: pip install 'hf-stitch[evaluate]'; "
        "the functions in hf_stitch.metrics work without it",
        name=error.name,
    ) from error

from datasets import Features, Sequence, Value


class SimilarityMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate is not typed
    """Metric of ``hf_stitch.registries.metrics`` with the interface of ``evaluate.Metric``.

    The rows of x are the ``predictions`` and the rows of y the ``references``. Rows are stored in memory as Arrow, and
    the value is computed from all rows at once. For large data, use the streaming metric
    (``hf_stitch.registries.metrics.build``).

    Args:
        name: Name in the registry of metrics, or a metric.
        **options: Options of the metric.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).standard_normal((20, 3))
        >>> cka = SimilarityMetric("linear_cka")
        >>> for batch in np.split(x, 4):
        ...     cka.add_batch(predictions=batch, references=-2 * batch)
        >>> {name: round(value, 6) for name, value in cka.compute().items()}
        {'linear_cka': 1.0}
    """

    def __init__(self, name: str | Metric, **options: Any) -> None:
        self.metric = activation_metric(name, **options)
        super().__init__(config_name=self.metric.name, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": Sequence(Value("float64")), "references": Sequence(Value("float64"))}
        function = self.metric.function
        return evaluate.MetricInfo(
            description=(function.__doc__ or "").partition("\n")[0],
            citation="",
            inputs_description=f"predictions: rows of x; references: rows of y. Computes {self.metric!r}.",
            features=Features(columns),
        )

    def _compute(self, *, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        x, y = (self._matrix(side, rows) for side, rows in (("predictions", predictions), ("references", references)))
        return {self.metric.name: self.metric.function(x, y, **self.metric.options)}

    def _matrix(self, side: str, rows: Any) -> np.ndarray:
        widths = sorted({len(row) for row in rows})
        if len(widths) != 1:
            raise ValueError(
                f"{self.metric.name}: all rows of {side} must have the same width, got the widths {widths}"
            )
        return np.array(rows, np.float64)
