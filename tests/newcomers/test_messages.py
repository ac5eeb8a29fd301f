"""Messages for what newcomers pass by mistake: each names the argument, what was expected and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.analysis import Activations


class Net(nn.Module):
    """User code that takes images with three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).mean((2, 3)))


def net(processor: Any = None) -> hf_stitch.Adapter:
    return hf_stitch.load(Net(), example_inputs=torch.randn(2, 3, 8, 8), processor=processor)


# -- what is no network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (Net, TypeError, "model must be a network, got the class Net: pass an instance"),
        (Net().state_dict(), TypeError, r"got a state dict of 6 tensors.*net\.load_state_dict\(state\)"),
        ("weights.pt", ValueError, r"weights\.pt is a file.*net\.load_state_dict\(torch\.load"),
        ("folder/model.safetensors", ValueError, "is a file, and a network is loaded from a folder"),
        (Path("model.ckpt"), ValueError, r"model\.ckpt is a file"),
        ([1], TypeError, "model must be a name, an nn.Module, or a network.* got an object of type builtins.list"),
    ],
)
def test_what_is_passed_in_place_of_a_network_is_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf_stitch.load(given)


def test_a_file_is_no_folder_whatever_its_name(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "network")
    with pytest.raises(ValueError, match="network is a file, and a network is loaded from a folder"):
        hf_stitch.load(str(tmp_path / "network"))


def test_a_folder_can_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        hf_stitch.load(tmp_path / "nothing")


# -- examples and processors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "shapes"),
    [
        (torch.randn(2, 1, 8, 8), r"x \(2, 1, 8, 8\)"),
        (torch.randn(3, 8, 8), r"x \(3, 8, 8\), or not on a batch of two of them, x \(2, 8, 8\)"),
    ],
)
def test_an_example_that_the_network_does_not_take_is_named(example: Tensor, shapes: str) -> None:
    adapter = hf_stitch.load(Net(), example_inputs=example)
    with pytest.raises(ExampleError, match=rf"Net does not run on its example inputs, {shapes}.*channels"):
        adapter.layers  # noqa: B018


IMAGES = [np.full((8, 8, 3), shade, dtype=np.float32) for shade in (0.1, 0.2)]


def to_tensor(image: Any) -> Tensor:
    return torch.as_tensor(image).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (
            lambda image: to_tensor(image)[None],
            r"gives a tensor of the shape \(1, 3, 8, 8\), and one of 3 axes.*leave out the batch axis",
        ),
        (
            lambda image: to_tensor(image)[0],
            r"gives a tensor of the shape \(8, 8\), and one of 3 axes is expected, as \(3, 8, 8\)$",
        ),
        (lambda image: np.transpose(image, (2, 0, 1)), r"gives ndarray, and one tensor.*torch\.as_tensor"),
        (lambda image: {"x": to_tensor(image)}, "gives dict, and one tensor is expected"),
    ],
)
def test_a_processor_that_returns_something_else_is_named(processor: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"the processor= of sample 0 {message}"):
        net(processor).preprocess(IMAGES)


def test_tensors_without_their_channels_are_named() -> None:
    with pytest.raises(ValueError, match=r"sample 0 gives a tensor of the shape \(8, 8\)"):
        net().preprocess([torch.zeros(8, 8)])
    assert net(to_tensor).preprocess(IMAGES)["x"].shape == (2, 3, 8, 8)


def test_saved_activations_are_no_network_to_stitch() -> None:
    saved, adapter = Activations({"layer": torch.randn(6, 4)}, range(6)), net()
    with pytest.raises(TypeError, match=r"source must be a network, got Activations.*Moments\(dx, dy\)"):
        hf_stitch.stitch(saved, adapter, IMAGES, source_layer="layer", target_layer="first")
    with pytest.raises(TypeError, match="target must be a network, got Activations"):
        hf_stitch.stitch(adapter, saved, IMAGES, source_layer="first", target_layer="layer")
    with pytest.raises(TypeError, match="encoder must be a network, got Activations"):
        hf_stitch.swap(adapter, saved, IMAGES, target_layer="first", encoder_layer="layer")


# -- without a connection ----------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Hub that cannot be reached, and a clock on which nobody may wait for it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port on which everything is discarded

    def wait(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s for a Hub that cannot be reached")

    monkeypatch.setattr(time, "sleep", wait)


@pytest.mark.usefixtures("nobody_answers")
@pytest.mark.parametrize("name", ["org/name", "timm/name", "timm:resnet10t"])
def test_a_network_of_the_hub_fails_at_once_without_a_connection(name: str) -> None:
    with pytest.raises(ConnectionError, match=f"{name} could not be loaded: the Hub cannot be reached.*not in the cac"):
        hf_stitch.load(name)


@pytest.mark.usefixtures("nobody_answers")
def test_data_of_the_hub_fail_at_once_without_a_connection() -> None:
    from hf_stitch.data import read_data

    with pytest.raises(ConnectionError, match="cannot read the data set org/data: the Hub cannot be reached"):
        read_data("org/data")


@pytest.mark.usefixtures("nobody_answers")
def test_a_cached_network_loads_without_a_connection(tmp_path: Path) -> None:
    import transformers

    commit = "0" * 40
    place = tmp_path / "models--org--name"
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    transformers.BertModel(config).save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    with pytest.warns(UserWarning, match="org/name has no Tokenizer"):
        adapter = hf_stitch.load("org/name", cache_dir=str(tmp_path))
    assert adapter.reference.revision == commit
