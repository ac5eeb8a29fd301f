"""Networks of user code on the command line: functions of Python files, which nothing but a typed name runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch.analysis import SimilarityAtlas
from hf_stitch.cli import functions

from calls import error_line, run, usage_error, words  # isort: skip
from records import rewrite  # isort: skip
from tiny_networks import LAYERS, SIZE, network  # isort: skip

SECRET = "home-of-alice"
SIDES = ("source", "target")
DIGITS = ("--data", "sklearn:digits", "--split", "test", "--max-samples", "40")
LAYER = ("--layer-a", "0", "--layer-b", "0")
IMAGES = [(torch.full((3, SIZE, SIZE), i / 30), i % 2) for i in range(30)]
CODE = """
from pathlib import Path
import numpy, torch
from torch import nn
import hf_stitch
from beside import WIDTH

Path(__file__).with_name("ran").touch()

def pixels(image):
    return torch.from_numpy(numpy.array(image.convert("L").resize((8, 8))))[None] / 255

class Net(nn.Sequential):
    def __init__(self, seed=0, width=WIDTH):
        torch.manual_seed(seed)
        super().__init__(
            nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(width, width, 3), nn.ReLU()),
            nn.Flatten(), nn.Linear(16 * width, 10),
        )

def small():
    return hf_stitch.load(Net(0).eval(), example_inputs=torch.randn(2, 1, 8, 8), processor=pixels)

def large():
    return Net(1, 2 * WIDTH).eval(), pixels

def third():
    return Net(2).eval(), pixels

def bare():
    return Net()

def nothing():
    pass

def text():
    return "timm:resnet10t"

def many():
    return Net(), pixels, 3

def state():
    return Net().state_dict()

def of_width(width):
    return Net(width=width)

def broken():
    raise KeyError("weights")

def leaves():
    raise SystemExit(3)

def twice():
    return small(), pixels

