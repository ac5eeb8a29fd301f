"""``hf-stitch doctor`` without a network: versions beside tested ones, the self-test, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_stitch import __version__, selftest
from hf_stitch.cli import app, versions
from hf_stitch.cli.versions import Installed, advise, installed_versions, read_tested

TESTED = {"transformers": "5.24.0", "timm": "1.0.31", "torch": "2.15.0"}
REQUIRED = [
    "transformers>=5.10",
    "timm>=1.0.31",
    "torch>=2.7",
    "old>=1 ; python_version < '3'",
    "evaluate ; extra == 'e'",
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions, which a test may change."""
    present = {"transformers": "5.24.0", "timm": "1.0.31", "torch": "2.15.0+cu132", "tokenizers": "0.23.3"}

    def version(name: str) -> str:
        if name not in present:
            raise metadata.PackageNotFoundError(name)
        return present[name]

    monkeypatch.setattr(metadata, "version", version)
    declared = versions._declared
    given = {"Requires-Dist": REQUIRED, "Classifier": declared("Classifier")}
    monkeypatch.setattr(versions, "_declared", given.__getitem__)
    monkeypatch.setattr(versions, "of_plugins", lambda kind: [])
    monkeypatch.setattr(metadata, "distributions", lambda: [])
    return present


def status(name: str) -> str:
    (found,) = [row.status for row in installed_versions(TESTED) if row.name == name]
    return found


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.24.0", "tested"),
        ("5.24", "tested"),
        ("5.24.0+local.1", "tested"),
        ("5.24.1", "newer than tested"),
        ("5.25.0rc1", "newer than tested"),
        ("5.25.0.dev0", "newer than tested"),
        ("5.25.0.dev0+g1a2b3c", "newer than tested"),
        ("5.24.0rc1", "older than tested"),
        ("5.9.1", "outside of its bounds"),
        ("5.10.0rc1", "outside of its bounds"),
        ("5.11.0rc1", "older than tested"),
        ("of today", "not tested"),
    ],
)
def test_versions_are_compared(version: str, expected: str, installed: dict[str, str]) -> None:
    installed["transformers"] = version
    assert status("transformers") == expected
    assert status("torch") == "tested"  # 2.15.0+cu132


def test_rows(installed: dict[str, str]) -> None:
    rows = {row.name: row for row in installed_versions(TESTED)}
    assert list(rows) == ["python", "hf-stitch", "transformers", "timm", "torch", "tokenizers"]
    assert (rows["python"].status, rows["hf-stitch"].installed) == ("tested", __version__)
    assert rows["timm"] == Installed("timm", "1.0.31", "1.0.31", ">=1.0.31", "tested")
    assert rows["tokenizers"].status == "not tested"
    del installed["timm"]
    installed["peft"] = "0.20.0"
    assert status("timm") == "missing"
    assert status("peft") == "not tested"
    assert {row.status for row in installed_versions(None)} == {"tested", "", "unknown", "missing"}


def test_plugins_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [row.name for row in installed_versions(TESTED)]
    assert len(names) == len(set(names))
    plugins = [each for kind in versions.registries for each in versions.of_plugins(kind)]
    assert plugins and {each.distribution[0] for each in plugins if each.distribution} <= set(names)
    assert "hf-stitch-transfer" in names  # which adds no entry to a registry
    assert {row.status for row in installed_versions(TESTED) if row.name.startswith("hf-stitch-")} == {""}
    monkeypatch.setattr(versions, "_declared", lambda field: ["torch"] if field == "Requires-Dist" else [])
    assert "timm" not in [row.name for row in installed_versions(TESTED)]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.10.14", "older"), ("3.15.0a1", "newer"), ("3.99.0+", "newer"), ("3.11.0rc2", "tested")],
)
def test_python(version: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "tested_pythons", lambda: ["3.11", "3.14"])
    monkeypatch.setattr(versions.platform, "python_version", lambda: version)
    monkeypatch.setattr(versions.platform, "python_version_tuple", lambda: tuple(version.split(".")))
    assert status("python").startswith(expected)


def test_the_list_is_found_beside_the_package_then_in_the_checkout(tmp_path: Path) -> None:
    package, requirements = tmp_path / "hf_stitch", tmp_path / "requirements"
    package.mkdir()
    requirements.mkdir()
    with pytest.raises(FileNotFoundError, match=r"is neither .*hf_stitch.tested\.txt nor .*requirements.tested\.txt"):
        read_tested(package)
    (requirements / "tested.txt").write_text(
        "# in a checkout\n\nTimm==1.0.31  # of May\nHugging_Face.Hub==2.4.0\n"
        "numpy==1.0 ; python_version < '3'\nnumpy==2.4.6 ; python_version >= '3'\n"
    )
    assert read_tested(package) == {"timm": "1.0.31", "hugging-face-hub": "2.4.0", "numpy": "2.4.6"}
    (package / "tested.txt").write_text("timm==1.0.30\n")
    assert read_tested(package) == {"timm": "1.0.30"}


def row(name: str, version: str, state: str) -> Installed:
    return Installed(name, version, "2.0", ">=1.5", state)


