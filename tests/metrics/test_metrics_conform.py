"""A metric of a plugin, its defects, and what the built-in metrics share beside the laws of ``test_laws.py``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_testing import check_metric
from torch import Tensor

from hf_stitch import metrics
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.metrics import MomentsMetric, of_rows
from hf_stitch.metrics._catalogue import CATALOGUE
from hf_stitch.registry import registries


def test_every_public_function_is_that_of_a_class_that_conforms() -> None:
    functions = {name: getattr(metrics, name) for name in metrics.__all__ if name.islower() and name != "of_rows"}
    assert functions == {name: registries.metrics.get(name).function for name in BUILT_INS["metrics"]}


def test_listing_metrics_imports_none() -> None:
    code = "import sys, hf_stitch.metrics as m; assert 'cca' in dir(m); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="ckaa"):
        _ = metrics.ckaa


def test_the_catalogue_describes_the_built_in_metrics() -> None:
    assert list(CATALOGUE) == list(BUILT_INS["metrics"])
    for name, about in CATALOGUE.items():
        metric = registries.metrics.build(name)
        assert (metric.name, about.range, set(about.invariances)) == (name, metric.range, set(metric.invariances))
        assert 20 < len(about.use) < 110 and about.use[-1] != ".", name


@of_rows
def mean_gap(x: Tensor, y: Tensor) -> Tensor:
    """What a plugin brings: the distance of the means."""
    if x.shape[1] != y.shape[1]:
        raise ValueError("mean_gap needs equal widths")
    return (x.mean(0) - y.mean(0)).norm()


class MeanGap(MomentsMetric):
    """A plugin's metric."""

    name = "mean_gap"
    function = staticmethod(mean_gap)
    formula = staticmethod(lambda moments: (moments.mean_x - moments.mean_y).norm())
    higher_is_better = False
    triangle_inequality = True
    range = (0.0, float("inf"))
    equal_widths = True


def test_a_plugin_conforms() -> None:
    check_metric(MeanGap)


def _of_float32(x: Any, y: Any) -> Any:
    value = mean_gap(x, y)
    return value.float() if isinstance(value, Tensor) else value


def _without_checks(x: Tensor, y: Tensor) -> Any:
    gap = (torch.as_tensor(x).double().mean(0) - torch.as_tensor(y).double().mean(0)).norm()
    return gap if isinstance(x, Tensor) else gap.item()


def _random(x: Any, y: Any) -> Any:
    torch.rand(1)
    return mean_gap(x, y)


def _in_place(x: Any, y: Any) -> Any:
    value = mean_gap(x, y)
    x.mul_(2) if isinstance(x, Tensor) else None
    return value


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ({"invariances": ("translation",)}, "x put through translation"),
        ({"invariances": ("rotation",)}, "invariances must be among"),
        ({"range": (0.0, 1e-3)}, "outside the range"),
        ({"statistic": "rows"}, "statistic must be one of"),
        ({"name": "gap"}, "function must be named 'gap'"),
        ({"formula": staticmethod(lambda moments: moments.mean_x.norm())}, "streamed in batches"),
        ({"higher_is_better": True}, "triangle_inequality needs"),
        ({"equal_widths": False}, "."),
        ({"function": staticmethod(_of_float32)}, "0-d float64"),
        ({"function": staticmethod(_without_checks)}, "must raise ValueError|error on"),
        ({"function": staticmethod(_random)}, "no random numbers"),
        ({"function": staticmethod(_in_place)}, "must not modify the rows"),
    ],
    ids=lambda part: str(next(iter(part))) if isinstance(part, dict) else None,
)
def test_a_defect_is_found(defect: dict[str, Any], message: str) -> None:
    if "function" in defect:
        defect["function"].__func__.__name__ = "mean_gap"
    broken = type("Broken", (MeanGap,), defect)
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=message):
        check_metric(broken)


def test_options_are_checked_before_rows_come() -> None:
    with pytest.raises(TypeError, match=r"cca has no option 'rigde'; did you mean 'ridge'.* squared, ridge"):
        registries.metrics.get("cca")(rigde=1.0)
    with pytest.raises(ValueError, match=r"cca: ridge must be a number >= 0, got -1"):
        registries.metrics.build("cca", ridge=-1)
    with pytest.raises(ValueError, match=r"svcca: variance must be a number > 0 and <= 1, got 0"):
        registries.metrics.build("svcca", variance=0)
    with pytest.raises(ValueError, match=r"jaccard: k must be an integer >= 1, got 2.5"):
        registries.metrics.build("jaccard", k=2.5)
    with pytest.raises(
        ValueError, match=r"rsa: distance must be one of 'correlation', 'cosine', 'euclidean', got 'l1'"
    ):
        registries.metrics.build("rsa", distance="l1")
    with pytest.raises(ValueError, match=r"linear_cka: debiased must be True or False, got 1"):
        metrics.linear_cka(np.eye(5), np.eye(5), debiased=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no_such"):
        metrics.linear_cka(np.eye(5), np.eye(5), no_such=1)  # type: ignore[call-arg]


def test_widths_must_stay() -> None:
    of_each_kind = ("linear_cka", "minibatch_cka", "rsa", "disagreement")
    for name in of_each_kind:
        metric = registries.metrics.build(name)
        metric.update(torch.rand(5, 3), torch.rand(5, 3))
        with pytest.raises(
            ValueError, match=rf"{metric.name}: the widths of x and y were \(3, 3\) before, got \(4, 4\)"
        ):
            metric.update(torch.rand(5, 4), torch.rand(5, 4))