net = Net()
"""


def write(folder: Path, code: str = CODE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "beside.py").write_text("WIDTH = 4\n")
    (folder / "mine.py").write_text(code)
    return folder / "mine.py"


@pytest.fixture(autouse=True)
def _import_path() -> Iterator[None]:
    """Forget what the files of a test have imported."""
    before, modules = list(sys.path), {*sys.modules}
    yield
    sys.path[:] = before
    functions._MODULES.clear()
    functions._FOLDERS.clear()
    for name in {*sys.modules} - modules:
        if name == "beside" or name.startswith("hf_stitch_file_"):
            del sys.modules[name]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write(tmp_path / SECRET)


def recorded(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output or "--out" in arguments
    return json.loads(result.stdout)


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# -- every command -----------------------------------------------------------------------------------------------------


def test_layers_and_doctor_take_a_function(mine: Path) -> None:
    found = recorded("layers", f"{mine}:small")
    assert found["model"] == "mine.py:small" and found["task"] == "image-classification"
    assert [each["layer"] for each in found["layers"]] == ["0", "1"]
    assert recorded("layers", f"{mine}:large")["layers"][0]["spec"]["width"] == 8
    diagnosis = recorded("doctor", f"{mine}:large")
    assert diagnosis["model"] == "mine.py:large" and diagnosis["takes"] == ["image", "input"]
    result = run("doctor", f"{mine}:bare")
    assert result.exit_code == 1 and "mine.py:bare" in result.output and "example_inputs" in result.output


def test_a_relative_path_and_the_folder_of_the_user(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    monkeypatch.setenv("HOME", str(mine.parent))
    for name in ("mine.py:small", "./mine.py:small", "~/mine.py:small"):
        assert recorded("layers", name)["model"] == "mine.py:small"


def test_a_comparison_names_the_functions(mine: Path, tmp_path: Path) -> None:
    options = ("--out", tmp_path / "out", "--report", tmp_path / "page.html", "--checkpoint-dir", tmp_path / "job")
    recorded("compare", f"{mine}:small", f"{mine}:large", *DIGITS, *LAYER, *options)
    atlas = SimilarityAtlas.load(tmp_path / "out" / "atlas.json")
    assert atlas._titles == ("layers of a: mine.py:small", "layers of b: mine.py:large")
    for folder in ("out", "job"):
        assert SECRET.encode() not in everything(tmp_path / folder)
    page = (tmp_path / "page.html").read_text()
    assert SECRET not in page and "mine.py:small" in page


def test_two_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first, second = (write(tmp_path / SECRET / name) for name in ("first", "second"))
    found = recorded("compare", f"{first}:small", f"{second}:small", *DIGITS, *LAYER)
    names = [found["recipe"][side]["reference"]["summary"].split(",")[0] for side in "ab"]
    assert names == ["first/mine.py:small", "second/mine.py:small"]
    names = recorded(
        "bench", f"{first}:small", f"{second}:small", f"{first}:third", "--metric", "procrustes", *DIGITS, "--layer",
        "0", "--references", "2",
    )["recipe"]["networks"]  # fmt: skip
    assert [*names] == ["first/mine.py:small", "second/mine.py:small", "mine.py:third"]


def test_a_stitch_is_evaluated_with_the_functions_again(mine: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "p.html"
    (out / "model").mkdir(parents=True)  # of an earlier run
    layers = ("--source-layer", "0", "--target-layer", "0")
    result = run("stitch", f"{mine}:small", f"{mine}:third", *DIGITS, *layers, "--out", out, "--report", page)
    assert result.exit_code == 0, result.output
    assert "only the stitcher is saved" in result.stderr and "--source and --target" in result.stderr
    assert not (out / "model").exists() and SECRET.encode() not in everything(out)
    assert SECRET not in page.read_text() and "mine.py:third" in page.read_text()
    assert "--source: is required" in usage_error("evaluate", out / "stitcher", *DIGITS)
    again = recorded(
        "evaluate", out / "stitcher", "--source", f"{mine}:small", "--target", f"{mine}:third", *DIGITS
    )  # fmt: skip
    assert again["scores"]["source"]["accuracy"]["value"] >= 0 and again["n"] == 40
    shown = recorded("layers", out / "stitcher")
    assert shown["source"]["id"] is None and shown["source"]["summary"].startswith("mine.py:small, Net, ")
    line = error_line("evaluate", out / "stitcher", "--source", f"{mine}:third", "--target", f"{mine}:small", *DIGITS)
    assert "source and target are swapped" in line


def test_a_grid_and_a_swap_take_functions(mine: Path, tmp_path: Path) -> None:
    grid = recorded("grid", f"{mine}:small", f"{mine}:large", *DIGITS, "--layer-a", "0", "--layer-b", "1")
    assert grid["recipe"]["a"]["summary"].startswith("mine.py:small, ")
    result = run(
        "swap", f"{mine}:small", f"{mine}:third", "--encoder-layer", "2", "--target-layer", "2", "--pooling", "flatten",
        "--anchors", "20", *DIGITS[:4], "--max-samples", "40", "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0 and "only the stitcher is saved" in result.stderr, result.output
    assert SECRET.encode() not in everything(tmp_path / "out")


def test_the_file_runs_once_and_again_when_it_changes(mine: Path) -> None:
    mine.write_text(CODE + "\nimport beside\nbeside.RUNS = getattr(beside, 'RUNS', 0) + 1\n")
    recorded("compare", f"{mine}:small", f"{mine}:large", *DIGITS, *LAYER)
    assert sys.modules["beside"].RUNS == 1
    mine.write_text(mine.read_text().replace("Net(0)", "Net(5)"))
    recorded("layers", f"{mine}:small")
    assert sys.modules["beside"].RUNS == 2


@pytest.mark.parametrize("beside", ["beside.py", "beside/__init__.py", "beside/wide.py"])
def test_each_file_imports_what_is_beside_it(beside: str, tmp_path: Path) -> None:
    made = {}
    for width in (4, 6):
        mine = write(
            tmp_path / str(width), CODE.replace("from beside import", f"from {beside[:-3].replace('/', '.')} import")
        )
        mine.with_name("beside.py").unlink()
        (mine.parent / beside).parent.mkdir(exist_ok=True)
        (mine.parent / beside).write_text(f"WIDTH = {width}")
        made[width] = str(mine)
    for width in (4, 6, 4):
        assert functions.load(f"{made[width]}:third", None, {}).spec("0").width == width


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "messages"),
    [
        (
            "smal",
            [
                "mine.py does not define a function 'smal'; did you mean 'small'?",
                "a function without arguments that returns the network",
            ],
        ),
        ("zzz", ["it defines pixels, small, large", "twice. Define a function"]),
        ("", ["mine.py does not define a function ''"]),
        ("net", ["mine.py:net must be a function, got an object of type Net"]),
        ("of_width", ["must be a function without arguments, got of_width(width)", "pass a function that calls it"]),
        ("broken", ["mine.py:broken raised an error: KeyError: 'weights' (mine.py, line 49)", "--debug"]),
        ("leaves", ["mine.py:leaves raised an error: SystemExit: 3"]),
        ("nothing", ["must return the network (an nn.Module), (network, processor), or", "got None"]),
        ("text", ["got 'timm:resnet10t'"]),
        ("many", ["got a tuple of 3"]),
        ("state", ["mine.py:state must return the network", "load the state dict into a network"]),
        ("bare", ["the network of mine.py:bare cannot be loaded: Net is a custom class", "example_inputs=…"]),
        ("twice", ["mine.py:twice must return", "an adapter keeps its loading options, got processor"]),
    ],
)
def test_what_a_function_must_return(function: str, messages: list[str], mine: Path) -> None:
    line = error_line("layers", f"{mine}:{function}")
    assert all(message in line for message in messages), line
    assert SECRET not in line


def test_what_a_file_must_be(mine: Path) -> None:
    assert "no file" in error_line("layers", f"{mine.with_name('other.py')}:small")
    mine.write_text("import nothing_of_this_name\n")
    line = error_line("layers", f"{mine}:small")
    assert "mine.py could not be run: ModuleNotFoundError: " in line and "this_name' (mine.py, line 1)" in line
    mine.write_text("def small(:\n")
    assert "mine.py could not be run: SyntaxError" in error_line("layers", f"{mine}:small")
    mine.write_text("import sys\nsys.exit(2)\n")
    assert "mine.py could not be run: SystemExit: 2" in error_line("layers", f"{mine}:small")
    assert "only the command line runs (as mine.py:function)" in error_line("layers", mine)


@pytest.mark.parametrize(
    ("command", "option"), [("layers", "--dtype=float64"), ("doctor", "--dtype=float64"), ("doctor", "--random")]
)
def test_options_of_loading_belong_into_the_function(command: str, option: str, mine: Path) -> None:
    message = usage_error(command, f"{mine}:small", option)
    assert option.partition("=")[0] in message and "in the function" in message


def test_a_network_is_no_artefact(mine: Path) -> None:
    assert "got the network" in usage_error("evaluate", f"{mine}:small", *DIGITS)
    assert not mine.with_name("ran").exists()


def test_the_task_of_a_network_can_be_named(mine: Path) -> None:
    assert recorded("layers", f"{mine}:large", "--task", "text-classification")["task"] == "text-classification"
    assert "loading options, got task" in error_line("layers", f"{mine}:small", "--task", "text-classification")


# -- names that nobody typed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stitcher, a stitched model, a result and a job."""
    folder, vit = tmp_path_factory.mktemp("saved"), network("vit")
    layer = {"source_layer": LAYERS["vit"], "target_layer": LAYERS["vit"]}
    made = hf_stitch.stitch(vit, vit, IMAGES, **layer, matcher="identity", progress=False)
    made.save_pretrained(folder / "model")
    made.stitcher.save_pretrained(folder / "stitcher")
    one = {"layers_a": [LAYERS["vit"]], "layers_b": [LAYERS["vit"]]}
    hf_stitch.compare(vit, vit, IMAGES, **one, checkpoint_dir=folder / "job", progress=False).save(
        folder / "atlas.json"
    )
    return folder


