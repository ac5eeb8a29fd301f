"""Studies beyond the papers: their pages follow from their records."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script by its path, beside which the modules that it imports are."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    spec = importlib.util.spec_from_file_location(f"study_{name}", ROOT / "examples" / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["two_tokenizers", "transfer", "few_pairs", "beyond_affine"])
def test_the_page_follows_from_the_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    try:
        study = script(name, name, monkeypatch)
        record = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
        assert study.page(record) == (ROOT / "docs" / "results" / f"{name}.md").read_text()
    finally:
        for added in set(sys.modules) - before:  # modules of scripts, of which others have the same names
            if (file := getattr(sys.modules[added], "__file__", None)) and ROOT / "examples" in Path(file).parents:
                del sys.modules[added]


def test_a_model_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text of two characters that alternate it needs few bits; on characters that it does not know, eight."""
    study = script("two_tokenizers", "two_tokenizers", monkeypatch)
    sys.modules.pop("decoders", None)
    assert study.ngram_bits(["ab" * 200], ["ab" * 50]) < 0.3
    assert study.ngram_bits(["ab" * 200], ["zzzz"]) > 8
