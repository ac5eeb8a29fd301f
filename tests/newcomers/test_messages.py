"""Messages for what newcomers pass by mistake: each names the argument, what was expected and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import analysis, metrics
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.analysis import Activations
from hf_stitch.cli import app
from hf_stitch.statistics import Features, Moments
from hf_stitch.training import SimilarityCallback


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


# -- what is no network, no example and no processor -------------------------------------------------------------------
IMAGES = [np.full((8, 8, 3), shade, dtype=np.float32) for shade in (0.1, 0.2)]


def to_tensor(image: Any) -> Tensor:
    return torch.as_tensor(image).permute(2, 0, 1)


def stitched(source: Any, target: Any, **options: Any) -> Any:
    return hf_stitch.stitch(source, target, IMAGES, source_layer="first", target_layer="first", **options)


def flat() -> list[hf_stitch.Adapter]:
    """Two networks with as many features as an image has samples to fit."""
    nets = [nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2)) for _ in range(2)]
    return [hf_stitch.load(net, example_inputs=torch.zeros(2, 3, 4, 4)) for net in nets]


def fit_of_vectors() -> Any:
    fit: dict[str, Any] = {"source_layer": "1", "target_layer": "2", "progress": False, "pooling": "flatten"}
    return hf_stitch.stitch(*flat(), torch.randn(12, 3, 4, 4), **fit)


def processed(processor: Any) -> Callable[[], Any]:
    return lambda: net(processor).preprocess(IMAGES)


def layers(example: Tensor) -> Callable[[], Any]:
    return lambda: hf_stitch.load(Net(), example_inputs=example).layers


ROOT = Path(__file__).parents[2]
SAVED = Activations({"layer": torch.randn(6, 4)}, range(6))
OF_0, RUNS = "the processor= of sample 0 ", "Net does not run on its example inputs, "
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: hf_stitch.load(Net), TypeError, "model must be a network.*got the class Net: pass an instance"),
    "a state dict": (
        lambda: hf_stitch.load(Net().state_dict()), TypeError,
        r"of a state dict, load the weights.*net\.load_state_dict\(state\)",
    ),
    "a pickle": (
        lambda: hf_stitch.load("weights.pt"), ValueError, r"weights\.pt is a file.*net\.load_state_dict\(torch\.load",
    ),
    "a file": (lambda: hf_stitch.load(ROOT / "LICENSE"), ValueError, "is a file, and a network is loaded from a fold"),
    "a path of a file": (lambda: hf_stitch.load(Path("model.ckpt")), ValueError, r"model\.ckpt is a file"),
    "no folder": (lambda: hf_stitch.load(ROOT / "nothing"), FileNotFoundError, "no folder"),
    "a list": (
        lambda: hf_stitch.load([1]), TypeError,
        "model must be a network .a name, an nn.Module, or one of a library.* got list",
    ),
    "one channel": (layers(torch.randn(2, 1, 8, 8)), ExampleError, RUNS + r"x \(2, 1, 8, 8\).*channels"),
    "no batch": (
        layers(torch.randn(3, 8, 8)), ExampleError,
        RUNS + r"x \(3, 8, 8\), or not on a batch of two of them, x \(2, 8, 8\).*channels",
    ),
    "a batch of one": (
        processed(lambda image: to_tensor(image)[None]), ValueError,
        OF_0 + r"gives a tensor of the shape \(1, 3, 8, 8\), and one of 3 axes.*leave out the batch axis",
    ),
    "no channels": (
        processed(lambda image: to_tensor(image)[0]), ValueError,
        OF_0 + r"gives a tensor of the shape \(8, 8\), and one of 3 axes is expected, as \(3, 8, 8\)$",
    ),
    "an array": (
        processed(lambda image: np.transpose(image, (2, 0, 1))), ValueError,
        OF_0 + r"gives ndarray, and one tensor.*torch\.as_tensor",
    ),
    "a dict": (
        processed(lambda image: {"x": to_tensor(image)}), ValueError, OF_0 + "gives dict, and one tensor is expected",
    ),
    "a sample without channels": (
        lambda: net().preprocess([torch.zeros(8, 8)]), ValueError, r"sample 0 gives a tensor of the shape \(8, 8\)",
    ),
    "activations as the source": (
        lambda: stitched(SAVED, net()), TypeError, r"source must be a network.*got Activations.*Moments\(dx, dy\)",
    ),
    "activations as the target": (
        lambda: stitched(net(), SAVED), TypeError, r"target must be a network.*got Activations",
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


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Hub that cannot be reached, and a clock on which clients wait for it in no time."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    nowhere = "http://127.0.0.1:9"  # the port on which everything is discarded
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.mark.usefixtures("nobody_answers")
def test_what_is_on_the_hub_fails_without_a_connection() -> None:
    from hf_stitch.data import read_data

    for name in ("org/name", "timm/name", "timm:resnet10t"):
        with pytest.raises(ConnectionError, match=f"{name} could not be loaded: the Hub did not respond"):
            hf_stitch.load(name)
    with pytest.raises(FileNotFoundError, match="cannot read the data set org/data: Couldn't reach"):
        read_data("org/data")


@pytest.mark.usefixtures("nobody_answers")
def test_a_cached_network_loads_at_once_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    commit = "0" * 40
    place = tmp_path / "models--org--name"
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    transformers.BertModel(config).save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.warns(UserWarning, match="org/name has no Tokenizer"):
        adapter = hf_stitch.load("org/name", cache_dir=str(tmp_path))
    assert adapter.reference.revision == commit
    assert sum(waited) < 1  # the client of the Hub waits 23 seconds for each file that the cache lacks


# -- the command line --------------------------------------------------------------------------------------------------


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ResNet of timm in a folder."""
    import timm

    place = tmp_path_factory.mktemp("network")
    model = timm.create_model("resnet10t", num_classes=10, in_chans=1, channels=(8, 8, 16, 16))
    timm.models.save_for_hf(
        model, place, model_args={"in_chans": 1, "channels": (8, 8, 16, 16)}, safe_serialization=True
    )
    return place


