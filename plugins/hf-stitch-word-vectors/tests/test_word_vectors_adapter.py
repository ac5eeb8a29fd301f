"""Word vectors are encoders like any other: cuts, comparison, stitches, anchors, and saved models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gensim.models import FastText, KeyedVectors, Word2Vec
from hf_stitch_testing import check_adapter
from hf_stitch_word_vectors import WordVectors, WordVectorsAdapter, as_word_vectors, shared_vocabulary, word_samples

import hf_stitch
from hf_stitch.relative import AnchorSet, RelativeProjection, select_anchors

WORDS = [f"word{number:03}" for number in range(120)]


@pytest.fixture(scope="module")
def sides() -> tuple[WordVectors, WordVectors]:
    """Vectors, and the same rotated, scaled and in another order, with other words beside them."""
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(120, 8, generator=draws)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=draws)).Q
    others = torch.randn(10, 8, generator=draws)
    order = torch.randperm(120, generator=draws)
    turned = WordVectors.of(
        [*(f"other{number}" for number in range(10)), *(WORDS[place] for place in order)],
        torch.cat([others, 3 * values[order] @ rotation]),
    )
    return WordVectors.of(WORDS, values), turned


@pytest.fixture(scope="module")
def trained() -> dict[str, object]:
    """Models of gensim, trained on a few sentences."""
    texts = [["red", "green", "blue"], ["cat", "dog", "cow"], ["green", "dog", "blue", "cat"]] * 5
    options = {"vector_size": 6, "min_count": 1, "epochs": 1, "workers": 1, "seed": 0}
    word2vec = Word2Vec(texts, **options)
    return {"Word2Vec": word2vec, "KeyedVectors": word2vec.wv, "FastText": FastText(texts, bucket=50, **options)}


def test_the_vectors_are_an_exact_cut(sides: tuple[WordVectors, WordVectors]) -> None:
    adapter = hf_stitch.load(sides[0])
    assert adapter.library == "word_vectors"
    assert adapter.layers == ("vectors",)
    assert adapter.spec("vectors").width == 8
    check_adapter(adapter, adapter.preprocess(WORDS[5:12]), {"words": torch.tensor([3])})


@pytest.mark.parametrize("kind", ["Word2Vec", "KeyedVectors", "FastText"])
def test_models_of_gensim_are_served(trained: dict[str, object], kind: str) -> None:
    model = trained[kind]
    kept = getattr(model, "wv", model)
    adapter = hf_stitch.load(model)
    check_adapter(adapter, adapter.preprocess(["dog", "red"]))
    found = adapter.encode(adapter.preprocess(["dog", "red"]), "vectors")["vectors"].values
    assert torch.equal(found, torch.from_numpy(kept[["dog", "red"]]))


def test_words_without_a_vector_are_named(sides: tuple[WordVectors, WordVectors]) -> None:
    adapter = hf_stitch.load(sides[0])
    with pytest.raises(ValueError, match=r"2 of 3 words do not have a vector: 'mouse', 'Word001'.*shared_vocabulary"):
        adapter.preprocess(["word001", "mouse", "Word001"])
    with pytest.raises(ValueError, match="7 of 7 words do not have a vector: 'a', 'b', 'c', 'd', 'e', …"):
        sides[0].rows("abcdefg")


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "must not be empty"), (["a", "a"], "'a' is repeated"), (["a", ""], "got ''"), (["a\nb", "c"], "breaks")],
)
def test_a_vocabulary_is_checked(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WordVectors.of(words, torch.ones(len(words), 2))


def test_values_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(2, width\)"):
        WordVectors.of(["a", "b"], torch.ones(3, 2))
    with pytest.raises(ValueError, match="'b' contains NaN"):
        WordVectors.of(["a", "b"], torch.tensor([[1.0], [torch.nan]]))
    with pytest.raises(TypeError, match="got list"):
        as_word_vectors([1.0])


def test_two_vocabularies_are_compared(sides: tuple[WordVectors, WordVectors]) -> None:
    atlas = hf_stitch.compare(*sides, WORDS, metrics=["linear_cka"], progress=False)
    assert atlas.best_pair() == ("vectors", "vectors")
    rows = [torch.stack([side.rows([word])[0] for word in WORDS]) for side in sides]
    expected = hf_stitch.metrics.linear_cka(*rows).item()
    assert atlas["linear_cka"].item() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("matcher", ["lstsq", {"name": "ridge", "ridge": 1e-6}, {"name": "procrustes", "scale": True}])
def test_a_stitch_between_two_vocabularies_is_fitted_saved_and_loaded(
    sides: tuple[WordVectors, WordVectors], matcher: Any, tmp_path: Path
) -> None:
    stitched = hf_stitch.stitch(
        *sides, word_samples(WORDS), source_layer="vectors", target_layer="vectors", matcher=matcher, progress=False
    )
    inputs = stitched.preprocess(["word003", "word077"])
    with torch.no_grad():
        found = stitched(**inputs)
    assert torch.allclose(found, sides[1].rows(["word003", "word077"]), atol=0.05)
    stitched.save_pretrained(tmp_path / "stitched")
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path / "stitched")
    with torch.no_grad():
        assert torch.equal(again(**again.preprocess(["word003", "word077"])), found)


def test_relative_projections_of_rotated_vectors_agree(sides: tuple[WordVectors, WordVectors]) -> None:
    words = word_samples(shared_vocabulary(*sides))
    anchors = select_anchors(words, 20, seed=1)
    spaces = []
    for side in sides:
        adapter = hf_stitch.load(side)
        vectors = AnchorSet.of(anchors).encode(adapter, "vectors", anchors, progress=False).values(adapter, "vectors")
        spaces.append(RelativeProjection.of(vectors, ids=anchors.ids)(side.rows(WORDS)))
    assert torch.allclose(*spaces, atol=1e-5)


def test_an_encoder_is_swapped_for_another_vocabulary(sides: tuple[WordVectors, WordVectors]) -> None:
    anchors = word_samples(WORDS[:20])
    model = hf_stitch.relative_model(sides[0], anchors, layer="vectors", num_labels=3, task=None, progress=False)
    swapped = hf_stitch.swap(model, sides[1], anchors, encoder_layer="vectors", progress=False)
    with torch.no_grad():
        mine, other = (each(**each.preprocess(WORDS[30:40])).logits for each in (model, swapped))
    assert torch.allclose(mine, other, atol=1e-4)


def test_shared_words_are_ordered_by_frequency_and_cut() -> None:
    a = WordVectors.of(["the", "with", "house", "tree", "green"], torch.eye(5))
    b = WordVectors.of(["tree", "the", "with", "lake", "house"], torch.eye(5))
    assert shared_vocabulary(a, b) == ["with", "tree", "house"]
    assert shared_vocabulary(a, b, min_length=3, most_frequent=2) == ["the", "with"]
    with pytest.raises(ValueError, match="must share words of at least 9"):
        shared_vocabulary(a, b, min_length=9)


def test_no_network_is_imported_with_the_plugin() -> None:
    import subprocess
    import sys

    code = "import sys, hf_stitch_word_vectors; assert not {'torch', 'gensim'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_blueprint_is_checked(sides: tuple[WordVectors, WordVectors]) -> None:
    blueprint = hf_stitch.load(sides[0]).blueprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert WordVectorsAdapter().build(blueprint).words == sides[0].words
    for wrong in ({"words": 3, "width": 2}, {"words": "a\na", "width": 2}, {"words": "a", "width": True}):
        with pytest.raises(ValueError, match=r"must have words|repeated"):
            WordVectorsAdapter().build(wrong)


def test_a_kept_vector_of_gensim_is_a_copy(trained: dict[str, object]) -> None:
    kept = KeyedVectors(2)
    kept.add_vectors(["cat"], [[1.0, 2.0]])
    network = as_word_vectors(kept)
    kept.vectors[0, 0] = 9
    assert network.rows(["cat"]).tolist() == [[1.0, 2.0]]
