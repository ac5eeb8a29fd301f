"""What the built-in metrics share beside the laws of ``test_laws.py``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from hf_stitch import metrics
from hf_stitch.built_ins import BUILT_INS
from hf_stitch.metrics._catalogue import CATALOGUE
from hf_stitch.registry import registries


def test_every_public_function_is_that_of_a_class_that_conforms() -> None:
    functions = {name: getattr(metrics, name) for name in metrics.__all__ if name.islower() and name != "of_rows"}
    assert functions == {name: registries.metrics.get(name).function for name in BUILT_INS["metrics"]}


def test_listing_metrics_imports_none() -> None:
    code = "import sys, hf_stitch.metrics as m; assert 'cca' in dir(m); assert 'torch' not in sys.modules; "
    code += "m.linear_cka; assert 'evaluate' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="ckaa"):
        _ = metrics.ckaa


def test_the_catalogue_describes_the_built_in_metrics() -> None:
    assert list(CATALOGUE) == list(BUILT_INS["metrics"])
    for name, about in CATALOGUE.items():
        metric = registries.metrics.build(name)
        assert (metric.name, about.range, set(about.invariances)) == (name, metric.range, set(metric.invariances))
        assert 20 < len(about.use) < 110 and about.use[-1] != ".", name


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("cca", {"rigde": 1.0}, TypeError, "unexpected option 'rigde'; did you mean 'ridge'.* squared, ridge"),
        ("cca", {"ridge": -1}, ValueError, "ridge must be a number >= 0, got -1"),
        ("svcca", {"variance": 0}, ValueError, "variance must be a number > 0 and <= 1, got 0"),
        ("jaccard", {"k": 2.5}, ValueError, "k must be an integer >= 1, got 2.5"),
        ("rsa", {"distance": "l1"}, ValueError, "distance must be .* 'correlation', 'cosine', 'euclidean', got 'l1'"),
        ("linear_cka", {"debiased": 1}, ValueError, "debiased must be True or False, got 1"),
    ],
)
def test_options_are_checked_before_rows_come(name: str, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{name}.*{message}"):
        registries.metrics.build(name, **options)


def test_widths_must_stay() -> None:
    for name in ("linear_cka", "minibatch_cka", "rsa", "disagreement"):
        metric = registries.metrics.build(name)
        metric.update(torch.rand(5, 3), torch.rand(5, 3))
        with pytest.raises(ValueError, match=rf"{metric.name}: the widths of x and y must stay \(3, 3\), got \(4, 4\)"):
            metric.update(torch.rand(5, 4), torch.rand(5, 4))
