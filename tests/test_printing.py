"""Text from artefacts and results that others wrote reaches terminals and pages as text only."""

from __future__ import annotations

import io
import json
import re
import traceback
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hf_stitch import SimilarityAtlas, load_report, registries
from hf_stitch.cli.output import Output, json_of
from hf_stitch.options import checked
from hf_stitch.printing import Visible, progress_bar, visible, warn
from hf_stitch.results import Result
from hf_stitch.training import History
from hf_stitch.training.history import Measurement

HARM = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e<img src=x onerror=owned()>[red]:bug:"
"""What terminals, pages and rich take as commands or markup."""

RESULTS = sorted(Path("tests/hub/fixtures/0.2.0/results").glob("*.json"))

BAD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def hostile(path: Path) -> Iterator[tuple[str, Result]]:
    """Yield a result with harm in one of its texts, at a time, for all texts that it can have."""
    record = json.loads(path.read_text())
    kind = registries.results.get(record.pop("result"))
    for text in sorted({each for each in texts(record) if each and not re.fullmatch(r"-?inf|nan", each)}):
        try:
            yield text, kind.from_dict(replaced(record, text, HARM + text))
        except ValueError:  # a name that the class declares, such as a pooling
            continue


def texts(value: Any, top: bool = True) -> Iterator[str]:
    """Yield all texts in JSON values, without names of fields of the result itself."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [] if top else [key]
            yield from texts(item, False)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, False)
    elif isinstance(value, str):
        yield value


def replaced(value: Any, old: str, new: str, top: bool = True) -> Any:
    """Replace a text wherever it is in JSON values."""
    if isinstance(value, dict):
        return {(new if k == old and not top else k): replaced(item, old, new, False) for k, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, old, new, False) for item in value]
    return new if value == old else value


WITHOUT_TEXTS = ("calibration",)
REFUSED = (KeyError, ValueError, StopIteration)
"""What a class raises if a text is a name on which it relies, such as that of a figure."""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_text_of_a_result_commands_a_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = 0
    for text, result in hostile(path):
        try:
            shown = str(result) + json_of(result.to_dict())
            if not tried:
                Output(as_json=False).show(result)
                assert "<img" not in result._repr_html_()
        except REFUSED:
            continue
        tried += 1
        assert not BAD.search(shown + capsys.readouterr().out), text
    assert tried or path.stem in WITHOUT_TEXTS


class Elements(HTMLParser):
    """Finds harmful attributes of elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.harmful: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.harmful += [tag] * (("src", "x") in attrs or "onerror" in dict(attrs))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_text_of_a_result_is_markup_on_its_page(path: Path, tmp_path: Path) -> None:
    tried = 0
    for text, result in [*hostile(path)][:10]:
        try:
            result.to_html(tmp_path / "page.html")
        except REFUSED:
            continue
        tried += 1
        written = (tmp_path / "page.html").read_text(encoding="utf-8")
        before, _, after = written.partition("<main>")
        figures = re.search('id="figures">(.*?)</script>', after)
        assert figures is not None
        for drawn in json.loads(figures[1])[0]["figures"]:  # Plotly interprets some markup, captions are text
            assert "<img" not in json.dumps([drawn["layout"], *(view["traces"] for view in drawn["views"])]), text
        assert not BAD.search(before.partition("<style>")[0] + after.partition("<script>")[0]), text
        assert not Elements(written.partition("<script>")[0]).harmful, text
    assert tried or path.stem in WITHOUT_TEXTS


def test_a_hostile_result_comes_back_from_its_page(tmp_path: Path) -> None:
    for path in RESULTS[:5]:
        for _, result in [*hostile(path)][:1]:
            result.to_html(tmp_path / "page.html")
            (again,) = load_report(tmp_path / "page.html")
            assert again.to_dict() == result.to_dict()


