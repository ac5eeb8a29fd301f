"""``hf-stitch embeddings``: a map from pairs to a rewritten index, and wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_stitch_embeddings import EmbeddingMap
from hf_stitch_embeddings.cli import app
from hf_stitch_testing import check_command
from typer.testing import CliRunner

RANDOM = np.random.default_rng(0)
TURN = np.linalg.qr(RANDOM.normal(size=(8, 8)))[0]


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    old = RANDOM.normal(size=(count, 8)).astype(np.float32)
    return old, (old @ TURN).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of vectors, and a map that was fitted by the command."""
    place = tmp_path_factory.mktemp("vectors")
    for name, count in (("pairs", 600), ("documents", 300), ("queries", 40), ("recent", 200)):
        for side, rows in zip(("old", "new"), pairs(count), strict=True):
            np.save(place / f"{name}_{side}.npy", rows)
    run("fit", place / "pairs_old.npy", place / "pairs_new.npy", "--map", "ridge", "--direction", "index", "--out",
        place / "map")  # fmt: skip
    return place


def run(*arguments: Any, code: int = 0) -> Any:
    found = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert found.exit_code == code, (found.output, found.exception)
    return json.loads(found.stdout) if code in (0, 3) else found.output


def test_contract(folder: Path) -> None:
    check_command(app, "monitor", str(folder / "map"), str(folder / "recent_old.npy"), str(folder / "recent_new.npy"))


def test_fit_decides_and_saves(folder: Path) -> None:
    found = run(
        "fit", folder / "pairs_old.npy", folder / "pairs_new.npy", "--out", folder / "auto", "--map", "procrustes"
    )
    assert found["verdict"]["go"]
    assert EmbeddingMap.from_pretrained(folder / "auto").name == found["map"]
    assert EmbeddingMap.from_pretrained(folder / "auto").record["verdict"]["threshold"] == 0.8


def test_evaluate(folder: Path) -> None:
    sides = [folder / f"{name}_{side}.npy" for name in ("documents", "queries") for side in ("old", "new")]
    (folder / "relevance.json").write_text(json.dumps([[number] for number in range(20)] + [{"1": 2}] * 20))
    found = run("evaluate", folder / "map", *sides, "--index-size", 5000, "--relevance", folder / "relevance.json",
                "--out", folder / "result.json")  # fmt: skip
    assert found["scores"]["ridge, index"]["recall@10"]["value"] > 0.95
    assert found["verdict"]["go"]
    assert "ndcg@10" in found["scores"]["ridge, index"]
    assert json.loads((folder / "result.json").read_text())["documents"] == 300


def test_upgrade_of_a_file(folder: Path, tmp_path: Path) -> None:
    found = run("upgrade", folder / "map", folder / "documents_old.npy", f"target={tmp_path}/new.npy")
    assert found["rows"] == found["mapped"] == 300
    expected = EmbeddingMap.from_pretrained(folder / "map")(np.load(folder / "documents_old.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "new.npy"), expected, atol=1e-6)


def test_upgrade_of_a_faiss_index(folder: Path, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(8)
    index.add(np.load(folder / "documents_old.npy"))
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    run("upgrade", folder / "map", tmp_path / "old.faiss", f"target={tmp_path}/new.faiss", "factory=SQ8")
    assert faiss.read_index(str(tmp_path / "new.faiss")).ntotal == 300


def test_the_help_lists_the_stores() -> None:
    shown = CliRunner().invoke(app, ["upgrade", "--help"], terminal_width=200).output
    assert "arrays, faiss, lancedb, qdrant" in " ".join(shown.replace("│", " ").split())


def test_export_of_the_map_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    assert run("export", folder / "map", "--onnx", tmp_path / "map.onnx")["saved"] == [str(tmp_path / "map.onnx")]
    assert (tmp_path / "map.onnx").is_file()


def test_monitor_has_an_exit_code_of_its_own(folder: Path) -> None:
    old, new = folder / "recent_old.npy", folder / "recent_new.npy"
    assert run("monitor", folder / "map", old, new)["aged"] is False
    assert run("monitor", folder / "map", old, old, code=3)["aged"] is True


def test_columns_of_parquet_files(folder: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    sides = []
    for side in ("old", "new"):
        rows = np.load(folder / f"pairs_{side}.npy")
        pandas.DataFrame({"id": range(len(rows)), "v": list(rows)}).to_parquet(tmp_path / f"{side}.parquet")
        sides.append(f"{tmp_path / side}.parquet:v")
    found = run("fit", *sides, "--map", "ridge", "--direction", "index", "--out", tmp_path / "map")
    assert found["map"] == "ridge, index"
    with pytest.raises(ValueError, match="column must be one of"):
        CliRunner().invoke(app, ["fit", sides[0][:-2], sides[1], "--out", str(tmp_path)], catch_exceptions=False)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["upgrade", "map"], "Missing argument 'STORE'"),
        (["upgrade", "map", "arrays:a.npy"], "'arrays' among embedding_stores requires the option 'target'"),
        (["upgrade", "map", "arrays:a.npy", "tarjet=b"], "got an unexpected option 'tarjet'; did you mean 'target'"),
        (["upgrade", "map", "arrays:a.npy", "b.npy"], "options must be OPTION=VALUE, each once, got 'b.npy'"),
        (["upgrade", "map", "arrays:a.npy", "target=b", "target=c"], "got 'target=c'"),
        (["export", "map"], "pass --encoder and --out"),
        (["fit", "a.npy", "b.npy", "--out", "x", "--old-ids", __file__], "ids of both sides"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in " ".join(run(*arguments, code=2).replace("│", " ").split())