@pytest.fixture
def artefacts(saved: Path, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with records that name a function as both networks, from whose folder they are used."""
    folder = shutil.copytree(saved, tmp_path / "artefacts")
    for file in ("stitcher/stitcher.json", "model/config.json"):
        rewrite(folder / file, lambda record: [record[side]["reference"].update(id="mine.py:small") for side in SIDES])
    for file in ("atlas.json", "job/job.json"):
        text = (folder / file).read_text()
        assert '"id": null' in text
        (folder / file).write_text(text.replace('"id": null', '"id": "mine.py:small"'))
    monkeypatch.chdir(mine.parent)
    return folder


@pytest.mark.parametrize("name", ["mine.py:small", "./mine.py:small", "{mine}:small", "folder/mine.py:small"])
def test_load_never_runs_a_file(name: str, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    name = name.format(mine=mine)
    for given in (name, Path(name)):
        with pytest.raises(ValueError, match=r"is Python code, which only the command line runs"):
            hf_stitch.load(given)
    for library in ("transformers", "timm", "torch"):
        with pytest.raises(ValueError, match="only the command line runs"):
            hf_stitch.adapters.load_recorded(hf_stitch.ModelReference(name, library))
    assert not mine.with_name("ran").exists()


def test_records_never_run_a_file(artefacts: Path, mine: Path) -> None:
    with pytest.raises(ValueError, match="only the command line runs"):
        hf_stitch.Stitcher.from_pretrained(artefacts / "stitcher").attach()
    model = hf_stitch.StitchedModel.from_pretrained(artefacts / "model")
    assert model(pixel_values=torch.stack([pixels for pixels, _ in IMAGES[:2]])).logits.isfinite().all()
    for run_parent in (lambda: model.parent("source"), lambda: hf_stitch.evaluate(model, IMAGES, progress=False)):
        with pytest.raises(ValueError, match="only the command line runs"):
            run_parent()
    hf_stitch.load(str(artefacts / "model"))
    SimilarityAtlas.load(artefacts / "atlas.json").to_html(artefacts / "atlas.html")
    hf_stitch.load_report(artefacts / "atlas.html")
    assert "mine.py:small" in (artefacts / "atlas.html").read_text()
    assert not mine.with_name("ran").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate {at}/stitcher", "--source: is required"),
        ("evaluate {at}/model", "--target: is required"),
        ("evaluate {at}/model --target {at}/model", ""),
        ("layers {at}/stitcher", "mine.py:small"),
        ("layers {at}/model", "mine.py:small"),
        ("doctor {at}/model", ""),
        ("swap {at}/stitcher {at}/model --encoder-layer 0 --out {at}/out", "only the command line runs"),
    ],
)
def test_commands_run_no_name_of_a_record(command: str, message: str, artefacts: Path, mine: Path) -> None:
    result = run(*command.format(at=artefacts).split(), *(DIGITS if command.startswith(("evaluate", "swap")) else ()))
    assert message in words(result.output), result.output
    assert not mine.with_name("ran").exists()


def test_a_job_and_a_stitcher_take_only_what_is_typed(artefacts: Path, mine: Path) -> None:
    src = write(artefacts / "other")
    line = error_line("compare", f"{src}:small", f"{src}:third", *DIGITS, *LAYER, "--checkpoint-dir", artefacts / "job")
    assert "job.json" in line
    line = error_line(
        "evaluate", artefacts / "stitcher", "--source", f"{src}:small", "--target", f"{src}:third", *DIGITS
    )
    assert "has other weights than the stitch was fitted to" in line
    assert src.with_name("ran").exists() and not mine.with_name("ran").exists()
