"""Documentation, public docstrings and messages use turns of phrase about as often as well-known libraries do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Occurrences per 10,000 words. The docstrings of scikit-learn 1.9.1, transformers 5.24.0 (generation, utils,
# integrations), PEFT 0.21.2 and huggingface_hub 2.4.0 were counted on 2026-11-29. A bound is the highest of their four
# frequencies for a preposition with "which", and twice the highest for the rest, at least 1. Bounds are only lowered.
BOUNDS = {
    "a preposition with 'which'": (
        r"\b(of|with|by|from|to|than|at|for|on|in|between|behind) (which|whom)\b", 9.7
    ),
    "'is no', 'has no'": (r"\b(is|are|has|have|takes?|needs?|there is|there are) (no|none)\b", 7.8),
    "'that of', 'those of'": (r"\b(that|those) of\b", 5.8),
    "a noun clause with 'what'": (
        r"\bwhat (is|it|they|a|the|was|are|of|each|nobody|no|an|decides|runs)\b", 2.0
    ),
    "'beside'": (r"\bbeside\b", 1.0),
    "'tell'": (r"\b(tells?|told)\b", 1.6),
    "'whose'": (r"\bwhose\b", 7.8),
    "'some hundred', 'some minutes'": (r"\bsome (hundred|tens|minutes|seconds|ten|steps)\b", 1.0),
    "'the other', 'one after the other'": (r"\b(one after the other|the others?)\b", 2.6),
    "'apart', 'of its own'": (r"\b(apart|of its own|of their own|an own)\b", 8.2),
}  # fmt: skip
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r">>>.*|^\s*\.\.\. .*|``[^`]*``|:\w+:`[^`]*`|`[^`\n]*`", re.MULTILINE)

Text = tuple[Path, int, str]
"""File, number of the first line, and text without code."""


def prose(text: str) -> str:
    """Replace code by spaces, so that lines keep their numbers."""
    return CODE.sub(blank, FENCED.sub(blank, text))


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def pages() -> Iterator[Text]:
    folders = [ROOT / "docs", ROOT / "examples", *(ROOT / "plugins").iterdir()]
    for path in [*ROOT.glob("*.md"), *(page for folder in folders for page in sorted(folder.rglob("*.md")))]:
        if path.name not in ("CHANGELOG.md", "suites.md") and ".venv" not in path.parts:
            yield path, 1, prose(path.read_text(encoding="utf-8"))


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    sources = [*(ROOT / "hf_stitch").rglob("*.py"), *(ROOT / "plugins").glob("*/*/**/*.py")]
    return [(path, ast.parse(path.read_text("utf-8"))) for path in sorted(sources) if "tests" not in path.parts]


def docstrings() -> Iterator[Text]:
    """Docstrings of modules and of public classes and functions."""
    for path, module in modules():
        for node in ast.walk(module):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and not getattr(node, "name", "").startswith("_") and ast.get_docstring(node):
                yield path, node.body[0].lineno, prose(node.body[0].value.value)


def messages() -> Iterator[Text]:
    """Texts within ``raise`` statements and calls of ``warn``."""
    for path, module in modules():
        for node in ast.walk(module):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            warns = name.endswith("warn")
            if not (warns or isinstance(node, ast.Raise)):
                continue
            inside = {id(v) for part in ast.walk(node) if isinstance(part, ast.JoinedStr) for v in part.values}
            for part in ast.walk(node):
                if isinstance(part, ast.JoinedStr):
                    values = [v.value if isinstance(v, ast.Constant) else "…" for v in part.values]
                    yield path, part.lineno, prose("".join(map(str, values)))
                elif isinstance(part, ast.Constant) and isinstance(part.value, str) and id(part) not in inside:
                    yield path, part.lineno, prose(part.value)


KINDS = {"pages": pages, "docstrings": docstrings, "messages": messages}


@pytest.mark.parametrize("side", ["core", "plugins"])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_phrase_are_no_more_frequent_than_in_other_libraries(kind: str, side: str) -> None:
    texts = [text for text in KINDS[kind]() if (ROOT / "plugins" in text[0].parents) == (side == "plugins")]
    words = sum(len(re.findall(r"[A-Za-z]+", text)) for *_, text in texts)
    assert words > 5000
    excess = []
    for name, (pattern, bound) in BOUNDS.items():
        places = [
            f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}"
            for path, line, text in texts
            for match in re.finditer(pattern, text)
        ]
        if (rate := 1e4 * len(places) / words) > bound:
            excess.append(f"{name}: {rate:.1f} per 10,000 words, at most {bound} expected: {', '.join(places)}")
    assert not excess, "\n".join(excess)


def test_code_is_not_counted_and_lines_keep_their_numbers() -> None:
    page = "a\n```\nwhat is of which\n```\nwhat is `whose` it\n>>> whose\n"
    assert [m.group() for m in re.finditer(r"what is|whose|which", prose(page))] == ["what is"]
    assert prose(page).count("\n") == page.count("\n")
