"""Two tiny decoders with different tokenizers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hf_stitch import Adapter, load

SENTENCES = [
    f"{who} {verb} {where}{end}"
    for who in ("She", "The walker", "An unbelievably fast horse", "Zoë 🐎", "He")
    for verb in ("walked", "is walking", "walks", "ran quickly  and jumped")
    for where in ("home", "along the river", "to the blacksmith’s", "\taway\n")
    for end in (".", "…", " again!")
]


@lru_cache
def fine() -> Any:
    """A byte-level tokenizer of short pieces, which adds no special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<end>"]
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


@lru_cache
def coarse() -> Any:
    """A tokenizer of words and pieces of words, which begins each text with a special token."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<pad>", "<s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>")


@lru_cache
def decoder(name: str, dtype: torch.dtype = torch.float64) -> Adapter:
    """Load ``llama`` with the fine tokenizer, or ``gpt2`` with the coarse one."""
    torch.manual_seed(len(name))
    network: Any
    if name == "llama":
        network = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=len(fine()), hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0,
                bos_token_id=None, eos_token_id=1, initializer_range=0.3,
            )
        )  # fmt: skip
    else:
        network = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=len(coarse()), n_embd=12, n_layer=3, n_head=2, n_positions=256, bos_token_id=1,
                eos_token_id=None, pad_token_id=0, initializer_range=0.3,
            )
        )  # fmt: skip
    return load(network.to(dtype).eval(), processor=fine() if name == "llama" else coarse())


LAYER = {"llama": "model.layers.1", "gpt2": "transformer.h.0"}
