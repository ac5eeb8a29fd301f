"""Maps are applied, transposed, saved and loaded as they were fitted."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, evaluate_retrieval, exact_search, fit_embedding_map, normalized

from hf_stitch import registries
from hf_stitch.stitches import LinearStitch

from tests.killing import killed_at_every_operation, survives  # isort: skip


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@pytest.fixture
def linear() -> EmbeddingMap:
    weight, bias = torch.from_numpy(rows(5, 4, 1)), torch.from_numpy(rows(1, 5, 2)[0])
    return EmbeddingMap.of(LinearStitch.of(weight=weight, bias=bias), recipe={"matcher": {"name": "ridge"}})


def test_outputs_are_the_affine_map_then_normalised(linear: EmbeddingMap) -> None:
    vectors = rows(20_000, 4)  # more than two batches
    weight, bias = linear.affine() or pytest.fail("affine")
    wanted = vectors @ weight.T + bias
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(linear(vectors), wanted, atol=1e-6)


def test_memory_mapped_and_float16_vectors_are_mapped(linear: EmbeddingMap, tmp_path: Path) -> None:
    vectors = rows(50, 4)
    np.save(tmp_path / "index.npy", vectors)
    np.testing.assert_array_equal(linear(np.load(tmp_path / "index.npy", mmap_mode="r")), linear(vectors))
    half = rows(50, 4).astype(np.float16)
    np.testing.assert_array_equal(linear(half), linear(half.astype(np.float32)))
    np.testing.assert_array_equal(linear(torch.from_numpy(half)), linear(half))


def test_the_adjoint_ranks_as_the_rewritten_index_before_it_is_normalised(linear: EmbeddingMap) -> None:
    documents, queries = normalized(rows(300, 4)), rows(40, 5, 3)
    weight, bias = linear.affine() or pytest.fail("affine")
    rewritten = documents @ weight.T + bias
    wanted, _ = exact_search(queries, rewritten, 20, metric="dot")
    found, _ = exact_search(linear.adjoint()(queries), documents, 20, metric="cosine")
    assert (wanted == found).mean() > 0.999  # ties aside


def test_no_adjoint_of_other_maps(linear: EmbeddingMap) -> None:
    with pytest.raises(ValueError, match=r"adjoint\(\) requires an affine map"):
        linear.adjoint().adjoint()
    vectors = torch.from_numpy(rows(100, 4))
    bent = EmbeddingMap.of(registries.matchers.build("piecewise", clusters=2).fit(vectors, vectors.abs()))
    assert bent.affine() is None
    with pytest.raises(ValueError, match=r"adjoint\(\) requires an affine map"):
        bent.adjoint()
    long = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(3)), metric="l2")
    with pytest.raises(ValueError, match="l2"):
        long.adjoint()


@pytest.mark.parametrize("matcher", ["ridge", "low_rank", "piecewise", "residual_mlp"])
def test_saved_maps_are_bit_identical(matcher: str, tmp_path: Path) -> None:
    old, new = rows(200, 6), rows(200, 6) @ rows(6, 5, 1)
    made = fit_embedding_map(old, new, map=matcher, direction="index", progress=False)
    made.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    loaded = EmbeddingMap.from_pretrained(tmp_path)
    np.testing.assert_array_equal(loaded(old), made(old))
    assert (loaded.direction, loaded.metric, loaded.normalized) == ("index", "cosine", True)
    assert loaded.scores == made.scores
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Embedding map") == 1
    assert made.record["verdict"]["sentence"] in card


def test_no_text_of_the_record_is_markup_in_the_card(linear: EmbeddingMap) -> None:
    harm = "x\x1b[2J\ud800<img src=x onerror=owned()> [a](b) | `c`\n# Title"
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    linear.record["verdict"] = {"sentence": harm}
    linear.scores["report"] = {"k": harm, "n": harm, "pool": harm, "recall": {harm: score}}
    text = linear.card()
    assert "<img" not in text and "[a]" not in text and "\n# Title" not in text and "\x1b" not in text
    assert text.encode() and "x u001b 2J ud800 img src=x onerror=owned() a (b) c # Title" in text


def test_text_added_to_the_card_is_kept(linear: EmbeddingMap, tmp_path: Path) -> None:
    linear.save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    card.write_text(card.read_text() + "\nOurs since May.\n")
    linear.save_pretrained(tmp_path)
    assert "Ours since May." in card.read_text()
    assert card.read_text().count("## Embedding map") == 1


def test_a_kill_at_any_operation_leaves_the_old_map_and_card_or_the_new_ones(
    linear: EmbeddingMap, tmp_path: Path
) -> None:
    new = linear.adjoint()
    seen = []
    linear.save_pretrained(tmp_path)
    for _ in killed_at_every_operation(lambda: new.save_pretrained(tmp_path)):
        found = EmbeddingMap.from_pretrained(tmp_path)
        seen.append(found.direction)
        assert (linear if found.direction == "index" else new).card() in (tmp_path / "README.md").read_text()
        linear.save_pretrained(tmp_path)
    assert set(seen) == {"index", "adjoint"}


def test_a_full_disk_leaves_the_old_map_and_card(linear: EmbeddingMap, tmp_path: Path) -> None:
    linear.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    size = len(before["README.md"])  # that of the new map is longer

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises(OSError, match="unchanged"):
            linear.adjoint().save_pretrained(tmp_path)

    assert survives(attempt)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_old_model_is_a_map(tmp_path: Path) -> None:
    kept = EmbeddingMap.old_model(4)
    kept.save_pretrained(tmp_path)
    assert EmbeddingMap.from_pretrained(tmp_path).keeps_old
    assert "keep it" in (tmp_path / "README.md").read_text()


def test_wrong_vectors_are_refused(linear: EmbeddingMap) -> None:
    with pytest.raises(ValueError, match="wrong side"):
        linear(rows(3, 5))
    with pytest.raises(ValueError, match="width 4, got 3"):
        linear(rows(3, 3))
    bad = rows(10_000, 4)
    bad[9_000, 1] = np.nan
    with pytest.raises(ValueError, match=r"NaN.*9000"):
        linear(bad)
    bad[9_000] = 0
    with pytest.raises(ValueError, match="only zeros"):
        linear(bad)
    with pytest.raises(ValueError, match="not an embedding map"):
        linear.stitcher.recipe.clear()
        EmbeddingMap(linear.stitcher)


LENGTHS = np.random.default_rng(1).uniform(3, 9, size=(400, 1)).astype(np.float32)
RAW = LENGTHS * normalized(rows(400, 6))
UNIT = normalized(RAW)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("direction", ["index", "query"])
@pytest.mark.parametrize(
    ("fitted", "given", "message"),
    [
        (UNIT, RAW, "the map was fitted to vectors of length 1 .* have lengths from .* to .*; normalise them first"),
        (RAW, UNIT, "these have length 1, but the map was fitted to unnormalised vectors: normalise .* refit"),
        (RAW, 100 * RAW, "vectors of lengths from 3.* to 8.*, but these have lengths from .*encoder returns them"),
        (RAW, RAW, None),
        (UNIT, UNIT, None),
        (RAW, 1.2 * RAW, None),
    ],
    ids=["raw after unit", "unit after raw", "of another scale", "raw", "unit", "slightly longer"],
)  # fmt: skip
def test_vectors_of_other_lengths_than_the_pairs_are_refused(
    fitted: np.ndarray, given: np.ndarray, message: str | None, direction: Any, metric: Any
) -> None:
    made = fit_embedding_map(
        fitted[:300], fitted[:300, ::-1], map="ridge", direction=direction, metric=metric, progress=False
    )
    for some in (given[300:], given[300:301]):  # a single query, too
        if message is None:
            assert made(some).shape == some.shape
        else:
            with pytest.raises(ValueError, match=message):
                made(some)


@pytest.mark.parametrize(
    ("direction", "metric"), [("index", "dot"), ("index", "l2"), ("query", "dot"), ("query", "l2"), ("adjoint", "dot")]
)
def test_documents_of_other_lengths_are_refused_on_both_sides_of_an_evaluation(direction: Any, metric: Any) -> None:
    made = fit_embedding_map(
        UNIT[:300], UNIT[:300, ::-1], map="ridge", direction=direction, metric=metric, progress=False
    )
    unit, raw = (UNIT[300:], UNIT[300:, ::-1]), (RAW[300:], RAW[300:, ::-1])
    for documents in ((raw[0], unit[1]), (unit[0], raw[1])):
        with pytest.raises(
            ValueError, match=r"fitted to vectors of length 1 .* have lengths from 3.*normalise them first"
        ):
            evaluate_retrieval(made, *documents, *unit, k=10, resamples=2)
    evaluate_retrieval(made, *unit, *unit, k=10, resamples=2)


def test_zero_rows_have_no_length_and_maps_without_a_record_take_all() -> None:
    given = UNIT[300:].copy()
    given[::7] = 0
    made = fit_embedding_map(UNIT[:300], UNIT[:300, ::-1], map="ridge", direction="index", metric="dot", progress=False)
    assert made(given).shape == (100, 6) and made(np.zeros((2, 6), np.float32)).shape == (2, 6)
    old = EmbeddingMap.of(made.stitch, input_normalized=False)  # as 0.2 wrote it
    old(UNIT[:3]), old(100 * RAW)
    with pytest.raises(ValueError, match="these have length 1, but the map was fitted to unnormalised vectors"):
        old(UNIT)
    EmbeddingMap.of(made.stitch)(UNIT), made.adjoint()(RAW)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_vectors_of_any_size_that_float32_holds_keep_their_direction(size: float) -> None:
    identity = EmbeddingMap.of(LinearStitch.of(weight=torch.eye(4)))
    vectors, large = rows(50, 4), rows(50, 4) * np.float32(size)
    np.testing.assert_allclose(normalized(large), normalized(vectors), atol=1e-6)
    np.testing.assert_allclose(identity(large), normalized(vectors), atol=1e-6)
    assert (exact_search(large, large, 1)[0][:, 0] == np.arange(50)).all()


@pytest.mark.parametrize(("weight", "size"), [(torch.full((4, 4), 1e10), 1e30), (torch.zeros(4, 4), 1)])
def test_vectors_that_no_cosine_compares_are_refused_after_the_map_too(weight: torch.Tensor, size: float) -> None:
    with pytest.raises(ValueError, match=r"mapped vectors: 3 of rows 0 to 2 have (only zeros|NaN or infinite values)"):
        EmbeddingMap.of(LinearStitch.of(weight=weight))(np.full((3, 4), size, np.float32))
