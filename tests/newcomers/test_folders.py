"""What newcomers do with folders of networks, data and results, and mostly on the command line."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters.pinning import settings_of_processor


def test_no_word_of_a_vocabulary_is_taken_for_a_setting(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, 1100)}, "type": 1100, "player": 1101}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
    settings = settings_of_processor(words)
    assert settings is not None
    assert not [key for key in (*settings.chosen, *settings.defaults) if key.endswith(("vocab.type", "vocab.player"))]
    net = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=1102, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8
        )
    ).eval()
    a = hf_stitch.load(net, processor=words)
    layer = "bert.encoder.layer.0"
    texts = Samples.of([f"w{i}" for i in range(2, 42)], label=[0, 1] * 20)
    made = hf_stitch.stitch(a, a, texts, source_layer=layer, target_layer=layer, matcher="identity", progress=False)
    made.save_pretrained(tmp_path / "model")
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")
    attached = hf_stitch.Stitcher.from_pretrained(tmp_path / "stitcher").attach(a, a)
    ids = torch.tensor([[1100, 1101]])
    assert torch.equal(again(input_ids=ids).logits, net(input_ids=ids).logits)
    assert torch.equal(attached(input_ids=ids).logits, net(input_ids=ids).logits)
