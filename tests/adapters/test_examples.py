"""Example inputs: those that do not fit are refused before the network runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import BERT, make
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters import ExampleError

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


def bert() -> Any:
    return hf.BertModel(hf.BertConfig(**BERT)).eval()


class Called(nn.Module):
    """A network whose forward takes anything and passes it on to another method, as those of Keras do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).relu())


class Listed(Called):
    """A network with layers in a list, which are no submodules, and perhaps one before them."""

    def __init__(self, *, stem: bool) -> None:
        super().__init__()
        self.layers, self.stem = [nn.Linear(4, 4), nn.Linear(4, 4)], stem

    def call(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs) if self.stem else inputs
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return self.second(inputs)


RESNET, PIXELS = "timm:resnet10t", torch.randn(2, 3, 64, 64)
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "an array": (Two, {"example_inputs": X.numpy()}, "a tensor, or .* a tuple or .* a dict, got ndarray"),
    "an array by name": (Two, {"example_inputs": {"x": X.numpy()}}, r"x \(ndarray\)"),
    "another name": (Two, {"example_inputs": {"y": X}}, r"\(y\) .* Two.*missing a required argument: 'x'"),
    "a name too many": (Two, {"example_inputs": {"x": X, "y": X}}, "unexpected keyword argument 'y'"),
    "a value too many": (Two, {"example_inputs": (X, 1.0, X)}, "3 values, but .* Two accepts 2: x, scale"),
    "arguments without names": (Several, {"example_inputs": X}, r"\(\*xs: .*\), which receives all arguments by name"),
    "a name of timm": (lambda: make("timm-resnet"), {"example_inputs": {"pixel_values": PIXELS}}, "forward of ResNet"),
    "an array of transformers": (bert, {"example_inputs": {"input_ids": np.zeros((2, 6))}}, r"input_ids \(ndarray\)"),
    "content": (Two, {"example_inputs": X, "content": "y"}, "content must be one of the input tensors x, .*got 'y'"),
    "content of timm": (lambda: RESNET, {"pretrained": False, "content": "pixels"}, "input tensors x, .*got 'pixels'"),
    "content of transformers": (bert, {"content": "y"}, "an argument of BertModel, got 'y'; it accepts input_ids, "),
    "a network of a plugin": (
        lambda: nn.Sequential(type("GCNConv", (nn.Linear,), {"__module__": "torch_geometric.nn.conv"})(4, 4)), {},
        "For networks of torch_geometric: pip install hf-stitch-graphs, see its README",
    ),
    "lazy weights": (lambda: nn.Sequential(nn.LazyLinear(4)), {"example_inputs": X}, "module '0' .* has lazy weights"),
    "a mistyped name of timm": (lambda: "timm:rexnt_100", {}, "did you mean 'rexnet_100'"),
    "a head of timm": (lambda: RESNET, {"task": "text-classification", "pretrained": False}, "head of timm:resnet10t"),
    "no network": (lambda: Path, {}, r"library with an adapter: hf_stitch, .*, torch, .*got the class Path"),
    "a live network": (lambda: make("timm-resnet"), {"num_classes": 3}, "options, got num_classes"),
}  # fmt: skip
"""What does not fit -> network, options and message."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_a_network_is_refused(case: str) -> None:
    network, options, message = REFUSED[case]
    with pytest.raises(TypeError if case in ("no network", "a live network") else ValueError, match=message) as caught:
        hf_stitch.load(network(), **options)
    assert isinstance(caught.value, ExampleError) or network is not Two or "content" in options


@pytest.mark.parametrize("example", [X, (X, 2.0), {"x": X, "scale": 2.0}])
def test_an_example_is_a_tensor_a_tuple_or_a_mapping(example: Any) -> None:
    assert hf_stitch.load(Two(), example_inputs=example).layers == ("first", "second")


def test_an_example_has_the_name_of_the_method_that_is_called() -> None:
    adapter = hf_stitch.load(Called(), example_inputs=X)
    assert (adapter.interface.content, adapter.layers) == (("inputs",), ("first",))


def test_layers_that_are_no_submodules_are_named() -> None:
    message = r"Listed runs modules that are not its submodules \(in layers\).*store them .* in an nn\.ModuleList"
    with pytest.raises(ValueError, match=message):
        hf_stitch.load(Listed(stem=False), example_inputs=X).layers  # noqa: B018
    with pytest.warns(UserWarning, match=message):
        assert hf_stitch.load(Listed(stem=True), example_inputs=X).layers == ("first",)


def test_modules_aside_are_no_layers() -> None:
    network = Called()
    network.aside = {"a submodule": network.first, "what does not run": nn.Linear(2, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hf_stitch.load(network, example_inputs=X).layers == ("first",)


def test_examples_of_timm_and_transformers() -> None:
    model, images, ids = make("timm-resnet"), torch.randn(2, 3, 64, 64), torch.randint(5, 50, (2, 6))
    layers = hf_stitch.load(model, example_inputs=images).layers
    assert hf_stitch.load(model, example_inputs={"x": images}, content="x").layers == layers
    adapter = hf_stitch.load(bert(), example_inputs={"input_ids": ids, "return_dict": True})
    assert adapter.layers == hf_stitch.load(bert()).layers


def test_a_network_by_name_with_unusual_inputs_requires_an_example(tmp_path: Path) -> None:
    config = hf.PatchTSTConfig(num_input_channels=2, context_length=16, d_model=8, num_hidden_layers=2, ffn_dim=8)
    hf.PatchTSTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ExampleError, match="'past_values' of PatchTSTModel cannot be generated: pass example_inputs"):
        hf_stitch.load(str(tmp_path))
    assert hf_stitch.load(str(tmp_path), example_inputs=torch.randn(2, 16, 2)).interface.content == ("past_values",)


def test_random_weights_require_only_a_config(tmp_path: Path) -> None:
    hf.BertConfig(**BERT, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    assert type(hf_stitch.load(str(tmp_path), pretrained=False).model) is hf.BertForMaskedLM
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
