"""Registries: built-in entries, plugins (installed as real metadata folders) and registration at run time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_stitch.options import did_you_mean
from hf_stitch.registry import BUILT_INS, PluginError, Registry, UnknownNameError, registries

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


def test_get_imports_built_in_entry(shapes):
    from collections import OrderedDict

    assert shapes.get("ordered") is OrderedDict
    assert shapes.entry("ordered").origin == "built-in"


def test_unknown_name_raises_value_and_key_error_with_suggestion(shapes):
    with pytest.raises(UnknownNameError, match=r"'orderd' among shapes; did you mean 'ordered'\? .*: gone, ordered"):
        shapes.get("orderd")
    with pytest.raises(KeyError):
        shapes.entry("orderd")
    with pytest.raises(ValueError):
        registries["matcher"]
    with pytest.raises(ValueError, match=r"no registry 'networks'; an hf_stitch\.adapters\.Library builds"):
        registries["networks"]


def test_built_in_with_missing_module_names_the_module(shapes):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        shapes.get("gone")


def test_run_time_registration(shapes):
    @shapes.register("square")
    def square() -> int:
        return 4

    assert shapes.register("triangle", tuple) is tuple
    assert shapes.get("square") is square
    assert shapes.entry("square").origin == "registered at run time"
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
    assert shapes.entry("disc").origin == "plugin shape-plugin 2.0"
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
        PluginError, match=rf"'bad' among shapes comes from .*bad-plugin 0.3.*{cause.__name__}"
    ) as error:
        shapes.get("bad")
    assert isinstance(error.value.__cause__, cause)


def test_an_entry_of_a_plugin_whose_name_is_taken_is_left_out_with_a_warning(shapes, install):
    install("greedy-plugin", "1.0", "shapes", {"ordered": "builtins:list", "disc": "builtins:tuple"})
    install("other-plugin", "1.0", "shapes", {"disc": "builtins:set", "cube": "builtins:set"})
    with pytest.warns(UserWarning) as warned:
        assert shapes.names() == ("cube", "disc", "gone", "ordered")
    assert [str(each.message) for each in warned] == [
        f"{name!r} among shapes of the plugin {plugin} is skipped, because this name is taken ({holder}): "
        "uninstall one of them, or rename its entry"
        for name, plugin, holder in [
            ("disc", "other-plugin 1.0", "plugin greedy-plugin 1.0"), ("ordered", "greedy-plugin 1.0", "built-in")
        ]
    ]  # fmt: skip
    assert shapes.entry("ordered").origin == "built-in" and shapes.get("disc") is tuple
    with pytest.raises(ValueError, match="'disc' among shapes is taken"):
        shapes.register("disc", list)


def test_files_that_the_environment_names_are_not_read_and_a_warning_tells_how_to_name_them(shapes, monkeypatch):
    monkeypatch.setenv("HF_STITCH_PLUGINS", "/own.py")
    with pytest.warns(UserWarning, match=r"HF_STITCH_PLUGINS is ignored: name each file in hf-stitch --plugin or"):
        assert shapes.names() == ("gone", "ordered")


@pytest.mark.parametrize("built_for", ["contract_1", "contract_2", "v1"])
def test_the_contract_is_read_from_metadata(shapes, install, tmp_path, built_for):
    install("shape-plugin", "2.0", "shapes", {"disc": "disc_of_contract:Disc"}, disc_of_contract="class Disc: pass")
    with next(tmp_path.glob("*.dist-info")).joinpath("entry_points.txt").open("a") as file:
        file.write(f"[hf_stitch.contracts]\ncontract = {built_for}\n")
    assert "disc_of_contract" not in sys.modules
    if built_for == "contract_1":
        assert shapes.entry("disc").problem == "" and shapes.get("disc").__name__ == "Disc"
        sys.modules.pop("disc_of_contract")
        return
    assert f"built for {built_for}, but this hf-stitch has contract_1" in shapes.entry("disc").problem
    with pytest.raises(PluginError, match=rf"'disc' among shapes comes from the plugin shape-plugin 2.0.*{built_for}"):
        shapes.get("disc")
    assert "disc_of_contract" not in sys.modules


def test_broken_entries_are_left_out_of_a_choice_with_a_warning(install):
    shapes = Registry("shapes", {"ordered": "collections:OrderedDict"}, "builtins:object")
    install("bad-plugin", "0.3", "shapes", {"bad": "absent_plugin:Thing", "good": "builtins:list"})
    with pytest.warns(UserWarning, match=r"'bad' among shapes comes from the plugin bad-plugin 0.3.*It is skipped"):
        assert [kind.__name__ for kind in shapes.usable()] == ["list", "OrderedDict"]


def test_did_you_mean_ignores_case_and_returns_empty_string_without_match():
    assert did_you_mean("LAYER1.0", ["layer1.0", "layer2.0"]) == "layer1.0"
    assert did_you_mean("xyz", ["layer1.0"]) == ""
    assert did_you_mean("x", []) == ""


def test_registries_by_attribute_and_by_name():
    assert list(registries) == list(BUILT_INS)
    assert all(registries[kind] is getattr(registries, kind) for kind in registries)
    assert {"identity", "lstsq", "ridge", "procrustes", "low_rank"} <= set(registries.matchers.names())


def test_built_in_modules_exist():
    import hf_stitch

    package = Path(hf_stitch.__file__).parent.parent
    for dotted in {value for table in BUILT_INS.values() for value in table.values()}:
        path = package.joinpath(*dotted.partition(":")[0].split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), dotted


@pytest.mark.parametrize(
    "code",
    [
        "import hf_stitch; dir(hf_stitch); [hf_stitch.registries[kind].names() for kind in hf_stitch.registries]",
        "import hf_stitch.registry, hf_stitch.reference, hf_stitch.data, hf_stitch.training.history",
    ],
    ids=["listing", "basic modules"],
)
def test_heavy_packages_are_not_imported(code):
    code = f"import sys; {code}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
