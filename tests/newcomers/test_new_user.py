"""What newcomers have and ask: vocabularies, labels, files of data, configs, and a stitch above its target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import nn
from transformers.utils import logging

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.adapters.pinning import settings_of_config, settings_of_processor
from hf_stitch.data import read_data


def test_no_word_of_a_vocabulary_is_taken_for_a_setting(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, 1100)}, "type": 1100, "player": 1101}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    settings = settings_of_processor(words)
    assert settings is not None
    assert not [key for key in (*settings.chosen, *settings.defaults) if key.endswith(("vocab.type", "vocab.player"))]
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=1102, **sizes)).eval()
    a, layer = hf_stitch.load(net, processor=words), "bert.encoder.layer.0"
    texts = Samples.of([f"w{i}" for i in range(2, 42)], label=[0, 1] * 20)
    made = hf_stitch.stitch(a, a, texts, source_layer=layer, target_layer=layer, matcher="identity", progress=False)
    made.save_pretrained(tmp_path)
    ids = torch.tensor([[1100, 1101]])
    assert torch.equal(hf_stitch.StitchedModel.from_pretrained(tmp_path)(input_ids=ids).logits, net(ids).logits)


def test_labels_are_renumbered_once_for_each_class() -> None:
    samples = Samples.of(["a", "b", "c"], label=[0, 1, 1])
    twice = samples.renumbered([2, 0], ["x", "y", "z"]).renumbered([1, 2, 0], ["z", "x", "y"])
    assert (twice.labels, twice.label_names, twice.fingerprint) == ([0, 1, 1], ("z", "x", "y"), samples.fingerprint)
    for numbers in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="numbers must"):
            samples.renumbered(numbers, ["x", "y"])


def test_a_file_of_data_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test\.parquet is a file: name its folder"):
        read_data(str(tmp_path / "test.parquet"))


def test_pinning_a_config_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, n_embd=8, n_head=1, n_layer=1)
    caplog.clear()
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    before = logging.get_verbosity()
    try:
        assert settings_of_config(config).chosen["vocab_size"] == 50
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records and logging.get_verbosity() == before


def test_a_stitch_above_its_target_is_scored_beside_its_source(tmp_path: Path) -> None:
    """The first layer of the target confuses two classes, that of the source none: 1.33 of the target's accuracy."""
    torch.manual_seed(0)
    labels = torch.arange(600) % 4
    images = torch.eye(4)[labels].reshape(-1, 1, 2, 2).repeat(1, 3, 1, 1) + 0.05 * torch.randn(600, 3, 2, 2)

    def network(mixing: torch.Tensor) -> Adapter:
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        with torch.no_grad():
            net[1].weight.copy_(mixing @ torch.eye(4).repeat(1, 3) / 3)
            net[3].weight.copy_(torch.eye(4))
        return hf_stitch.load(net, example_inputs=images[:2])

    confused = torch.eye(4)
    confused[:2, :2] = 0.5
    source, target = network(torch.eye(4)), network(confused)
    data = Samples.of(images, label=labels.tolist())
    stitched = hf_stitch.stitch(source, target, data, source_layer="2", target_layer="2", matcher="identity")
    scores = {who: row["accuracy"].value for who, row in stitched.evaluation.scores.items()}
    assert scores["stitched"] == scores["source"] == 1.0 and scores["target"] < 0.85
    stitched.stitcher.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "source alone 1.000" in card and "not shown to be better than: no map, source alone." in card
    assert "| source |" in card and "source" in str(stitched.evaluation)
