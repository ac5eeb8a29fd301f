"""A stitched network is as far from its float64 self as the two networks are: no map multiplies rounding."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_stitch
from hf_stitch import metrics
from hf_stitch.registry import registries

LAYER = "encoder.layer.0"


def bert(width: int, seed: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * width
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval().to(dtype)


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(90, (count, 10), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def distance(network: Any, inputs: Tensor) -> float:
    """Return the root mean square of the rounding errors of the outputs."""
    exact = copy.deepcopy(network).double()
    outputs = [each(input_ids=inputs).last_hidden_state.double() for each in (network, exact)]
    return (outputs[0] - outputs[1]).square().mean().sqrt().item()


@torch.no_grad()
def held_out(stitched: Any, a: Any, b: Any, inputs: Tensor) -> float:
    x, y = (each.encode({"input_ids": inputs}, LAYER)[LAYER].values.double().flatten(0, 1) for each in (a, b))
    error = (copy.deepcopy(stitched.stitch.body).double()(x) - y).square().sum()
    return float(1 - error / (y - y.mean(0)).square().sum())


@pytest.mark.filterwarnings("ignore:r2 is not better")
@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (8, torch.float16), (32, torch.bfloat16)], ids=str)
def test_no_closed_form_multiplies_rounding(width: int, dtype: torch.dtype) -> None:
    """Thresholds of more widths are in ``statistics/test_spectrum.py``."""
    a, b = (hf_stitch.load(bert(width, seed, dtype), example_inputs=ids(2, 0)) for seed in (0, 1))
    train, test = ids(100 + 4 * width, 1), ids(60, 2)
    of_both = math.hypot(*(distance(each.model, test) for each in (a, b)))
    fit: dict[str, Any] = {"source_layer": LAYER, "target_layer": LAYER, "progress": False}
    for matcher in ("lstsq", "ridge", "ridge_to_identity", "recoloured", "procrustes", "inverse_relative"):
        stitched = hf_stitch.stitch(a, b, list(train), matcher=matcher, **fit).eval()
        assert distance(stitched, test) <= 1.5 * of_both, matcher
        if matcher == "lstsq":
            by_less = held_out(stitched, a, b, test)
    # What the map explains of the exact activations is not given up.
    exact = [hf_stitch.load(bert(width, seed, torch.float64), example_inputs=ids(2, 0)) for seed in (0, 1)]
    assert by_less >= held_out(hf_stitch.stitch(*exact, list(train), matcher="lstsq", **fit), *exact, test) - 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "metric",
    ["cca", "pwcca", "pwcca:directions=all", "svcca:variance=1", "linear_regression", "shape_distance:alpha=0"],
)
def test_spectral_metrics_are_those_of_the_exact_activations(metric: str, dtype: torch.dtype) -> None:
    """The direction that a norm removes counts neither in float64, where it is exactly empty, nor in less."""
    networks = [bert(8, seed, torch.float64) for seed in (0, 1)]
    inputs = ids(80, 3)
    exact = [network(inputs).last_hidden_state.flatten(0, 1).detach() for network in networks]
    less = [network.to(dtype)(inputs).last_hidden_state.flatten(0, 1).detach() for network in networks]
    built = registries.metrics.build(metric)
    expected = built.function(*exact, **built.options).item()
    assert built.function(*less, **built.options).item() == pytest.approx(expected, abs=16 * torch.finfo(dtype).eps)
    for x, y in zip(less[0].split(90), less[1].split(90), strict=True):
        built.update(x, y)
    assert built.compute() == pytest.approx(built.function(*less, **built.options).item(), rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [12, 400])
@pytest.mark.parametrize(
    "metric", ["cca", "svcca", "svcca:variance=1", "linear_regression", "procrustes", "shape_distance", "linear_cka"]
)
def test_a_permutation_test_keeps_the_rank(metric: str, n: int, dtype: torch.dtype) -> None:
    """Also near rounding, and with more features than rows."""
    torch.manual_seed(0)
    built = registries.metrics.build(metric)
    width = 5 if metric in ("cca", "linear_regression", "svcca:variance=1") else 16
    sides = [torch.nn.functional.layer_norm(torch.randn(n, width), (width,)) for _ in "xy"]
    sides[1] = 20 + sides[0] + sides[1] * torch.arange(1, width + 1) ** -2.0
    x, y = (side.to(dtype) for side in sides)
    prepared = built._prepared("x", x), built._prepared("y", y)
    for order in (torch.arange(n), torch.randperm(n)):
        found = built._permuted(*prepared, order)
        assert found == pytest.approx(built.function(x, y[order], **built.options).item(), abs=1e-9)


def test_a_bootstrap_keeps_the_rank() -> None:
    rows, other = (bert(8, seed, torch.float32)(ids(40, 4)).last_hidden_state.flatten(0, 1).detach() for seed in (0, 1))
    interval = hf_stitch.analysis.bootstrap("cca", rows, other, samples=[i // 10 for i in range(400)], resamples=5)
    assert interval.value == pytest.approx(metrics.cca(rows, other).item(), rel=1e-8)
