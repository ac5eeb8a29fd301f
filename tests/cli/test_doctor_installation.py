"""``hf-stitch doctor`` without a network: versions beside tested ones, the self-test, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from hf_stitch import __version__, selftest
from hf_stitch.cli import doctor
from hf_stitch.cli.doctor import Installed, installed_versions, read_tested

from calls import run, usage_error, words  # isort: skip

TESTED = {"transformers": "5.24.0", "timm": "1.0.31", "torch": "2.15.0"}
REQUIRED = ["transformers>=5.10", "timm>=1.0.31", "torch>=2.7", "old>=1 ; python_version < '3'", "new ; extra == 'e'"]
STATUS = {
    "tested": ["5.24.0", "5.24", "5.24.0+local.1"],
    "newer than tested": ["5.24.1", "5.25.0rc1", "5.25.0.dev0+g1a2b3c"],
    "older than tested": ["5.24.0rc1", "5.11.0rc1"],
    "outside of >=5.10": ["5.9.1", "5.10.0rc1"],
}
"""What is told of versions of transformers."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    present = {"transformers": "5.24.0", "timm": "1.0.31", "torch": "2.15.0+cu132", "hf-stitch": "0.3.0"}

    class Distribution:
        def __init__(self, name: str) -> None:
            self.name, self.version = name, present[name]

    monkeypatch.setattr(metadata, "distributions", lambda: map(Distribution, present))
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(doctor, "entries_of", lambda kind: [])
    monkeypatch.setattr(doctor, "read_tested", lambda: TESTED)
    return present


def status(name: str) -> str:
    (found,) = [row.status for row in installed_versions() if row.name == name]
    return found


def test_rows(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for expected, versions in STATUS.items():
        for version in versions:
            installed["transformers"] = version
            assert status("transformers") == expected, version
    installed["transformers"] = "5.24.0"
    assert status("torch") == "tested"  # 2.15.0+cu132
    rows = {row.name: row for row in installed_versions()}
    assert list(rows) == ["hf-stitch", "transformers", "timm", "torch"]
    assert rows["hf-stitch"].installed == __version__
    assert rows["timm"] == Installed("timm", "1.0.31", "1.0.31", ">=1.0.31")
    del installed["timm"]
    installed["peft"] = "0.20.0"
    assert (status("timm"), status("peft")) == ("missing", "")
    monkeypatch.setattr(doctor, "read_tested", dict)
    assert status("transformers") == ""


def test_plugins_are_listed() -> None:
    names = [row.name for row in installed_versions()]
    assert len(names) == len(set(names))
    plugins = [each for kind in doctor.registries for each in doctor.entries_of(kind)]
    assert plugins and {each.distribution[0] for each in plugins if each.distribution} <= set(names)
    assert "hf-stitch-transfer" in names  # which adds no entry to a registry


def test_the_list_is_found_beside_the_package_then_in_the_checkout(tmp_path: Path) -> None:
    package, requirements = tmp_path / "hf_stitch", tmp_path / "requirements"
    package.mkdir()
    requirements.mkdir()
    assert read_tested(package) == {}
    (requirements / "tested.txt").write_text(
        "# in a checkout\n\nTimm==1.0.31  # of May\nHugging_Face.Hub==2.4.0\n"
        "numpy==1.0 ; python_version < '3'\nnumpy==2.4.6 ; python_version >= '3'\n"
    )
    assert read_tested(package) == {"timm": "1.0.31", "hugging-face-hub": "2.4.0", "numpy": "2.4.6"}
    (package / "tested.txt").write_text("timm==1.0.30\n")
    assert read_tested(package) == {"timm": "1.0.30"}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {"cut": lambda: None, "generate": lambda: None}
    monkeypatch.setattr(selftest, "PARTS", found)
    return found


@pytest.mark.usefixtures("parts")
def test_an_untested_version_alone_is_no_failure(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.25.0rc1"
    result = run("doctor")
    assert result.exit_code == 0, result.output
    shown = words(result.stdout)
    assert "transformers 5.25.0rc1 5.24.0 newer than tested" in shown
    assert "torch 2.15.0+cu132 2.15.0 tested" in shown
    assert shown.endswith("cut: passed generate: passed everything works")


def test_failures_are_named_and_the_rest_run(parts: dict[str, Callable[[], object]], installed: dict[str, str]) -> None:
    ran = []

    def fail() -> None:
        raise AttributeError("no [past_key_values]")

    parts |= {"cut": fail, "generate": lambda: ran.append("generate")}
    result = run("doctor")
    assert result.exit_code == 1 and ran == ["generate"]
    assert words(result.stdout).endswith("generate: passed open an issue with this output")
    installed["transformers"] = "5.25.0"
    shown = words(run("doctor").stdout)
    assert "cut: failed, AttributeError: no [past_key_values]" in shown
    assert shown.endswith("pip install transformers==5.24.0, or open an issue with this output")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert set(record) == {"passed", "advice", "system", "versions", "parts"}
    assert record["passed"] is False and record["advice"].startswith("pip install transformers==5.24.0")
    assert record["parts"] == {"cut": "AttributeError: no [past_key_values]", "generate": ""}
    (found,) = [each for each in record["versions"] if each["name"] == "transformers"]
    assert found == {
        "name": "transformers", "installed": "5.25.0", "tested": "5.24.0", "required": ">=5.10",
        "status": "newer than tested",
    }  # fmt: skip


@pytest.mark.usefixtures("parts")
def test_what_an_earlier_version_kept_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_STITCH_CACHE", str(tmp_path))
    assert "earlier version" not in run("doctor").stdout
    (tmp_path / "0f.safetensors").touch()
    assert f"{tmp_path} contains unused activations of an earlier version" in run("doctor").stdout.replace("\n", "")


@pytest.mark.usefixtures("parts")
def test_a_requirement_that_is_not_met_is_a_failure(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.9.0"
    del installed["timm"]
    result = run("doctor")
    assert result.exit_code == 1
    assert "transformers 5.9.0 5.24.0 outside of >=5.10" in words(result.stdout)
    assert words(result.stdout).endswith("pip install 'transformers>=5.10' 'timm>=1.0.31'")
    record = json.loads(run("doctor", "--json").stdout)
    assert not record["passed"] and not any(record["parts"].values())


def test_a_broken_library_is_named_after_the_versions(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('it is [broken]')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hf_stitch.cli import main; sys.argv[1:] = "
    call = [sys.executable, "-c", f"{code}['doctor', '--json']; main()"]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    record = json.loads(result.stdout)
    assert record["parts"] == {"import the libraries": "ImportError: it is [broken]"}
    assert "transformers" in [each["name"] for each in record["versions"]]
    assert "import the libraries: failed, ImportError: it is [broken]" in result.stderr


@pytest.mark.parametrize("options", [("--random",), ("--task", "fill-mask"), ("--device", "cpu")])
def test_options_of_networks_need_a_network(options: tuple[str, ...]) -> None:
    assert "require a network" in usage_error("doctor", *options)


def test_it_runs() -> None:
    """From the versions to the end of the self-test; nothing but the record is on stdout."""
    result = run("doctor", "--json")
    record = json.loads(result.stdout)
    assert record["passed"] is True, record
    assert "warning" not in result.stderr
