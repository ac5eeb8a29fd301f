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
from hf_stitch import analysis, metrics
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.analysis import Activations
from hf_stitch.statistics import Features, Moments
from hf_stitch.training import SimilarityCallback


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).mean((2, 3)))


def net(processor: Any = None) -> hf_stitch.Adapter:
    return hf_stitch.load(Net(), example_inputs=torch.randn(2, 3, 8, 8), processor=processor)


# -- what is no network, no example and no processor -------------------------------------------------------------------
IMAGES = [np.full((8, 8, 3), shade, dtype=np.float32) for shade in (0.1, 0.2)]


def to_tensor(image: Any) -> Tensor:
    return torch.as_tensor(image).permute(2, 0, 1)


def stitched(source: Any, target: Any, **options: Any) -> Any:
    return hf_stitch.stitch(source, target, IMAGES, source_layer="first", target_layer="first", **options)


def fit_of_vectors() -> Any:
    """A fit of more features than there are samples."""
    nets = [nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 3, 4, 4)) for net in nets)
    fit: dict[str, Any] = {"source_layer": "1", "target_layer": "2", "progress": False, "pooling": "flatten"}
    return hf_stitch.stitch(a, b, torch.randn(12, 3, 4, 4), **fit)


def processed(processor: Any) -> Callable[[], Any]:
    return lambda: net(processor).preprocess(IMAGES)


def layers(example: Tensor) -> Callable[[], Any]:
    return lambda: hf_stitch.load(Net(), example_inputs=example).layers


ROOT = Path(__file__).parents[2]
SAVED = Activations({"layer": torch.randn(6, 4)}, range(6))
OF_0, RUNS = "the output of processor= for sample 0 ", "Net fails on its example inputs, "
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: hf_stitch.load(Net), TypeError, "model must be a network.*got the class Net: pass an instance"),
    "a state dict": (
        lambda: hf_stitch.load(Net().state_dict()), TypeError,
        r"load the state dict into a network.*net\.load_state_dict\(state\)",
    ),
    "a pickle": (
        lambda: hf_stitch.load("weights.pt"), ValueError, r"weights\.pt is a file.*net\.load_state_dict\(torch\.load",
    ),
    "a file": (lambda: hf_stitch.load(ROOT / "LICENSE"), ValueError, "is a file, but networks are loaded from a fold"),
    "an export": (
        lambda: hf_stitch.load("model.onnx"), ValueError, r"model\.onnx is a file.*hf_stitch\.same\(network, file\)",
    ),
    "what a plugin takes": (
        lambda: hf_stitch.load(type("KeyedVectors", (), {"__module__": "gensim.models"})()), TypeError,
        r"got gensim\.KeyedVectors: for networks of gensim: pip install hf-stitch-word-vectors",
    ),
    "no folder": (lambda: hf_stitch.load(ROOT / "nothing"), FileNotFoundError, "does not exist"),
    "one channel": (layers(torch.randn(2, 1, 8, 8)), ExampleError, RUNS + r"x \(2, 1, 8, 8\).*channels"),
    "no batch": (
        layers(torch.randn(3, 8, 8)), ExampleError,
        RUNS + r"x \(3, 8, 8\), or on a batch of two of them, x \(2, 8, 8\).*channels",
    ),
    "a batch of one": (
        processed(lambda image: to_tensor(image)[None]), ValueError,
        OF_0 + r"must be a tensor with 3 axes, .*got the shape \(1, 3, 8, 8\): remove the batch axis",
    ),
    "an array": (
        processed(lambda image: np.transpose(image, (2, 0, 1))), ValueError,
        OF_0 + r"must be a tensor, got ndarray: use torch\.as_tensor",
    ),
    "a dict": (
        processed(lambda image: {"x": to_tensor(image)}), ValueError, OF_0 + "must be a tensor, got dict",
    ),
    "a sample without channels": (
        lambda: net().preprocess([torch.zeros(8, 8)]), ValueError, r"sample 0 must be a tensor with 3 axes.*\(8, 8\)",
    ),
    "activations as the source": (
        lambda: stitched(SAVED, net()), TypeError, r"source must be a network.*got Activations.*Moments\(dx, dy\)",
    ),
    "activations as an encoder": (
        lambda: hf_stitch.swap(net(), SAVED, IMAGES, target_layer="first", encoder_layer="layer"), TypeError,
        r"encoder must be a network .*got Activations",
    ),
    "a fit of vectors": (fit_of_vectors, ValueError, r"the map of vectors \(pooling 'flatten'\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_passed_by_mistake_is_named(case: str) -> None:
    job, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        job()


# -- without a connection ----------------------------------------------------------------------------------------------


def test_offline_cached_files_load_at_once_and_the_rest_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from huggingface_hub import constants

    from hf_stitch.data import read_data

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    nowhere = "http://127.0.0.1:9"  # the port on which everything is discarded
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    commit, place = "0" * 40, tmp_path / "models--org--cached"
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    network = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=20))
    network.save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    with pytest.warns(UserWarning, match="org/cached does not contain a usable Tokenizer"):
        adapter = hf_stitch.load("org/cached", cache_dir=str(tmp_path))
    assert adapter.reference.revision == commit
    assert sum(waited) < 1  # the client of the Hub waits 23 seconds for each file that the cache lacks
    for name in ("org/name", "timm/name", "timm:resnet10t"):
        with pytest.raises(ConnectionError, match=f"{name} could not be loaded: the Hub did not respond"):
            hf_stitch.load(name)
    with pytest.raises(FileNotFoundError, match="cannot read the dataset org/data: Couldn't reach"):
        read_data("org/data")


