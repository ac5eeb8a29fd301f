"""Inputs by which a network is looked at: what does not fit is told before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import BERT, make
from torch import Tensor, nn

import hf_stitch

X = torch.randn(2, 4)


class Two(nn.Module):
    """Two arguments, of which one is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


class Several(Two):
    """Any number of arguments, by place."""

    def forward(self, *xs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(xs[0])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (X.numpy(), "must be a tensor, a tuple .* or a dict .*, got ndarray"),
        ({"x": X.numpy()}, r"at least one tensor of content, .*got x \(ndarray\)"),
        ({"y": X}, r"\(y\) do not fit the forward of Two, which takes \(x: .*missing a required argument: 'x'"),
        ({"x": X, "y": X}, "unexpected keyword argument 'y'"),
        ((X, 1.0, X), "hold 3 values, and the forward of Two takes 2: x, scale"),
    ],
)
def test_an_example_that_does_not_fit(example: Any, message: str) -> None:
    with pytest.raises(hf_stitch.adapters.ExampleError, match=message):
        hf_stitch.load(Two(), example_inputs=example)


def test_a_forward_of_nameless_arguments_is_told() -> None:
    with pytest.raises(ValueError, match=r"takes \(\*xs: .*\), and is given all by name"):
        hf_stitch.load(Several(), example_inputs=X)


@pytest.mark.parametrize("example", [X, (X, 2.0), {"x": X, "scale": 2.0}])
def test_an_example_may_be_given_in_three_ways(example: Any) -> None:
    assert hf_stitch.load(Two(), example_inputs=example).layers == ("first", "second")


def test_content_that_is_no_argument_is_told() -> None:
    with pytest.raises(ValueError, match="content must be one of x, the tensors of the input, got 'y'"):
        hf_stitch.load(Two(), example_inputs=X, content="y")
    with pytest.raises(ValueError, match="content must be one of x, the tensors of the input, got 'pixel_values'"):
        hf_stitch.load("timm:resnet10t", pretrained=False, content="pixel_values")
    with pytest.raises(ValueError, match="content must be an argument of BertModel, got 'y'; it takes input_ids, "):
        hf_stitch.load(hf.BertModel(hf.BertConfig(**BERT)), content="y")


def test_a_network_of_timm_takes_its_example_as_any_other() -> None:
    model, images = make("timm-resnet"), torch.randn(2, 3, 64, 64)
    layers = hf_stitch.load(model, example_inputs=images).layers
    assert hf_stitch.load(model, example_inputs={"x": images}, content="x").layers == layers
    with pytest.raises(ValueError, match="do not fit the forward of ResNet"):
        hf_stitch.load(model, example_inputs={"pixel_values": images})


def test_an_example_of_transformers_may_hold_what_is_no_tensor() -> None:
    model = hf.BertModel(hf.BertConfig(**BERT)).eval()
    ids = torch.randint(5, 50, (2, 6))
    adapter = hf_stitch.load(model, example_inputs={"input_ids": ids, "return_dict": True})
    assert adapter.layers == hf_stitch.load(model).layers
    with pytest.raises(ValueError, match=r"must hold a tensor 'input_ids', got input_ids \(ndarray\)"):
        hf_stitch.load(model, example_inputs={"input_ids": np.zeros((2, 6))})


def test_a_network_by_name_whose_inputs_cannot_be_made_up_takes_an_example(tmp_path: Path) -> None:
    config = hf.PatchTSTConfig(num_input_channels=2, context_length=16, d_model=8, num_hidden_layers=2, ffn_dim=8)
    hf.PatchTSTModel(config).save_pretrained(tmp_path)
    with pytest.raises(hf_stitch.adapters.ExampleError, match="takes 'past_values': pass example_inputs"):
        hf_stitch.load(str(tmp_path))
    adapter = hf_stitch.load(str(tmp_path), example_inputs=torch.randn(2, 16, 2))
    assert adapter.interface.content == ("past_values",)


def test_random_weights_by_the_config_alone(tmp_path: Path) -> None:
    hf.BertConfig(**BERT, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    adapter = hf_stitch.load(str(tmp_path), pretrained=False)
    assert type(adapter.model) is hf.BertForMaskedLM
    head = hf_stitch.load(str(tmp_path), task="text-classification", pretrained=False, num_labels=5, dtype="bfloat16")
    assert head.model.config.num_labels == 5  # type: ignore[union-attr]
    assert next(head.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("head", [hf.MixtralModel, hf.MixtralForCausalLM, hf.MixtralForSequenceClassification])
def test_routers_among_the_outputs_are_switched_off(head: Any) -> None:
    config = hf.MixtralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vocab_size=60, num_local_experts=2, output_router_logits=True, pad_token_id=0,
    )  # fmt: skip
    layers = hf_stitch.load(head(config).eval()).layers
    assert [name.removeprefix("model.") for name in layers] == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.jit.script(Two()), "is TorchScript"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), r"lazy weights without a shape \(0.weight\)"),
        (lambda: Two().to("meta"), r"on the meta device and hold no values \(first.weight\)"),
    ],
)
def test_a_network_that_cannot_be_watched_is_told(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_stitch.load(make(), example_inputs=X)
