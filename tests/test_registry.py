"""Registries: built-in entries, plugins (installed as real metadata folders) and registration at run time."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hf_stitch.registry import BUILT_INS, PluginError, Registry, UnknownNameError, did_you_mean, registries

HEAVY = ("torch", "transformers", "timm", "datasets", "evaluate")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with entry points on the path, as an installer does."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, version: str, kind: str, entries: dict[str, str], **modules: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[hf_stitch.{kind}]", *lines, ""]))
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(code)

    return install


@pytest.fixture
def shapes() -> Registry:
    """A separate registry, so that the tests do not change the registries of the package."""
    return Registry("shapes", {"ordered": "collections:OrderedDict", "gone": "no_such_module:Thing"}, "builtins:object")


def run(code: str) -> str:
    """Run code in a new interpreter and return its standard output."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_get_imports_built_in_entry(shapes):
    from collections import OrderedDict

    assert shapes.get("ordered") is OrderedDict
    assert shapes.origin("ordered") == "built-in"


def test_unknown_name_raises_value_and_key_error_with_suggestion(shapes):
    with pytest.raises(
        UnknownNameError, match=r"no 'orderd' among shapes; did you mean 'ordered'\? Available: gone, ordered"
    ):
        shapes.get("orderd")
    with pytest.raises(KeyError):
        shapes.origin("orderd")
    with pytest.raises(ValueError):
        registries["matcher"]


def test_built_in_with_missing_module_names_the_module(shapes):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        shapes.get("gone")


def test_run_time_registration(shapes):
    @shapes.register("square")
    def square() -> int:
        return 4

    assert shapes.register("triangle", tuple) is tuple
    assert shapes.get("square") is square
    assert shapes.origin("square") == "registered at run time"
    assert list(shapes) == ["gone", "ordered", "square", "triangle"]
    assert "square" in shapes and "circle" not in shapes


def test_registering_a_taken_name_raises_and_names_its_origin(shapes, install):
    install("shape-plugin", "2.0", "shapes", {"disc": "shape_plugin:Disc"})
    shapes.register("square", tuple)
    for name, holder in [
        ("ordered", "built-in, collections:OrderedDict"),
        ("square", "registered at run time, builtins:tuple"),
        ("disc", "plugin shape-plugin 2.0, shape_plugin:Disc"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}' among shapes is taken \\({holder}\\)"):
            shapes.register(name, list)
        with pytest.raises(ValueError, match="is taken"):
            shapes.register(name)(list)
    assert shapes.get("square") is tuple


def test_plugin_is_listed_without_import(shapes, install):
    install("shape-plugin", "2.0", "shapes", {"disc": "disc_plugin:Disc"}, disc_plugin="class Disc: pass")
    assert shapes.names() == ("disc", "gone", "ordered")
    assert shapes.origin("disc") == "plugin shape-plugin 2.0"
    assert "disc_plugin" not in sys.modules
    assert shapes.get("disc").__name__ == "Disc"


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("broken_plugin:Thing", ZeroDivisionError),
        ("absent_plugin:Thing", ModuleNotFoundError),
        ("sys:Thing", AttributeError),
    ],
)
def test_broken_plugin_does_not_affect_other_entries(shapes, install, value, cause):
    install("bad-plugin", "0.3", "shapes", {"bad": value, "good": "builtins:list"}, broken_plugin="1 / 0")
    assert shapes.names() == ("bad", "gone", "good", "ordered")
    assert shapes.get("good") is list
    with pytest.raises(
        PluginError, match=rf"'bad' among shapes comes from the plugin bad-plugin 0.3.*{cause.__name__}"
    ) as error:
        shapes.get("bad")
    assert isinstance(error.value.__cause__, cause)


def test_plugin_cannot_replace_built_in(shapes, install):
    install("greedy-plugin", "1.0", "shapes", {"ordered": "builtins:list"})
    with pytest.warns(
        UserWarning, match="plugin greedy-plugin 1.0 registers 'ordered' among shapes.*taken by a built-in"
    ):
        assert shapes.names() == ("gone", "ordered")
    assert shapes.origin("ordered") == "built-in"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shapes.get("ordered") is not list


def test_duplicate_plugin_name_goes_to_first_distribution(shapes, install):
    install("b-plugin", "1.0", "shapes", {"disc": "builtins:list"})
    install("a-plugin", "1.0", "shapes", {"disc": "builtins:tuple"})
    with pytest.warns(UserWarning, match="plugin b-plugin 1.0 registers 'disc'.*taken by plugin a-plugin 1.0"):
        assert shapes.get("disc") is tuple


def test_did_you_mean_ignores_case_and_returns_empty_string_without_match():
    assert did_you_mean("LAYER1.0", ["layer1.0", "layer2.0"]) == "layer1.0"
    assert did_you_mean("xyz", ["layer1.0"]) == ""
    assert did_you_mean("x", []) == ""


def test_registries_by_attribute_and_by_name():
    assert list(registries) == list(BUILT_INS)
    assert all(registries[kind] is getattr(registries, kind) for kind in registries)
    assert {"identity", "lstsq", "ridge", "procrustes", "low_rank"} <= set(registries.matchers.names())


@pytest.mark.parametrize("dotted", [value for table in BUILT_INS.values() for value in table.values()])
def test_built_in_modules_exist(dotted):
    import hf_stitch

    module, _, _ = dotted.partition(":")
    path = Path(hf_stitch.__file__).parent.parent.joinpath(*module.split("."))
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_import_and_listing_do_not_import_heavy_packages():
    listing = (
        "import hf_stitch, sys; dir(hf_stitch); [hf_stitch.registries[kind].names() for kind in hf_stitch.registries]"
    )
    assert run(f"{listing}; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_basic_modules_do_not_import_torch():
    code = "import hf_stitch.registry, hf_stitch.reference, hf_stitch.data, sys"
    assert run(f"{code}; print([m for m in {HEAVY} if m in sys.modules])") == "[]"
