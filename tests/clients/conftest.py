"""A stitched model of each head, and a batch for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from hf_stitch.artefacts.joining import join

from tiny_networks import LAYERS, TEXT, adapted, network, stitched  # isort: skip

Made = tuple[Any, dict[str, torch.Tensor]]
MIDDLE = "bert.encoder.layer.1"


def bert(kind: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return adapted("bert", kind(transformers.BertConfig(**TEXT, num_labels=3)).eval())


@pytest.fixture(scope="session")
def headed(images: Any, texts: Any) -> Callable[[str], Made]:
    """``headed(kind)``: a copy of a stitched model with this head, or of these families, and a batch."""

    @cache
    def make(kind: str) -> Made:
        if kind == "image":
            model = stitched(network("vit"), network("vit", 1), images, (LAYERS["vit"],) * 2)
            given = {"pixel_values": torch.stack([sample["image"] for sample in images[:6]])}
            return model, {**given, "labels": torch.tensor([sample["label"] for sample in images[:6]])}
        if kind == "features":
            a, b = (bert(transformers.BertModel, seed) for seed in (0, 1))
            model = stitched(a, b, texts, ("encoder.layer.1",) * 2, task=None)
        elif kind == "tokens":
            a, b = (bert(transformers.BertForTokenClassification, seed) for seed in (0, 1))
            plain = stitched(a, b, texts, (MIDDLE,) * 2, task=None)
            model = join(a, MIDDLE, plain.stitch, b, MIDDLE, task="token-classification")
        else:
            one, two = kind.split("-")
            pooling = {"pooling": "mean"} if one == "roberta" else {}
            model = stitched(network(one), network(two, 1), texts, (LAYERS[one], LAYERS[two]), **pooling)
        given = dict(model.preprocess([sample["text"] for sample in texts[:6]]))
        if kind == "tokens":
            given["labels"] = given["input_ids"] % 3
        elif model.can_generate():
            given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
        elif kind != "features":
            given["labels"] = torch.tensor([sample["label"] for sample in texts[:6]])
        return model, given

    def copied(kind: str) -> Made:
        model, given = make(kind)
        return copy.deepcopy(model), dict(given)

    return copied