def test_a_terminal_sees_control_characters_and_keeps_its_colours() -> None:
    table = Table("a", title=f"t{HARM}")
    table.add_row(Text(f"x\x1b[2J\ny\t{HARM}", style="bold red"))
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    console.print(Visible(table), markup=False)
    found = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;31m" in found and r"\u001b[2J" in found
    assert not BAD.search(re.sub(r"\x1b\[[\d;]*m", "", found))


def test_visible_text_is_the_same_in_json() -> None:
    text = f"layer\n\t{HARM}\ud800 é 名 👩‍🔬"
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text
    assert visible("a\n\tb é 名 👩‍🔬") == "a\n\tb é 名 👩‍🔬"


def test_half_a_character_is_shown_and_refused_in_a_record() -> None:
    atlas = SimilarityAtlas({"\ud800": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"\ud800": "moments"})
    assert r"\ud800" in str(atlas) and str(atlas).encode()
    with pytest.raises(ValueError, match="surrogates not allowed"):
        SimilarityAtlas.from_dict(atlas.to_dict())


def test_an_atlas_with_hostile_layers_prints_one_line_per_layer() -> None:
    names = tuple(f"{HARM}{i}" for i in range(2))
    atlas = SimilarityAtlas({"cka": np.eye(2)}, names, ("b0", "b1"), 9, "mean", {"cka": "moments"})
    assert str(atlas).count(r"\u001b]0;owned\u001b[2J") == 2  # rich removes the bell
    assert str(atlas).count("[red]:bug:") == 2


def test_rich_prints_a_result_as_text() -> None:
    """Also outside the command line, where rich takes text for markup, and a closing tag alone is an error."""
    names = tuple(f"{HARM}[/x][link=http://x]{i}" for i in range(2))
    atlas = SimilarityAtlas({"cka": np.eye(2)}, names, ("b0", "b1"), 9, "mean", {"cka": "moments"})
    history = History(f"{HARM}[/x]", (Measurement(0, None, {f"{HARM}[/x]": 0.5}),))
    for result in (atlas, history, Visible(Group(Table("a", title=f"{HARM}[/x]")))):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
        console.print(result)
        found = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
        assert "[/x]" in found and not BAD.search(found)


def test_an_error_about_a_file_shows_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "atlas.json"
    path.write_text(json.dumps({"result": "SimilarityAtlas", HARM: 1}))
    with pytest.raises(ValueError, match=r"atlas\.json cannot be read: .*\\x1b\]0;owned") as caught:
        SimilarityAtlas.load(path)
    assert not BAD.search("".join(traceback.format_exception(caught.value)))


def test_a_warning_points_at_the_line_that_called_and_shows_control_characters() -> None:
    """Past the check of arguments and the decorators of torch."""

    @checked
    @torch.no_grad()
    def job(metric: str) -> None:
        warn(f"unlike {metric}")

    with pytest.warns(UserWarning) as seen:
        job("x\x1b[2J")
    assert [(each.filename, str(each.message)) for each in seen] == [(__file__, r"unlike x\u001b[2J")]


# -- progress ---------------------------------------------------------------------------------------------------------
def test_progress_is_a_line_each_minute_where_output_is_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(label: str | None) -> list[str]:
        with progress_bar(label, 4, "sample", 1) as bar:
            for _ in range(3):
                bar.update()
                bar.set_postfix(loss="0.5", refresh=False)
        shown = capsys.readouterr()
        assert not shown.out
        return shown.err.splitlines()

    assert job("reading") == []  # within a minute
    monkeypatch.setattr("hf_stitch.printing.SILENT", 0)
    lines = job("reading \x1b[2J")
    assert [re.sub(r"[\d:?]+ left", "… left", line) for line in lines[:3]] == [
        "reading \\u001b[2J: 1 of 4 samples, about … left", "reading \\u001b[2J: 2 of 4 samples, about … left",
        "reading \\u001b[2J: 3 of 4 samples, about … left, loss=0.5",
    ]  # fmt: skip
    assert "4 of 4 samples" in lines[-1]
    assert job(None) == []


def test_progress_is_a_bar_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with progress_bar("reading", 4, "sample") as bar:
        bar.delay = 0
        bar.update(2)
        bar.refresh()
    assert "\rreading:  50%" in screen.getvalue()