@pytest.mark.parametrize("command", ["layers", "doctor"])
def test_networks_run_in_another_dtype(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = hf_stitch.Adapter._run
    monkeypatch.setattr(
        hf_stitch.Adapter, "_run", lambda self, inputs, **trial: (seen.append(inputs["x"].dtype), run(self, inputs))[1]
    )
    assert invoke(command, folder, "--dtype", "float64", "--device", "cpu").exit_code == 0
    assert set(seen) == {torch.float64}


@pytest.mark.parametrize("command", ["compare", "stitch", "swap", "evaluate"])
def test_names_of_networks_are_checked_before_data_are_read(command: str, tmp_path: Path) -> None:
    options = {
        "swap": ("timm:nosuch", "--target-layer", "x", "--encoder-layer", "x", "--out", tmp_path / "out"),
        "stitch": ("timm:nosuch", "--out", tmp_path / "out"),
        "compare": ("timm:nosuch",),
    }
    place = tmp_path if command == "evaluate" else "timm:nosuch"
    failed = invoke(command, place, *options.get(command, ()), "--data", tmp_path / "nodata")
    assert failed.exit_code == 1
    assert "nodata" not in failed.stderr and ("nosuch" in failed.stderr or str(tmp_path) in failed.stderr)


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
    with pytest.raises(KeyError, match="no metric 'linear_cka:debiased=False'"):
        one["linear_cka:debiased=False"]
    several = hf_stitch.compare(*sides, metrics=["mutual_knn:k=3", "mutual_knn:k=5"])
    assert not np.array_equal(several["mutual_knn:k=3"], several["mutual_knn:k=5"])
    with pytest.raises(KeyError, match=r"several metrics 'mutual_knn'; it has mutual_knn\(k=3\), mutual_knn\(k=5\)"):
        several["mutual_knn"]


def test_options_follow_the_name_of_a_metric_everywhere(sides: list[Activations]) -> None:
    x, y = (next(iter(side.values.values())) for side in sides)
    expected = metrics.linear_cka(x, y, debiased=True).item()
    assert analysis.permutation_test("linear_cka:debiased=True", x, y, permutations=9).observed == pytest.approx(
        expected
    )
    assert analysis.bootstrap("linear_cka:debiased=True", x, y, resamples=9).value == pytest.approx(expected)
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
    kept = Features().update(x, y)
    np.testing.assert_array_equal(kept.y, y)
    with pytest.raises(TypeError, match=r"real floating-point numbers, got torch\.int64"):
        Moments(3, 2).update(x.astype(int), y)


# -- the command line: what metrics there are, and exit codes ----------------------------------------------------------
def test_list_metrics_describes_each_and_imports_nothing() -> None:
    code = (
        "import sys; sys.argv = ['hf-stitch', 'list', 'metrics', '--json']\n"
        "from hf_stitch.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    loaded = {'torch', 'transformers', 'scipy', 'hf_stitch.metrics._cka'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    entries = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert entries.keys() == set(hf_stitch.registries.metrics)
    cka, procrustes = entries["linear_cka"], entries["procrustes"]
    assert (cka["direction"], procrustes["direction"]) == ("higher", "lower")
    assert cka["range"] == [0, 1] and "orthogonal" in cka["invariances"] and cka["summary"]


DATA = ["compare", "a", "b", "--data", "d"]
DTYPES = "must be a floating-point dtype of torch (float32, float64, bfloat16, float16), got 'int8'"
COMMANDS: list[tuple[list[str], int, str]] = [
    (["nosuch"], 2, "nosuch"),
    (["layers"], 2, "Missing argument"),
    (["layers", "a", "--device", "nowhere"], 2, "this machine has no device 'nowhere' that torch can use"),
    (["layers", "a", "--dtype", "int8"], 2, DTYPES),
    ([*DATA, "--metric", "nosuch"], 2, "nosuch"),
    ([*DATA, "--metric", "linear_cka:debiased=7"], 2, "debiased"),
    ([*DATA, "--rows", "nosuch"], 2, "nosuch"),
    ([*DATA, "--align", "offsets"], 2, "offsets"),
    ([*DATA, "--rows", "positions", "--permutations", "9"], 2, "permutations"),
    (["swap", "a", "b", "--data", "d", "--out", "o", "--matcher", "nosuch"], 2, "nosuch"),
    (["layers", "nosuch/folder/of/nothing"], 1, "nosuch/folder/of/nothing"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), COMMANDS, ids=[" ".join(each) for each, *_ in COMMANDS])
def test_commands_exit_with_2_for_usage_and_1_for_what_failed(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments, prog_name="hf-stitch", env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert ("Usage:" in result.stderr) == (code == 2) and not any(tmp_path.iterdir())
