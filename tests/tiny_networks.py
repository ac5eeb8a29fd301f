"""Tiny networks of every family, built without downloads, and raw samples for them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import timm
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from hf_stitch import Adapter, load, stitch

SIZE = 32
WORDS = [f"w{i}" for i in range(60)]
BODY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**BODY, "vocab_size": 80}
CLASSES = 5
LAYERS = {
    "cnn": "layer2.0",
    "convnext": "stages.1.blocks.0",
    "vit": "vit.layers.1",
    "deit": "blocks.1",
    "swin": "layers.0.blocks.1",
    "bert": "bert.encoder.layer.1",
    "roberta": "roberta.encoder.layer.1",
    "gpt2": "transformer.h.1",
    "llama": "model.layers.1",
    "t5": "encoder.block.1",
}
"""A cut in the middle of each network."""
VISION, LANGUAGE = ("cnn", "convnext", "vit", "deit", "swin"), ("bert", "roberta", "gpt2", "llama", "t5")


def tokenizer(words: int, seed: int, *specials: str, **names: str) -> Any:
    """A tokenizer of whole words with a shuffled vocabulary."""
    shuffled = random.Random(seed).sample(WORDS[:words], words)
    vocabulary = {word: index for index, word in enumerate([*specials, *shuffled])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def plain_tokenizer() -> Any:
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return tokenizer(60, 0, *names.values(), **names)


def other_tokenizer() -> Any:
    """The tokenizer of RoBERTa: fewer words in another order, and padding with id 1."""
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer(40, 1, *names.values(), **names)


def build(family: str, seed: int) -> nn.Module:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        match family:
            case "cnn":
                model = timm.create_model("resnet10t", num_classes=CLASSES, channels=(16, 24, 32, 48))
            case "convnext":
                sizes: Any = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 32)}
                model = timm.create_model("convnext_atto", num_classes=CLASSES, **sizes)
            case "deit":
                sizes = {"img_size": SIZE, "depth": 3, "embed_dim": 36}
                model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=CLASSES, **sizes)
            case "swin":
                sizes = {"img_size": SIZE, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
                model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=CLASSES, **sizes)
            case "vit":
                config = transformers.ViTConfig(**BODY, image_size=SIZE, patch_size=8, num_labels=CLASSES)
                model = transformers.ViTForImageClassification(config)
            case "bert":
                config = transformers.BertConfig(**TEXT, num_labels=3)
                model = transformers.BertForSequenceClassification(config)
            case "roberta":
                config = transformers.RobertaConfig(**TEXT, num_labels=3, max_position_embeddings=40)
                model = transformers.RobertaForSequenceClassification(config)
            case "gpt2":
                config = transformers.GPT2Config(n_embd=24, n_layer=3, n_head=4, vocab_size=80, **ends)
                model = transformers.GPT2LMHeadModel(config)
            case "llama":
                config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, **ends)
                model = transformers.LlamaForCausalLM(config)
            case "t5":
                config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=80)
                model = transformers.T5EncoderModel(config)
            case _:
                raise ValueError(family)
    return model.eval()


def adapted(family: str, model: nn.Module) -> Adapter:
    """Load a network into an adapter, with its tokenizer."""
    if family in LANGUAGE:
        return load(model, processor=other_tokenizer() if family == "roberta" else plain_tokenizer())
    example = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return load(model, example_inputs=example.to(next(model.parameters()).dtype))


@cache
def network(family: str, seed: int = 0, dtype: str = "float32") -> Adapter:
    """Return an adapter of a network; cached, because adapters do not change models."""
    return adapted(family, build(family, seed).to(getattr(torch, dtype)))


def checkpointed(model: Any, **options: Any) -> Any:
    """Enable gradient checkpointing, by the name that it has in the installed transformers."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    enable = newer or model.gradient_checkpointing_enable
    enable(**({f"{'activation' if newer else 'gradient'}_checkpointing_kwargs": options} if options else {}))
    return model


def stitched(a: Adapter, b: Adapter, data: Any, layers: tuple[str, str], **options: Any) -> Any:
    """Stitch two networks at two layers by ridge, without a bar."""
    ends = {"source_layer": layers[0], "target_layer": layers[1]}
    return stitch(a, b, data, **ends, **{"progress": False, "matcher": "ridge", **options})