@pytest.mark.parametrize(
    ("rows", "failed", "expected"),
    [
        ([row("timm", "2.0", "tested")], [], "Everything works, and there is nothing to do."),
        (
            [row("scipy", "3.0", "newer than tested"), row("timm", "1.6", "older than tested")],
            [],
            "Everything works, and there is nothing to do: timm 1.6 is older than the tested 2.0, but all parts of the "
            "self-test pass.",
        ),
        ([row("timm", "2.0", "tested")], ["a", "b", "c"], "A, b and c fail: open an issue with this output."),
        (
            [row("torch", "3.0", "newer than tested"), row("timm", "2.1rc1", "newer than tested")],
            ["a"],
            "torch 3.0 is newer than the tested 2.0, timm 2.1rc1 is newer than the tested 2.0 and a fails: install "
            "torch==2.0 timm==2.0, or open an issue with this output.",
        ),
        (
            [row("scipy", "3.0", "newer than tested")],
            ["a"],
            "scipy 3.0 is newer than the tested 2.0 and a fails: install scipy==2.0, or open an issue with this "
            "output.",
        ),
        ([row("timm", "", "missing")], ["a"], "timm is missing and a fails: pip install 'timm>=1.5'"),
        (
            [row("timm", "1.0", "outside of its bounds"), row("torch", "", "missing")],
            [],
            "timm 1.0 does not satisfy >=1.5 and torch is missing: pip install 'timm>=1.5' 'torch>=1.5'",
        ),
    ],
)
def test_advice(rows: list[Installed], failed: list[str], expected: str) -> None:
    assert advise(rows, failed) == expected


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], prog_name="hf-stitch")


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """Parts of the self-test that do nothing, which a test may change; tested versions come from a file."""
    (tmp_path / "tested.txt").write_text("".join(f"{name}=={version}\n" for name, version in TESTED.items()))
    monkeypatch.setattr(versions, "read_tested", partial(read_tested, tmp_path))
    found: dict[str, Callable[[], object]] = {"cut": lambda: None, "generate": lambda: None}
    monkeypatch.setattr(selftest, "PARTS", found)
    return found


@pytest.mark.usefixtures("parts")
def test_an_untested_version_alone_is_no_failure(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.25.0rc1"
    result = run()
    assert result.exit_code == 0, result.output
    shown = words(result.stdout)
    assert "transformers 5.25.0rc1 5.24.0 newer than tested" in shown
    assert "torch 2.15.0+cu132 2.15.0 tested" in shown
    assert shown.endswith(
        "transformers 5.25.0rc1 is newer than the tested 5.24.0, but all parts of the self-test pass."
    )


def test_a_part_that_fails_is_named_and_the_others_run(
    parts: dict[str, Callable[[], object]], installed: dict[str, str]
) -> None:
    ran = []

    def fail() -> None:
        raise AttributeError("no [past_key_values]")

    parts |= {"cut": fail, "generate": lambda: ran.append("generate")}
    installed["transformers"] = "5.25.0"
    result = run()
    assert result.exit_code == 1 and ran == ["generate"]
    shown = words(result.stdout)
    assert "failed: AttributeError: no [past_key_values] (tests/cli/test_doctor_installation.py:" in shown
    assert shown.endswith(
        "transformers 5.25.0 is newer than the tested 5.24.0 and cut fails: install transformers==5.24.0, or open an "
        "issue with this output."
    )
    result = run("--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert set(record) == {"passed", "advice", "system", "versions", "problem", "parts"}
    assert record["passed"] is False and record["advice"].startswith("transformers 5.25.0 is newer")
    assert [(part["name"], part["error"].partition(":")[0]) for part in record["parts"]] == [
        ("cut", "AttributeError"),
        ("generate", ""),
    ]
    (found,) = [each for each in record["versions"] if each["name"] == "transformers"]
    assert found == {
        "name": "transformers", "installed": "5.25.0", "tested": "5.24.0", "required": ">=5.10",
        "status": "newer than tested",
    }  # fmt: skip


@pytest.mark.usefixtures("parts")
def test_a_requirement_that_is_not_met_is_a_failure(installed: dict[str, str]) -> None:
    installed["transformers"] = "5.9.0"
    result = run()
    assert result.exit_code == 1
    assert "transformers 5.9.0 5.24.0 outside of its bounds, >=5.10" in words(result.stdout)
    assert words(result.stdout).endswith("transformers 5.9.0 does not satisfy >=5.10: pip install 'transformers>=5.10'")
    record = json.loads(run("--json").stdout)
    assert not record["passed"] and not any(part["error"] for part in record["parts"])


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("content", [None, "timm"])
def test_without_a_list_the_rest_works(content: str | None, tmp_path: Path) -> None:
    place = tmp_path / "tested.txt"
    place.unlink() if content is None else place.write_text(content)
    result = run()
    assert result.exit_code == 0
    assert result.stdout.startswith("The tested versions are unknown: ") and "tested.txt" in result.stdout
    assert "transformers 5.24.0 – unknown" in words(result.stdout)
    assert "tested.txt" in json.loads(run("--json").stdout)["problem"]


def test_a_broken_library_is_named_after_the_versions(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('it is [broken]')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hf_stitch.cli import main; sys.argv[1:] = "
    call = [sys.executable, "-c", f"{code}['doctor', '--json']; main()"]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    record = json.loads(result.stdout)
    (part,) = record["parts"]
    assert (part["name"], part["error"]) == ("importing the libraries", "ImportError: it is [broken]")
    assert "transformers" in [each["name"] for each in record["versions"]]
    assert "The import failed: ImportError: it is [broken]" in result.stderr
    assert "mporting the libraries fails" in record["advice"]


@pytest.mark.parametrize("options", [("--random",), ("--task", "fill-mask"), ("--device", "cpu")])
def test_options_of_networks_need_a_network(options: tuple[str, ...]) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert "need a network: name one" in words(result.stderr)


def test_it_runs() -> None:
    """From the versions to the end of the self-test; nothing but the record is on stdout."""
    result = run("--json")
    record = json.loads(result.stdout)
    assert record["passed"] is True, record
    assert sum(part["seconds"] for part in record["parts"]) < 60
    assert "warning" not in result.stderr
