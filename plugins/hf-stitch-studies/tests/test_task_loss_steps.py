"""The study of task loss by steps trains in plain torch: its parts against the network and scikit-learn."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression


@pytest.fixture
def steps() -> Any:
    return importlib.import_module("how_not_to_stitch.task_loss_steps")


def test_the_folded_back_and_the_direct_match_are_exact(steps: Any) -> None:
    torch.manual_seed(0)
    network = steps.networks.Tiny10().eval()
    for norm in (each for each in network.modules() if isinstance(each, torch.nn.BatchNorm2d)):
        torch.nn.init.normal_(norm.running_mean), torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    pixels = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        inside = steps.activations(network, pixels)
        for j, x in enumerate(inside):
            logits = steps.Back(network, j, torch.float32)(x)
            torch.testing.assert_close(logits, network(steps.networks.normalised(pixels)), atol=1e-4, rtol=1e-4)
    x, y = torch.randn(60, 5, 4, 4), torch.randn(60, 3, 7, 7) + 2
    weight, bias = steps.direct(x, y)
    rows, wanted = (each.permute(0, 2, 3, 1).flatten(0, 2).numpy() for each in (steps.resized(x, (7, 7)), y))
    found = LinearRegression().fit(rows, wanted)
    assert np.allclose(weight[:, :, 0, 0], found.coef_, atol=1e-5) and np.allclose(bias, found.intercept_, atol=1e-5)


def test_only_candidates_that_the_images_tell_apart_are_no_ties(steps: Any) -> None:
    best = np.ones(100, int)
    near, far = best.copy(), best.copy()
    near[:2], far[:30] = 0, 0
    assert steps.tied(np.stack([near, best, far])).tolist() == [True, True, False]
