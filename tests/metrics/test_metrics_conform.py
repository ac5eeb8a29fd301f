"""What holds of every metric, ours and a plugin's: ``check_metric``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_stitch import metrics
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.metrics import (
    MomentsMetric,
    _cca,
    _cka,
    _frechet,
    _matching,
    _neighbours,
    _outputs,
    _procrustes,
    _regression,
    _relative,
    _rsa,
    _shape,
    of_rows,
)
from hf_stitch.metrics._catalogue import CATALOGUE
from hf_stitch.metrics.base import Metric
from hf_stitch.registry import registries
from hf_stitch.testing import Part, check_metric

WEIGHT = torch.ones(5, 5, dtype=torch.float64)
METRICS: list[tuple[type[Metric], dict[str, Any]]] = [
    (_cka.LinearCKA, {}),
    (_cka.LinearCKA, {"debiased": True}),
    (_cka.MinibatchCKA, {}),
    (_cka.MinibatchCKA, {"batch_size": 8}),
    (_cka.RBFCKA, {}),
    (_cca.CCA, {}),
    (_cca.CCA, {"squared": True}),
    (_cca.CCA, {"ridge": 0.1}),
    (_cca.PWCCA, {}),
    (_cca.PWCCA, {"directions": "all"}),
    (_cca.SVCCA, {"variance": 0.9}),
    (_procrustes.Procrustes, {}),
    (_procrustes.Procrustes, {"squared": True}),
    (_procrustes.Procrustes, {"unit_norm": False}),
    (_procrustes.Procrustes, {"squared": True, "unit_norm": False}),
    (_regression.LinearRegression, {}),
    (_regression.LinearRegression, {"center": False}),
    (_regression.DirectMatching, {}),
    (_frechet.Frechet, {}),
    (_shape.ShapeDistance, {}),
    (_shape.ShapeDistance, {"alpha": 0.0}),
    (_shape.ShapeDistance, {"alpha": 0.5}),
    (_shape.ShapeDistance, {"distance": "euclidean"}),
    (_shape.ShapeDistance, {"distance": "euclidean", "alpha": 0.0}),
    (_rsa.RSA, {}),
    (_rsa.RSA, {"distance": "euclidean", "compare": "pearson"}),
    (_rsa.RSA, {"distance": "cosine"}),
    (_rsa.DistanceCorrelation, {}),
    (_matching.CorrelationMatching, {}),
    (_matching.CorrelationMatching, {"assignment": "soft"}),
    (_matching.SoftMatching, {}),
    (_matching.SoftMatching, {"compare": "distance"}),
    (_neighbours.MutualKNN, {"k": 5}),
    (_neighbours.Jaccard, {"distance": "euclidean"}),
    (_neighbours.MRR, {}),
    (_neighbours.PairedCosine, {}),
    (_relative.RelativeCosine, {}),
    (_relative.RelativeCosine, {"center": False}),
    (_outputs.Disagreement, {}),
    (_outputs.JensenShannon, {}),
    (_outputs.JensenShannon, {"inputs": "probabilities"}),
]


@pytest.mark.parametrize(
    "check", [part for kind, options in METRICS for part in check_metric.parts(kind, **options)], ids=str
)
def test_conforms(check: Part) -> None:
    check()


def test_every_public_function_is_that_of_a_class_that_conforms() -> None:
    kinds = {"Metric", "ActivationMetric", "WeightMetric", "NotComparable"}
    kinds |= {"MomentsMetric", "FeaturesMetric", "MeanMetric", "SimilarityMetric"}
    tools = {*kinds, "of_rows", "registries.metrics.build"}
    functions = {name: getattr(metrics, name) for name in metrics.__all__ if name not in tools}
    assert functions == {metric.name: metric.function for metric, _ in METRICS}


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
        _cca.CCA(rigde=1.0)
    with pytest.raises(ValueError, match=r"cca: ridge must be a number >= 0, got -1"):
        _cca.CCA(ridge=-1)
    with pytest.raises(ValueError, match=r"svcca: variance must be a number > 0 and <= 1, got 0"):
        _cca.SVCCA(variance=0)
    with pytest.raises(ValueError, match=r"jaccard: k must be an integer >= 1, got 2.5"):
        _neighbours.Jaccard(k=2.5)
    with pytest.raises(
        ValueError, match=r"rsa: distance must be one of 'correlation', 'cosine', 'euclidean', got 'l1'"
    ):
        _rsa.RSA(distance="l1")
    with pytest.raises(ValueError, match=r"linear_cka: debiased must be True or False, got 1"):
        _cka.linear_cka(np.eye(5), np.eye(5), debiased=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no_such"):
        _cka.linear_cka(np.eye(5), np.eye(5), no_such=1)  # type: ignore[call-arg]


def test_widths_must_stay() -> None:
    for metric in (
        _cka.LinearCKA(),
        _cka.LinearCKA(debiased=True),
        _cka.MinibatchCKA(),
        _rsa.RSA(),
        _outputs.Disagreement(),
    ):
        metric.update(torch.rand(5, 3), torch.rand(5, 3))
        with pytest.raises(
            ValueError, match=rf"{metric.name}: the widths of x and y were \(3, 3\) before, got \(4, 4\)"
        ):
            metric.update(torch.rand(5, 4), torch.rand(5, 4))
