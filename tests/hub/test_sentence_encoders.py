"""Sentence encoders on the Hub: what a repository is decides its library, also from the cache, and records keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from server import Hub

import hf_stitch
from hf_stitch.adapters import load_recorded

from tiny_networks import TEXT, plain_tokenizer  # isort: skip

library = pytest.importorskip("sentence_transformers")
TEXTS = [f"w{place} w{place + 1} w{place + 2}" for place in range(24)]
LAYERS = {"source_layer": "0.model.encoder.layer.1", "target_layer": "0.model.encoder.layer.0"}


@pytest.fixture
def sentences(hub: Hub, tmp_path: Path) -> Hub:
    """A Hub with two encoders, and a network without modules."""
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    for seed, name in enumerate(("encoder", "other", "bert")):
        torch.manual_seed(seed)
        transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained(tmp_path / name)
        plain_tokenizer().save_pretrained(tmp_path / name)
        if name != "bert":
            modules = [Transformer(str(tmp_path / name)), Pooling(32, "mean"), Normalize()]
            prompts = {"prompts": {"query": "w1 "}, "default_prompt_name": "query"}
            library.SentenceTransformer(modules=modules, device="cpu", **prompts).save(str(tmp_path / name))
        files = [file for file in (tmp_path / name).rglob("*") if file.is_file()]
        hub.put(f"alice/{name}", {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in files})
    return hub


def output(adapter: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = adapter.forward(adapter.preprocess(TEXTS))
    return found


def test_a_repository_with_modules_is_a_sentence_encoder(sentences: Hub, tmp_path: Path) -> None:
    adapter = hf_stitch.load("alice/encoder")
    commit = sentences.models["alice/encoder"].resolve("main")
    assert (adapter.library, adapter.reference.revision) == ("sentence_transformers", commit)
    assert torch.equal(output(adapter), output(hf_stitch.load(tmp_path / "encoder")))
    assert (hf_stitch.load("alice/bert").library, hf_stitch.load("alice/bert").layers[0]) == (
        "transformers", "encoder.layer.0",
    )  # fmt: skip
    for options in ({"task": "feature-extraction"}, {"subfolder": ""}):
        assert type(hf_stitch.load("alice/encoder", **options).model) is transformers.BertModel
    sentences.fail("")  # no connection
    for kind in ({}, {"local_files_only": True}):
        assert torch.equal(output(hf_stitch.load("alice/encoder", **kind)), output(adapter))
        assert hf_stitch.load("alice/bert", **kind).library == "transformers"


def test_a_record_keeps_what_was_loaded(sentences: Hub, tmp_path: Path) -> None:
    """Also one of version 0.2, for which every repository was a network of transformers."""
    adapter = hf_stitch.load("alice/encoder")
    assert torch.equal(output(load_recorded(adapter.reference)), output(adapter))
    before = hf_stitch.ModelReference("alice/encoder", "transformers")
    assert type(load_recorded(before).model) is transformers.BertModel
    made = hf_stitch.stitch("alice/encoder", "alice/other", TEXTS, **LAYERS, progress=False)
    expected = made(**made.preprocess(TEXTS))
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    for sides in ({}, {"source": str(tmp_path / "encoder")}):
        again = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher").attach(**sides)
        assert torch.equal(again(**again.preprocess(TEXTS)), expected)


def test_a_record_of_the_transformer_accepts_the_name_of_the_encoder(sentences: Hub, tmp_path: Path) -> None:
    a, b = (hf_stitch.load(f"alice/{name}", task="feature-extraction") for name in ("encoder", "other"))
    layers = {"source_layer": "encoder.layer.1", "target_layer": "encoder.layer.0"}
    made = hf_stitch.stitch(a, b, TEXTS, **layers, progress=False)
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    made.save_pretrained(tmp_path / "model")  # which needs no sentence-transformers
    expected = made(**made.preprocess(TEXTS)).last_hidden_state
    for sides in ({"source": "alice/encoder"}, {"source": str(tmp_path / "encoder")}):
        again = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher").attach(**sides)
        assert torch.equal(again(**again.preprocess(TEXTS)).last_hidden_state, expected)


def test_half_a_snapshot_is_refused(sentences: Hub) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("alice/encoder", ignore_patterns=["1_Pooling/*"])
    with pytest.raises(ValueError, match=r"alice/encoder lacks files of its modules .* copy all files"):
        hf_stitch.load("alice/encoder", local_files_only=True)
