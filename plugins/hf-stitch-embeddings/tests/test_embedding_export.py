"""Exported folders: sentence-transformers computes what the map computes, without hf-stitch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, fit_embedding_map
from hf_stitch_embeddings.export import (
    check_text_embeddings_inference,
    dense_layers,
    export_query_document,
    export_sentence_transformer,
)

from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch, PiecewiseStitch, ResidualMLPStitch, Stitch

sentence_transformers = pytest.importorskip("sentence_transformers")
RANDOM = np.random.default_rng(0)
TEXTS = ["a small dog", "the house", "seven red apples", "dog"]


def filled(stitch: Stitch) -> Stitch:
    generator = torch.Generator().manual_seed(0)
    for parameter in stitch.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return stitch


STITCHES = {
    "affine": lambda: filled(LinearStitch(12, 9)),
    "without bias": lambda: filled(LinearStitch(12, 9, bias=False)),
    "low rank": lambda: filled(LowRankStitch(12, 9, rank=3)),
    "residual MLP": lambda: filled(ResidualMLPStitch(12, 9, hidden=7)),
    "identity": lambda: IdentityStitch(12, 12),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with a prompt and a similarity of its own."""
    return made_encoder(tmp_path_factory.mktemp("encoder"), 12)


@pytest.fixture(scope="module")
def old_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller encoder."""
    return made_encoder(tmp_path_factory.mktemp("old"), 8)


def made_encoder(folder: Path, width: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in TEXTS for word in text.split()}), "query:"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder / "bert"
    )
    from sentence_transformers import models as parts

    body = parts.Transformer(str(folder / "bert"))
    model = sentence_transformers.SentenceTransformer(
        modules=[body, parts.Pooling(width)], prompts={"query": "query: "}, similarity_fn_name="dot", device="cpu"
    )
    model.save(str(folder / "model"))
    return folder / "model"


def vectors(folder: Path, **options: Any) -> np.ndarray:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return np.asarray(model.encode(TEXTS, **options))


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("name", STITCHES)
def test_the_folder_computes_the_map(encoder: Path, tmp_path: Path, name: str, metric: Any) -> None:
    embedding_map = EmbeddingMap.of(STITCHES[name](), metric=metric)
    folder = export_sentence_transformer(embedding_map, encoder, tmp_path / "out")
    for options in ({}, {"prompt_name": "query"}):
        expected = embedding_map(vectors(encoder, **options))
        np.testing.assert_allclose(vectors(folder, **options), expected, atol=1e-6)
    again = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert again.prompts["query"] == "query: " and again.similarity_fn_name == "dot"


def test_the_layers_are_the_map() -> None:
    for build in STITCHES.values():
        embedding_map = EmbeddingMap.of(build(), metric="dot")
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
        y = x
        for layer in dense_layers(embedding_map):
            y = layer.activation()(torch.nn.functional.linear(y, layer.weight, layer.bias))
        np.testing.assert_allclose(y.numpy(), embedding_map(x), atol=2e-6)


def test_it_loads_without_hf_stitch(encoder: Path, tmp_path: Path) -> None:
    embedding_map = EmbeddingMap.of(filled(ResidualMLPStitch(12, 9, hidden=7)))
    folder = export_sentence_transformer(embedding_map, encoder, tmp_path / "out")
    code = (
        "import sys; sys.modules['hf_stitch'] = None; import sentence_transformers, numpy; "
        f"model = sentence_transformers.SentenceTransformer({str(folder)!r}, device='cpu'); "
        f"numpy.save({str(tmp_path / 'found.npy')!r}, model.encode({TEXTS!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), embedding_map(vectors(encoder)), atol=1e-6)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"EmbeddingMap\(piecewise.* cannot be written as dense layers"):
        export_sentence_transformer(EmbeddingMap.of(PiecewiseStitch(12, 9, pieces=2)), encoder, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"requires vectors of width 8, but .* returns width 12: are the encoders swapped"
    ):
        export_sentence_transformer(EmbeddingMap.of(LinearStitch(8, 9)), encoder, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"modules\.json is missing"):
        export_sentence_transformer(EmbeddingMap.of(LinearStitch(12, 9)), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".export-*"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        export_sentence_transformer(EmbeddingMap.of(LinearStitch(12, 9)), encoder, tmp_path / "full")
    assert json.loads((encoder / "modules.json").read_text())[-1]["type"].endswith("Pooling")


@pytest.mark.parametrize("metric, similarity", [("cosine", "cosine"), ("dot", "dot")])
def test_queries_and_documents_by_two_encoders(
    encoder: Path, old_encoder: Path, tmp_path: Path, metric: Any, similarity: str
) -> None:
    embedding_map = EmbeddingMap.of(filled(LinearStitch(12, 8)), direction="query", metric=metric)
    folder = export_query_document(embedding_map, encoder, old_encoder, tmp_path / "both")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    expected = embedding_map(vectors(encoder, prompt_name="query"))
    np.testing.assert_allclose(model.encode_query(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(model.encode_document(TEXTS), vectors(old_encoder), atol=1e-6)
    assert model.similarity_fn_name == similarity
    with pytest.raises(ValueError, match="Could not determine route"):
        model.encode(TEXTS)


def test_routes_that_do_not_fit(encoder: Path, old_encoder: Path, tmp_path: Path) -> None:
    query = EmbeddingMap.of(LinearStitch(12, 8), direction="query")
    for bad, sides, message in (
        (query, (old_encoder, encoder), "requires vectors of width 12, but .* returns width 8"),
        (query, (encoder, encoder), "returns vectors of width 8, but .* returns width 12"),
        (EmbeddingMap.of(LinearStitch(8, 12)), (encoder, old_encoder), "does not map new queries"),
    ):
        with pytest.raises(ValueError, match=message):
            export_query_document(bad, *sides, tmp_path / "both")
    assert not list(tmp_path.iterdir())


def test_the_card_has_map_and_encoder(encoder: Path, tmp_path: Path) -> None:
    source = tmp_path / "encoder"
    shutil.copytree(encoder, source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n\nMade with care.\n")
    random = np.random.default_rng(0)
    old = random.normal(size=(500, 12)).astype(np.float32)
    fitted = fit_embedding_map(old, old[:, :9], map="ridge", direction="index", progress=False)
    folder = export_sentence_transformer(fitted, source, tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    for part in ("# Encoder with an embedding map", "recall@", "o with ridge, index", "Made with care.", ".encode("):
        assert part in card, part
    assert json.loads((folder / "embedding_map.json").read_text())["embedding_map"]["direction"] == "index"


def test_text_embeddings_inference(encoder: Path, tmp_path: Path) -> None:
    normalised = tmp_path / "normalised"
    shutil.copytree(encoder, normalised)
    modules = json.loads((encoder / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    plain = tmp_path / "plain"
    shutil.copytree(encoder, plain)
    (plain / "modules.json").write_text(json.dumps(modules))
    kind = "sentence_transformers.models.Normalize"
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind})
    (normalised / "modules.json").write_text(json.dumps(modules))
    with_bias, without = EmbeddingMap.of(filled(LinearStitch(12, 9))), filled(LinearStitch(12, 9, bias=False))
    export = export_sentence_transformer
    check_text_embeddings_inference(export(with_bias, plain, tmp_path / "1"))
    check_text_embeddings_inference(export(EmbeddingMap.of(without), normalised, tmp_path / "2"))
    mlp = EmbeddingMap.of(filled(ResidualMLPStitch(12, 9, hidden=7)))
    for number, (made, source, message) in enumerate((
        (with_bias, normalised, "normalised before a map with a bias"),
        (mlp, plain, "must be Identity or Tanh, got GELU"),
        (EmbeddingMap.of(without, metric="dot"), plain, "normalize=false"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            check_text_embeddings_inference(export(made, source, tmp_path / f"bad{number}"))


def test_the_source_of_text_embeddings_inference_is_followed(encoder: Path, tmp_path: Path) -> None:
    """What it computes, by its source: pooling, all dense modules, then normalisation."""
    without = EmbeddingMap.of(filled(LinearStitch(12, 9, bias=False)))
    pooled = vectors(encoder)
    unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(without(pooled), without(unit), atol=1e-6)


def test_the_encoder_before_a_map_normalises_as_that_of_the_pairs_did(encoder: Path, tmp_path: Path) -> None:
    """An encoder with ``Normalize`` and without it, and maps of vectors of length 1 and of others."""
    raw = sentence_transformers.SentenceTransformer(str(encoder), device="cpu")
    vectors = np.concatenate([3 * RANDOM.normal(size=(300, 12)).astype(np.float32), raw.encode(TEXTS)])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    of_raw, of_unit = (
        fit_embedding_map(side, side[:, ::-1], map="ridge", direction="index", progress=False)
        for side in (vectors, unit)
    )
    shutil.copytree(encoder, tmp_path / "unit")
    modules = json.loads((encoder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (tmp_path / "unit" / "modules.json").write_text(json.dumps(modules))
    for source, made, given in ((encoder, of_raw, raw.encode(TEXTS)), (encoder, of_unit, unit[-4:])):
        place = export_sentence_transformer(made, source, tmp_path / str(made.record["input_normalized"]))
        found = sentence_transformers.SentenceTransformer(str(place), device="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, made(given), atol=1e-5)
    export_sentence_transformer(of_unit, tmp_path / "unit", tmp_path / "both")
    with pytest.raises(ValueError, match=r"last module is Normalize.* have length 1, but the map was fitted to"):
        export_sentence_transformer(of_raw, tmp_path / "unit", tmp_path / "neither")
