"""When training takes which samples, and with which learning rate."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from hf_stitch.running import ALONE
from hf_stitch.training.loop import TrainingSchedule


def schedule(**options: Any) -> TrainingSchedule:
    given = {
        "max_steps": 6, "feature_steps": 0, "batch_size": 4, "lr": 1.0, "weight_decay": 0.0, "schedule": "step",
        "max_grad_norm": None, "seed": 0, "shuffle": True, "patience": None,
    }  # fmt: skip
    return TrainingSchedule(**{**given, **options})


def order(steps: int, start: int = 0, **options: Any) -> list[int]:
    """The places of the samples of some steps, of ten samples in three steps per epoch."""
    batches = islice(schedule(**options).batches(10, start, 1, ALONE), steps)
    return torch.cat([places for parts in batches for places, _ in parts]).tolist()


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    first, second = order(6)[:10], order(6)[10:]
    assert sorted(first) == sorted(second) == [*range(10)]
    assert len({tuple(each) for each in (first, second, order(3, seed=1), order(3, seed=2))}) == 4
    assert order(3) == first and order(3, shuffle=False) == [*range(10)]


@pytest.mark.parametrize("start", [1, 3, 4])
def test_training_that_resumes_goes_on_with_the_next_samples(start: int) -> None:
    assert order(start) + order(6 - start, start) == order(6)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("step", [1, 1, 0.1, 0.1, 0.01, 0.01]),
        ("constant", [1] * 6),
        ("linear", [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [1, 0.9330, 0.75, 0.5, 0.25, 0.0670]),
    ],
)
def test_rates_begin_whole_after_the_steps_on_features(name: Any, rates: list[float]) -> None:
    found = [schedule(schedule=name, feature_steps=2).rate(step) for step in range(8)]
    assert found == pytest.approx([1, 1, *rates], abs=1e-4)
