"""Which block has the best features: planted ones, the plain network, and no gain where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_stitch_shorten import CannotBeRebuiltError, Depth, best_depth
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import app

from tests.tiny_networks import TEXT, WORDS, network, plain_tokenizer  # isort: skip

QUIET: dict[str, Any] = {"progress": False}


def encoder(loses: int | None) -> hf_stitch.Adapter:
    """A network of four blocks that forgets what it has read from a block on."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, "num_hidden_layers": 4})
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    if loses is not None:
        norm: Any = model.encoder.layer[loses].output.LayerNorm
        norm.weight.data.zero_()
        norm.bias.data.normal_()
    return hf_stitch.load(model, processor=plain_tokenizer())


def questions(count: int = 120) -> list[tuple[str, int]]:
    """Texts whose class is their first word."""
    return [(" ".join((WORDS[i % 3], *(WORDS[(7 * i + k) % 40] for k in range(4)))), i % 3) for i in range(count)]


def test_the_network_is_cut_off_before_it_forgets(tmp_path: Path) -> None:
    found = best_depth(encoder(2), questions(), **QUIET)
    places = list(found.accuracies)
    assert places.index(found.block) < 2 and found.pays and found.chosen.value > 0.9
    assert all(value < 0.5 for block in places[2:] for value in found.accuracies[block].values())
    found.save_pretrained(tmp_path / "short")
    again = transformers.AutoModel.from_pretrained(tmp_path / "short", add_pooling_layer=False)
    assert again.config.num_hidden_layers == places.index(found.block) + 1
    inputs = plain_tokenizer()([text for text, _ in questions(4)], return_tensors="pt", padding=True)
    assert found.model is not None
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        whole = encoder(2).encode(dict(inputs), found.block)[found.block].values
        assert torch.allclose(again(**inputs).last_hidden_state, whole, atol=1e-6)
    assert "library_name" in (tmp_path / "short" / "README.md").read_text()
    found.save(tmp_path / "found.json")
    assert Depth.load(tmp_path / "found.json") == found and len(found.to_pandas()) == 4 and found.plot() is not None


def test_buffers_that_no_file_holds_are_named_if_they_differ() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 4})
    model = transformers.LlamaModel(config).eval()
    model.rotary_emb.inv_freq.mul_(0.1)
    model.layers[2].self_attn.v_proj.weight.data.zero_()
    model.layers[2].mlp.down_proj.weight.data.normal_(std=30)  # from here on, it has forgotten what it read
    with pytest.raises(CannotBeRebuiltError, match=r"up to layers\.\d: rotary_emb.inv_freq differs from the config"):
        best_depth(hf_stitch.load(model, processor=plain_tokenizer()), questions(), **QUIET)


def test_nothing_is_claimed_where_labels_are_noise() -> None:
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (150,), generator=draw).tolist()
    data = [(text, label) for (text, _), label in zip(questions(150), labels, strict=True)]
    found = best_depth(encoder(None), data, score="neighbours", **QUIET)
    assert not found.pays and found.chosen.value < 0.5 and "No block is better" in found.verdict


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(ValueError, match="requires labelled samples"):
        best_depth(encoder(None), [text for text, _ in questions()], **QUIET)
    with pytest.raises(ValueError, match=r"has a head .*load the backbone"):
        best_depth(network("bert"), questions(), **QUIET)


def test_the_command(tmp_path: Path) -> None:
    import datasets

    net = encoder(2)
    net.model.save_pretrained(tmp_path / "net")  # type: ignore[operator]
    plain_tokenizer().save_pretrained(tmp_path / "net")
    texts, labels = zip(*questions(), strict=True)
    data = datasets.Dataset.from_dict({"text": texts, "label": labels})
    data.cast_column("label", datasets.ClassLabel(num_classes=3)).to_parquet(tmp_path / "data" / "train.parquet")
    place = ["best-depth", str(tmp_path / "net"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*place, "--task", "feature-extraction"])
    assert result.exit_code == 0, result.output
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model").num_hidden_layers < 4
