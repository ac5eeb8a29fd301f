"""Tiny pairs of networks, described as the common tests of transformers want a model described."""

from __future__ import annotations

import copy
import dataclasses
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import hf_stitch.auto
from hf_stitch import StitchedModel

from tiny_networks import plain_tokenizer, stitched  # isort: skip

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
WORDS = {**SIZES, "vocab_size": 99}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, **IDS)
LLAMA = transformers.LlamaConfig(**WORDS, num_key_value_heads=2, max_position_embeddings=64, **IDS)
BERT, ROBERTA = transformers.BertConfig(**WORDS), transformers.RobertaConfig(**WORDS, max_position_embeddings=64)
VIT = transformers.ViTConfig(**SIZES, image_size=30, patch_size=10)
RESNET = transformers.ResNetConfig(embedding_size=10, hidden_sizes=[10, 20], depths=[1, 1], num_labels=2)


@dataclasses.dataclass(frozen=True)
class Family:
    """Two networks and the layers at which they are stitched."""

    title: str
    source: type[Any]
    target: type[Any]
    configs: tuple[Any, Any]
    layers: tuple[str, str]
    task: str | None
    auto: str
    """The Auto class that loads the target: tests choose labels by its table."""

    @cached_property
    def stitched(self) -> StitchedModel:
        """The stitched model."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            a, b = (
                hf_stitch.load(network(copy.deepcopy(config)).eval(), **self.given)
                for network, config in zip((self.source, self.target), self.configs, strict=True)
            )
            return stitched(a, b, self.samples, self.layers, matcher="random", task=self.task)

    @property
    def given(self) -> dict[str, Any]:
        """How networks are loaded."""
        if self.configs[1] is VIT:
            return {"example_inputs": torch.zeros(2, 3, VIT.image_size, VIT.image_size)}
        return {"processor": plain_tokenizer()}

    @property
    def samples(self) -> list[Any]:
        """Samples for a matcher that learns nothing from them."""
        images = ({"image": image, "label": 0} for image in torch.rand(12, 3, VIT.image_size, VIT.image_size))
        return [*images] if self.configs[1] is VIT else [{"text": f"w{i} w{i + 1}", "label": 0} for i in range(12)]

    @property
    def names(self) -> dict[str, Any]:
        """The table of transformers that lists classes like the target."""
        return getattr(modeling_auto, self.auto)


TEXT, IMAGE, CAUSAL = (
    f"MODEL_FOR_{name}_MAPPING_NAMES" for name in ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "CAUSAL_LM")
)
FAMILIES = {
    "classifier": Family(
        "RoBERTa → BERT, a classifier of texts",
        transformers.RobertaForSequenceClassification, transformers.BertForSequenceClassification, (ROBERTA, BERT),
        ("roberta.encoder.layer.0", "bert.encoder.layer.0"), "text-classification", TEXT,
    ),
    "encoder": Family(
        "RoBERTa → BERT, without a head",
        transformers.RobertaModel, transformers.BertModel, (ROBERTA, BERT),
        ("encoder.layer.0", "encoder.layer.0"), None, "MODEL_MAPPING_NAMES",
    ),
    "images": Family(
        "ResNet → ViT, a classifier of images",
        transformers.ResNetForImageClassification, transformers.ViTForImageClassification, (RESNET, VIT),
        ("resnet.encoder.stages.0", "vit.layers.0"), "image-classification", IMAGE,
    ),
    "gpt2": Family(
        "GPT-2 → GPT-2",
        transformers.GPT2LMHeadModel, transformers.GPT2LMHeadModel, (GPT2, GPT2),
        ("transformer.h.0", "transformer.h.0"), "text-generation", CAUSAL,
    ),
    "llama": Family(
        "Llama → Llama",
        transformers.LlamaForCausalLM, transformers.LlamaForCausalLM, (LLAMA, LLAMA),
        ("model.layers.0", "model.layers.0"), "text-generation", CAUSAL,
    ),
}  # fmt: skip


class ModelTester:
    """What the tests ask of a model: its class, a config, inputs, and how many layers and positions outputs have.

    Args:
        family: The networks.
        stitched: Whether the tests get the stitched model, or its target alone.
    """

    batch_size, is_training, num_attention_heads, hidden_size = 3, True, 4, 32
    num_hidden_layers, expected_num_hidden_layers = 2, 3  # hidden states

    def __init__(self, family: Family, stitched: bool) -> None:
        """Choose the class, and the number of hidden states."""
        self.family, self.stitched = family, stitched
        self.model_class: type[Any] = type(family.stitched) if stitched else family.target
        self.seq_length = 10 if family.configs[1] is VIT else 7
        if stitched:  # one layer of each network runs, and the mapped activations lie between them
            self.expected_num_hidden_layers += 1
            self.num_hidden_layers -= family.configs[0] is RESNET  # which has no attention

    def get_config(self) -> Any:
        """Return a config that a test may change."""
        config = copy.deepcopy(self.family.stitched.config if self.stitched else self.family.configs[1])
        config._attn_implementation_internal = None
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a config and a batch."""
        if self.family.configs[1] is VIT:
            return self.get_config(), {"pixel_values": torch.rand(self.batch_size, 3, VIT.image_size, VIT.image_size)}
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
