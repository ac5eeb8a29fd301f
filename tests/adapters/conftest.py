"""Fixtures of the tests of adapters."""

from __future__ import annotations

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer() -> hf.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