# -- metrics by name, tables, arrays, single stitches ------------------------------------------------------------------
@pytest.fixture(scope="module")
def sides() -> list[Activations]:
    generator = torch.Generator().manual_seed(0)
    return [
        Activations({f"{side}{i}": torch.randn(20, 5, generator=generator) for i in range(2)}, range(20))
        for side in "ab"
    ]


def test_the_one_cka_of_an_atlas_is_found_by_its_name(sides: list[Activations]) -> None:
    one = hf_stitch.compare(*sides, metrics=["linear_cka:debiased=True", "mutual_knn:k=3,distance=euclidean"])
    assert list(one.values) == ["linear_cka(debiased=True)", "mutual_knn(k=3, distance=euclidean)"]
    for name in ("linear_cka", "linear_cka:debiased=True", "linear_cka:debiased=true", "linear_cka(debiased=True)"):
        np.testing.assert_array_equal(one[name], one.values["linear_cka(debiased=True)"])
    np.testing.assert_array_equal(one["mutual_knn:distance=euclidean"], one["mutual_knn"])
    assert one.best_matches("linear_cka") == one.best_matches()
    assert one.plot("mutual_knn") is not None
    with pytest.raises(KeyError, match="got 'linear_cka:debiased=False'"):
        one["linear_cka:debiased=False"]
    several = hf_stitch.compare(*sides, metrics=["mutual_knn:k=3", "mutual_knn:k=5"])
    assert not np.array_equal(several["mutual_knn:k=3"], several["mutual_knn:k=5"])
    with pytest.raises(KeyError, match=r"one of mutual_knn\(k=3\), mutual_knn\(k=5\), got 'mutual_knn', which names"):
        several["mutual_knn"]


def test_options_follow_the_name_of_a_metric_everywhere(sides: list[Activations]) -> None:
    x, y = (next(iter(side.values.values())) for side in sides)
    cka = metrics.linear_cka(x, y, debiased=True).item()
    assert analysis.permutation_test("linear_cka:debiased=True", x, y, permutations=9).observed == pytest.approx(cka)
    assert analysis.bootstrap("linear_cka:debiased=True", x, y, resamples=9).value == pytest.approx(cka)
    net = hf_stitch.load(nn.Sequential(nn.Linear(5, 3)), example_inputs=x[:2])
    callback = SimilarityCallback("start", x, layers=["0"], metrics=["linear_cka:debiased=True"])
    assert list(callback.measure(net, step=0)) == ["similarity_to_start/linear_cka(debiased=True)/0"]
    with pytest.raises(TypeError, match="option 'k' of 'mutual_knn' is given twice"):
        hf_stitch.registries.metrics.build("mutual_knn:k=3", k=5)


def test_moments_take_arrays_as_metrics_do() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 5))
    x, y = rows[:, :3], rows[::-1, 3:]  # a view with a step backwards
    arrays = Moments(3, 2).update(x, y)
    tensors = Moments(3, 2).update(torch.tensor(x.copy()), torch.tensor(y.copy()))
    assert all(torch.equal(value, tensors.state_dict()[name]) for name, value in arrays.state_dict().items())
    np.testing.assert_allclose(arrays.sxy, (x - x.mean(0)).T @ (y - y.mean(0)), atol=1e-12)
    np.testing.assert_array_equal(Features().update(x, y).y, y)
    with pytest.raises(TypeError, match=r"real floating-point numbers, got torch\.int64"):
        Moments(3, 2).update(x.astype(int), y)
