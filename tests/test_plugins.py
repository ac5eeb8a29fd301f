"""Plugins: those of this project by name, and single files, loaded where they are named and taken back whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import registries
from hf_stitch.analysis import StitchGrid
from hf_stitch.cli import app
from hf_stitch.plugins import PluginError, load_plugin
from hf_stitch.provenance import check_requirements, requirements
from hf_stitch.registry import UnknownNameError

from distributions import TABLE, table  # isort: skip

CODE = """
from dataclasses import dataclass
from hf_stitch import registries
from hf_stitch.matchers.regression import Lstsq

@registries.matchers.register("file_lstsq")
@dataclass(frozen=True)
class FileLstsq(Lstsq):
    name = "file_lstsq"
    times: float = {times}
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "own.py"
    place.write_text(CODE.format(times=1.0))
    yield place
    if "file_lstsq" in registries.matchers:
        load_plugin(place).unload()


def two_networks() -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval() for _ in "ab"]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    return a, b


# -- plugins of this project -------------------------------------------------------------------------------------------
def test_the_table_of_their_names_is_up_to_date() -> None:
    """``python tests/distributions.py`` writes it."""
    assert json.loads(TABLE.read_text(encoding="utf-8")) == table()


MOVED = ("correlation_matching", "distance_correlation", "frechet", "soft_matching:compare=distance")
"""Metrics that were built in before."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in registries:
        monkeypatch.setitem(vars(registries[kind]), "_plugins", {})


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        ("detectors", "energy", "hf-stitch-studies"),
        ("metrics", "weight_cosine", "hf-stitch-versions"),
        *(("metrics", name, "hf-stitch-metrics") for name in MOVED),
        ("matchers", "diagonal:x=1", "hf-stitch-diagonal"),
        ("matchers", "unsupervised", "hf-stitch-embeddings"),
        ("matchers", "retrieval:epochs=2", "hf-stitch-embeddings"),
        ("results", "Bench", "hf-stitch-studies"),
    ],
)
def test_a_name_of_a_missing_plugin_tells_which(kind: str, name: str, distribution: str, alone: None) -> None:
    with pytest.raises(UnknownNameError, match=f"among {kind}; it comes with {distribution}: pip install"):
        registries[kind].build(name)


def test_a_stitcher_of_a_missing_matcher_loads_and_has_a_card(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    a, b = two_networks()
    x, place = torch.randn(60, 4), {"source_layer": "1", "target_layer": "1", "progress": False}
    fitted = hf_stitch.stitch(a, b, x, matcher="residual_mlp:epochs=1,width=4", task="image-classification", **place)
    fitted.stitcher.save_pretrained(tmp_path / "before")
    request.getfixturevalue("alone")
    stitcher = hf_stitch.Stitcher.from_pretrained(tmp_path / "before")
    assert torch.equal(stitcher.attach(a, b)(input=x).logits, fitted(input=x).logits)
    stitcher.save_pretrained(tmp_path / "after")
    assert "residual_mlp" in (tmp_path / "after" / "README.md").read_text("utf-8")
    with pytest.raises(UnknownNameError, match=r"'residual_mlp' among matchers; .* pip install hf-stitch-embeddings"):
        hf_stitch.stitch(a, b, x, matcher="residual_mlp", task="image-classification", **place)


def test_a_command_of_a_plugin_that_is_not_installed_tells_which(alone: None) -> None:
    found = CliRunner().invoke(app, ["bench", "procrustes"])
    assert found.exit_code == 2
    told = " ".join(found.output.replace("│", " ").split())
    assert "Unknown command 'bench'; it comes with hf-stitch-studies: pip install hf-stitch-studies" in told
    assert "No such command 'banch'" in CliRunner().invoke(app, ["banch"]).output


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("cache", "keep activations with extract_activations(…).save(path)"),
        ("info", "hf-stitch layers ID_OR_FOLDER shows the parents"),
    ],
)
def test_a_command_that_is_gone_tells_what_to_do_instead(name: str, instead: str) -> None:
    found = CliRunner().invoke(app, [name, "ls"])
    assert found.exit_code == 2
    assert f"Unknown command '{name}'; {instead}" in " ".join(found.output.replace("│", " ").split())


def test_what_names_a_thing_that_is_gone_tells_what_to_do_instead(tmp_path: Path) -> None:
    saved = tmp_path / "result.json"
    saved.write_text('{"result": "SelfTest"}')
    with pytest.raises(ValueError, match=r"a result of class SelfTest, .*hf_stitch\.selftest\.self_test\(\) returns"):
        StitchGrid.load(saved)
    needed = {"registry": "networks", "name": "Own", "distribution": "own", "version": "1"}
    with pytest.raises(PluginError, match=r"config\.json requires 'Own' among networks, .*hf_stitch\.adapters\.Lib"):
        check_requirements([needed], "config.json")
    with pytest.raises(TypeError, match=r"'lstsq' among matchers got an unexpected option 'cache'; keep"):
        registries.matchers.build("lstsq", cache=True)


def test_an_attribute_that_a_plugin_exports_tells_which() -> None:
    with pytest.raises(AttributeError, match="no attribute 'bench'; it comes with hf-stitch-studies: pip install"):
        hf_stitch.bench  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'frechet'; it comes with hf-stitch-metrics: pip install"):
        hf_stitch.metrics.frechet  # type: ignore[attr-defined]  # noqa: B018


def test_a_result_of_a_plugin_that_is_not_installed_tells_which(alone: None, tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", Path("tests/hub/fixtures/0.2.0/results")
    page.write_bytes(gzip.decompress((saved / "page.html.gz").read_bytes()))
    with pytest.raises(ValueError, match=r"a \w+ of hf_stitch\S*, which is unknown; it comes with hf-stitch-"):
        hf_stitch.load_report(page)
    with pytest.raises(ValueError, match=r"a result of class Bench, .* comes with hf-stitch-studies: pip"):
        StitchGrid.load(saved / "bench.json")


# -- plugins in single files -------------------------------------------------------------------------------------------
def test_its_entries_are_registered_once(file: Path) -> None:
    plugin = load_plugin(file)
    assert load_plugin(str(file)) is plugin
    assert plugin.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert registries.matchers.entry("file_lstsq").origin == f"file own.py (sha256 {plugin.sha256[:8]})"
    assert registries.matchers.entry("file_lstsq").distribution is None
    assert registries.matchers.build("file_lstsq").times == 1.0  # type: ignore[attr-defined]


def test_its_annotations_are_those_of_its_own_code(file: Path) -> None:
    file.write_text("""
