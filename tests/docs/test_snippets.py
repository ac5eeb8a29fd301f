"""All snippets of README and docs run unchanged, page by page in one namespace."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from scenes import PAGES, Scene, folders, on_the_hub
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import app

from server import turned_to_a_hub  # isort: skip

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def snippets(page: str, language: str) -> Iterator[tuple[int, str]]:
    text = (ROOT / page).read_text()
    for found in FENCED.finditer(text):
        if found[1] == language:
            yield text[: found.start()].count("\n") + 1, found[2]


def every_page() -> list[str]:
    """List README and all pages of the documentation, relative to the repository."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]
    return sorted(str(page.relative_to(ROOT)) for page in pages)


COMMANDS = {
    page: [
        line
        for language in ("", "bash")
        for _, text in snippets(page, language)
        for line in text.splitlines()
        if line.startswith("hf-stitch ") and not line.startswith("hf-stitch quickstart")  # tests/cli/test_quickstart.py
    ]
    for page in every_page()
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve a local Hub with the networks that the pages name, and change to an empty working folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with turned_to_a_hub(tmp_path / "cache") as server:
        monkeypatch.setenv("HF_TOKEN", "your-token")
        for name, files in on_the_hub().items():
            server.put(name, files)
        yield


def test_every_page_with_snippets_has_a_scene() -> None:
    assert {page for page in every_page() if any(snippets(page, "python"))} == set(PAGES)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in hf_stitch.registries:
        registry = hf_stitch.registries[kind]
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("page", PAGES)
def test_python(page: str, hub: None, registered: None) -> None:
    words = set(re.findall(r"\w+", (ROOT / page).read_text()))
    scene = Scene(PAGES[page]())
    namespace = {"hf_stitch": hf_stitch, **{name: scene[name] for name in scene if name in words}}
    for line, text in snippets(page, "python"):
        # Leading blank lines align line numbers in tracebacks with the page.
        exec(compile("\n" * line + text, page, "exec"), namespace)
    plt.close("all")


@pytest.mark.parametrize("page", [page for page, commands in COMMANDS.items() if commands])
def test_commands(page: str, hub: None) -> None:
    PAGES.get(page, dict)()
    stands_for = folders()
    for command in COMMANDS[page]:
        arguments = [stands_for.get(word, word) for word in shlex.split(command, comments=True)[1:]]
        result = CliRunner().invoke(app, arguments, prog_name="hf-stitch")
        assert result.exit_code == 0, f"{command}\n{result.output}"


def test_the_transcript_is_that_of_the_script() -> None:
    """docs/pictures/make.py writes the transcript that the page shows."""
    assert (ROOT / "docs" / "pictures" / "transcript.txt").read_text() in (ROOT / "docs" / "terminal.md").read_text()
