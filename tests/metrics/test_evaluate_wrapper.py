from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hf_stitch.metrics.base import ActivationMetric
from hf_stitch.registry import registries

evaluate = pytest.importorskip("evaluate")


def wrapped(name: str, **options: Any) -> Any:
    from hf_stitch.metrics import SimilarityMetric

    return SimilarityMetric(name, **options)


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(seed)
    x = g.random((40, 5))
    return x, x + 0.5 * g.random((40, 5))


OF_ROWS = [name for name in registries.metrics if issubclass(registries.metrics.get(name), ActivationMetric)]


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_metric_is_served_batch_by_batch(name: str) -> None:
    x, y = rows()
    metric, own = wrapped(name), registries.metrics.build(name)
    for part in np.array_split(np.arange(40), 3):
        metric.add_batch(predictions=x[part], references=y[part])
        own.update(x[part], y[part])
    assert isinstance(metric, evaluate.Metric)
    assert metric.compute() == {name: pytest.approx(own.compute(), rel=1e-9, abs=1e-12)}


def test_options_reach_the_metric() -> None:
    x, y = rows()
    metric = wrapped("linear_cka", debiased=True)
    own = registries.metrics.build("linear_cka", debiased=True)
    assert metric.compute(predictions=x, references=y)["linear_cka"] == pytest.approx(own.update(x, y).compute())
    assert metric.compute(predictions=x, references=2 * x)["linear_cka"] == pytest.approx(1), "it starts afresh"


def test_lists_tensors_and_single_rows_count_alike() -> None:
    x, y = rows()
    metric = wrapped("procrustes")
    metric.add(prediction=x[0], reference=y[0])
    metric.add_batch(predictions=x[1:20].tolist(), references=y[1:20].tolist())
    metric.add_batch(predictions=torch.from_numpy(x[20:]), references=torch.from_numpy(y[20:]))
    expected = registries.metrics.build("procrustes").update(x, y).compute()
    assert metric.compute()["procrustes"] == pytest.approx(expected)


def test_metrics_combine() -> None:
    x, y = rows()
    both = evaluate.combine([wrapped("linear_cka"), wrapped("procrustes")])
    assert both.compute(predictions=x, references=y).keys() == {"linear_cka", "procrustes"}


def test_bad_rows_are_refused() -> None:
    x, y = rows()
    with pytest.raises(ValueError, match="Mismatch in the number of predictions"):
        wrapped("linear_cka").compute(predictions=x, references=y[:7])
    with pytest.raises(ValueError, match=r"all rows of references must have the same width, got the widths \[1, 2\]"):
        wrapped("linear_cka").compute(predictions=[[1.0], [2.0]], references=[[1.0], [1.0, 2.0]])


def test_without_the_library_the_wrapper_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evaluate", None)
    monkeypatch.delitem(sys.modules, "hf_stitch.metrics._evaluate", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"hf-stitch\[evaluate\]"):
        importlib.import_module("hf_stitch.metrics._evaluate")