from hf_stitch import registries
class Wide:
    width: int = 3
registries.matchers.register("file_lstsq", Wide)
""")
    load_plugin(file)
    assert registries.matchers.get("file_lstsq").__annotations__ == {"width": int}


def test_a_changed_file_replaces_its_entries(file: Path) -> None:
    load_plugin(file)
    file.write_text(CODE.format(times=2.0))
    load_plugin(file)
    assert registries.matchers.build("file_lstsq").times == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (CODE.format(times=1.0) + "1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "it registers nothing"),
        (
            "from hf_stitch import registries\nregistries.matchers.register('lstsq', int)",
            "'lstsq' among matchers is taken",
        ),
        ("x =", "SyntaxError"),
    ],
)
def test_nothing_of_a_broken_file_remains(tmp_path: Path, code: str, why: str) -> None:
    place = tmp_path / "broken.py"
    place.write_text(code)
    modules = set(sys.modules)
    with pytest.raises(PluginError, match=rf"the plugin {place} could not be loaded: .*{why}"):
        load_plugin(place)
    assert "file_lstsq" not in registries.matchers
    assert not any(name.startswith("hf_stitch_plugin_") for name in set(sys.modules) - modules)


def test_what_is_no_python_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("x = 1")
    with pytest.raises(PluginError, match=r"its name must end in \.py"):
        load_plugin(tmp_path / "own.txt")
    with pytest.raises(FileNotFoundError, match=r"the plugin absent.py is not a file"):
        load_plugin("absent.py")


def test_results_and_artefacts_record_it(file: Path) -> None:
    plugin = load_plugin(file)
    options: dict[str, Any] = {"source_layer": "0", "target_layer": "0", "progress": False}
    stitched = hf_stitch.stitch(*two_networks(), torch.randn(64, 4), matcher="file_lstsq", **options)
    assert stitched.config.recipe["versions"]["own.py"] == f"sha256:{plugin.sha256}"
    needed = requirements([("matchers", "file_lstsq")])  # as of a class of stitches, which an artefact needs to load
    assert needed[0]["file"] == "own.py" and needed[0]["version"] == f"sha256:{plugin.sha256}"
    check_requirements(needed, "stitcher.json")
    plugin.unload()
    with pytest.raises(PluginError, match=r"stitcher\.json requires 'file_lstsq' among matchers.*the file own\.py"):
        check_requirements(needed, "stitcher.json")
