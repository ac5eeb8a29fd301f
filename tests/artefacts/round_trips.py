"""Saving and loading of models, and their comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_stitch import StitchedModel


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(value, right[name]) for name, value in left.items()
    )


def saved_and_loaded(model: StitchedModel, folder: Path, **options: Any) -> StitchedModel:
    model.save_pretrained(folder, **options)
    return StitchedModel.from_pretrained(folder)


@torch.no_grad()
def assert_same(model: StitchedModel, again: StitchedModel, batch: dict[str, torch.Tensor]) -> None:
    assert type(again) is type(model)
    assert same_state(model, again)
    for found, expected in zip(again(**batch).to_tuple(), model(**batch).to_tuple(), strict=True):
        assert torch.equal(found, expected)
    assert not any(module.training for module in again.modules())
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    assert again.config.recipe == json.loads(json.dumps(model.config.recipe))
    assert again.config.scores == model.config.scores
