"""Example inputs: those that do not fit are refused before the network runs."""

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
    """A network with two arguments, one of which is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


class Several(Two):
    """A network with any number of positional arguments."""

    def forward(self, *xs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(xs[0])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (X.numpy(), "must be a tensor, a tuple .* or a dict .*, got ndarray"),
        ({"x": X.numpy()}, r"at least one tensor of content, .*got x \(ndarray\)"),
        ({"y": X}, r"\(y\) do not fit the forward of Two, which takes \(x: .*missing a required argument: 'x'"),
        ({"x": X, "y": X}, "unexpected keyword argument 'y'"),
        ((X, 1.0, X), "contain 3 values, but the forward of Two takes 2: x, scale"),
    ],
)
def test_an_example_that_does_not_fit_is_refused(example: Any, message: str) -> None:
    with pytest.raises(hf_stitch.adapters.ExampleError, match=message):
        hf_stitch.load(Two(), example_inputs=example)


def test_a_forward_with_positional_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes \(\*xs: .*\) and receives all arguments by name"):
        hf_stitch.load(Several(), example_inputs=X)


@pytest.mark.parametrize("example", [X, (X, 2.0), {"x": X, "scale": 2.0}])
def test_an_example_is_a_tensor_a_tuple_or_a_mapping(example: Any) -> None:
    assert hf_stitch.load(Two(), example_inputs=example).layers == ("first", "second")


def test_content_that_is_not_an_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="content must be one of x, the tensors of the input, got 'y'"):
        hf_stitch.load(Two(), example_inputs=X, content="y")
    with pytest.raises(ValueError, match="content must be one of x, the tensors of the input, got 'pixel_values'"):
        hf_stitch.load("timm:resnet10t", pretrained=False, content="pixel_values")
    with pytest.raises(ValueError, match="content must be an argument of BertModel, got 'y'; it takes input_ids, "):
        hf_stitch.load(hf.BertModel(hf.BertConfig(**BERT)), content="y")


def test_a_timm_model_takes_an_example() -> None:
    model, images = make("timm-resnet"), torch.randn(2, 3, 64, 64)
    layers = hf_stitch.load(model, example_inputs=images).layers
    assert hf_stitch.load(model, example_inputs={"x": images}, content="x").layers == layers
    with pytest.raises(ValueError, match="do not fit the forward of ResNet"):
        hf_stitch.load(model, example_inputs={"pixel_values": images})


def test_an_example_of_transformers_may_contain_other_values_than_tensors() -> None:
    model = hf.BertModel(hf.BertConfig(**BERT)).eval()
    ids = torch.randint(5, 50, (2, 6))
    adapter = hf_stitch.load(model, example_inputs={"input_ids": ids, "return_dict": True})
    assert adapter.layers == hf_stitch.load(model).layers
    with pytest.raises(ValueError, match=r"must contain a tensor 'input_ids', got input_ids \(ndarray\)"):
        hf_stitch.load(model, example_inputs={"input_ids": np.zeros((2, 6))})


def test_a_network_by_name_with_unusual_inputs_requires_an_example(tmp_path: Path) -> None:
    config = hf.PatchTSTConfig(num_input_channels=2, context_length=16, d_model=8, num_hidden_layers=2, ffn_dim=8)
    hf.PatchTSTModel(config).save_pretrained(tmp_path)
    with pytest.raises(hf_stitch.adapters.ExampleError, match="takes 'past_values': pass example_inputs"):
        hf_stitch.load(str(tmp_path))
    adapter = hf_stitch.load(str(tmp_path), example_inputs=torch.randn(2, 16, 2))
    assert adapter.interface.content == ("past_values",)


def test_random_weights_require_only_a_config(tmp_path: Path) -> None:
    hf.BertConfig(**BERT, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    adapter = hf_stitch.load(str(tmp_path), pretrained=False)
    assert type(adapter.model) is hf.BertForMaskedLM
    head = hf_stitch.load(str(tmp_path), task="text-classification", pretrained=False, num_labels=5, dtype="bfloat16")
    assert head.model.config.num_labels == 5  # type: ignore[union-attr]
    assert next(head.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("head", [hf.MixtralModel, hf.MixtralForCausalLM, hf.MixtralForSequenceClassification])
def test_router_logits_among_the_outputs_are_disabled(head: Any) -> None:
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
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"module '0' of Sequential has lazy weights without a shape"),
        (lambda: Two().to("meta"), r"module 'first' of Two has weights that are not .* on the meta device"),
    ],
)
def test_a_network_that_cannot_be_traced_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_stitch.load(make(), example_inputs=X)
