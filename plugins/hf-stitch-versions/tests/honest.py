"""Honest pairs: two networks that compute the same up to rounding, and differ in whatever else they can.

One kind is left out, because modules of the same name do compute something else: batch norms that are folded into
convolutions. A body and the same body with a head count: what both have is the same.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from planted import IMAGES, TEXTS, first, loaded, trained
from torch import Tensor, nn
from torch.nn import functional

import hf_stitch
from hf_stitch import Activations, Adapter

from tests.forms import Wrapper, form_of  # isort: skip
from tests.tiny_networks import BODY, CLASSES, SIZE, WORDS, build, checkpointed, plain_tokenizer  # isort: skip

IDS = {"input_ids": torch.arange(4, 16).reshape(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
"""Example of a network that does not tell what it takes."""

TIMM = ("deit", "swin", "convnext", "cnn")
TEXT = [" ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(3 + i % 7)) for i in range(12)]
PICTURES = torch.randn(12, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Honest:
    """Two networks that are the same, and how they are compared."""

    kind: str
    family: str
    a: Adapter
    b: Adapter | Activations
    data: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def data_of(family: str) -> Any:
    """Return samples for a family."""
    return PICTURES if family in IMAGES else TEXT


def copied(family: str, change: Callable[[Any], Any]) -> Honest:
    """Return a network and a changed copy; a change returns the new network, or nothing if it was made in place."""
    model = copy.deepcopy(first(family).model)
    changed = change(model)
    return Honest("", family, first(family), loaded(family, model if changed is None else changed))


# -- forms -------------------------------------------------------------------------------------------------------------
def in_dtype(dtype: torch.dtype, family: str) -> Honest:
    """Return a copy in another dtype."""
    return copied(family, lambda model: model.to(dtype))


def eager(family: str) -> Honest:
    """Return a copy whose attention has another kernel."""
    return copied(family, lambda model: model.set_attn_implementation("eager"))


def unfused(family: str) -> Honest:
    """Return a copy whose attention has another kernel, in timm."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False

    return copied(family, change)


def eager_in_bfloat16(family: str) -> Honest:
    """Return a copy with another kernel in another dtype."""

    def change(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model.bfloat16()

    return copied(family, change)


def compiled(backend: str, family: str) -> Honest:
    """Return a compiled copy."""
    return copied(family, lambda model: model.compile(backend=backend))


def wrapped(family: str) -> Honest:
    """Return a network inside another module."""
    model = Wrapper(trained(family))
    if family in IMAGES:
        return Honest("", family, first(family), loaded(family, model))
    return Honest(
        "", family, first(family), hf_stitch.load(model, processor=plain_tokenizer(), example_inputs=dict(IDS))
    )


def headless(family: str) -> Honest:
    """Return a network with a head, and its body."""
    model: Any = copy.deepcopy(first(family).model)
    return Honest("", family, first(family), loaded(family, getattr(model, model.base_model_prefix)))


def saved(family: str) -> Honest:
    """Return a copy that was written and read."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = first(family).model
        if family in TIMM:
            torch.save(model.state_dict(), f"{folder}/weights.pt")
            other = build(family, 1)
            other.load_state_dict(torch.load(f"{folder}/weights.pt"))
            return Honest("", family, first(family), loaded(family, other))
        model.save_pretrained(folder)
        return Honest("", family, first(family), loaded(family, type(model).from_pretrained(folder).eval()))


def checkpointing(family: str) -> Honest:
    """Return a copy with gradient checkpointing, as during training."""
    if family in TIMM:
        return copied(family, lambda model: model.set_grad_checkpointing(True))
    return copied(family, lambda model: checkpointed(model).train())


def untied(family: str) -> Honest:
    """Return a copy of which no two modules share a weight."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(value.detach().clone()))

    return copied(family, change)


def channels_last(family: str) -> Honest:
    """Return a copy whose weights lie in memory otherwise."""
    return copied(family, lambda model: model.to(memory_format=torch.channels_last))


def batches(size: int, family: str) -> Honest:
    """Return the network itself, on samples in batches of a size."""
    return Honest("", family, first(family), first(family), data_of(family), {"batch_size": size})


def recorded(family: str) -> Honest:
    """Return what forward hooks have recorded in batches of 8, against samples one by one."""
    adapter, layers = first(family), first(family).layers
    values: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    data = data_of(family)
    for batch in (data[:8], data[8:]):
        hooks = [
            adapter.model.get_submodule(layer).register_forward_hook(
                lambda module, args, out, layer=layer: values[layer].append(out if isinstance(out, Tensor) else out[0])
            )
            for layer in layers
        ]
        with torch.no_grad():
            adapter.forward(adapter.preprocess(batch))
        for hook in hooks:
            hook.remove()
    joined = {layer: torch.cat([each.flatten(2) for each in values[layer]]) for layer in layers}
    return Honest("", family, adapter, Activations(joined, tuple(range(len(data)))), data, {"batch_size": 1})


def lora(one: str, two: str, family: str) -> Honest:
    """Return two forms of a network with LoRA: as two factors, or merged into the weights."""
    adapters = []
    for form in (one, two):
        model = form_of(family, form)
        wraps = isinstance(model, Wrapper)
        adapters.append(
            hf_stitch.load(model, processor=plain_tokenizer(), **({"example_inputs": dict(IDS)} if wraps else {}))
        )
    return Honest("", family, *adapters)


# -- ports -------------------------------------------------------------------------------------------------------------
def timm_of_transformers(family: str = "vit") -> Honest:
    """Return a ViT of transformers, and the same of timm with its weights converted."""
    theirs = trained(family)
    mine = timm.models.VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=BODY["hidden_size"], depth=BODY["num_hidden_layers"],
        num_heads=BODY["num_attention_heads"], mlp_ratio=BODY["intermediate_size"] / BODY["hidden_size"],
        num_classes=CLASSES, norm_layer=partial(nn.LayerNorm, eps=1e-12),
    )  # fmt: skip
    old = theirs.state_dict()
    new = {
        "cls_token": old["vit.embeddings.cls_token"],
        "pos_embed": old["vit.embeddings.position_embeddings"],
    }
    for kind in ("weight", "bias"):
        new |= {
            f"patch_embed.proj.{kind}": old[f"vit.embeddings.patch_embeddings.projection.{kind}"],
            f"norm.{kind}": old[f"vit.layernorm.{kind}"],
            f"head.{kind}": old[f"classifier.{kind}"],
        }
        for i in range(BODY["num_hidden_layers"]):
            block, layer = f"blocks.{i}", f"vit.layers.{i}"
            parts = [old[f"{layer}.attention.{part}_proj.{kind}"] for part in "qkv"]
            new |= {
                f"{block}.norm1.{kind}": old[f"{layer}.layernorm_before.{kind}"],
                f"{block}.attn.qkv.{kind}": torch.cat(parts),
                f"{block}.attn.proj.{kind}": old[f"{layer}.attention.o_proj.{kind}"],
                f"{block}.norm2.{kind}": old[f"{layer}.layernorm_after.{kind}"],
                f"{block}.mlp.fc1.{kind}": old[f"{layer}.mlp.fc1.{kind}"],
                f"{block}.mlp.fc2.{kind}": old[f"{layer}.mlp.fc2.{kind}"],
            }
    mine.load_state_dict(new)
    return Honest("", family, first(family), loaded(family, mine.eval()))


class Block(nn.Module):
    """A block of :class:`PlainBert`."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        x = self.norm_attention(x + self.o((weights @ v).transpose(1, 2).flatten(2)))
        return self.norm_mlp(x + self.down(functional.gelu(self.up(x))))


class PlainBert(nn.Module):
    """BERT with a classifier, written anew: other names, and another order of the same operations."""

    def __init__(self, words: int, places: int, width: int, depth: int, heads: int, inner: int, classes: int) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, width) for n in (words, places, 2))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(depth))
        self.pool, self.out = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + (self.places(places) + self.kinds.weight[0]))
        for block in self.blocks:
            x = block(x, attention_mask == 0)
        return self.out(self.pool(x[:, 0]).tanh())


PARTS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "norm_attention": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "norm_mlp": "output.LayerNorm",
}  # fmt: skip
"""Names in a block of :class:`PlainBert` -> in one of BERT."""


def plain_bert(source: nn.Module) -> PlainBert:
    """Return the port of a tiny BERT, with its weights."""
    old = source.state_dict()
    new = {
        "words.weight": old["bert.embeddings.word_embeddings.weight"],
        "places.weight": old["bert.embeddings.position_embeddings.weight"],
        "kinds.weight": old["bert.embeddings.token_type_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        new |= {
            f"norm.{kind}": old[f"bert.embeddings.LayerNorm.{kind}"],
            f"pool.{kind}": old[f"bert.pooler.dense.{kind}"],
            f"out.{kind}": old[f"classifier.{kind}"],
        }
        new |= {
            f"blocks.{i}.{mine}.{kind}": old[f"bert.encoder.layer.{i}.{theirs}.{kind}"]
            for i in range(BODY["num_hidden_layers"])
            for mine, theirs in PARTS.items()
        }
    port = PlainBert(*(len(new[name]) for name in ("words.weight", "places.weight")), *BODY.values(), 3)
    port.load_state_dict(new)
    return port.eval()


def port_of_bert(family: str = "bert") -> Honest:
    """Return BERT and its port in plain torch."""
    port = hf_stitch.load(plain_bert(first(family).model), processor=plain_tokenizer(), example_inputs=dict(IDS))
    return Honest("", family, first(family), port)


# -- the table ---------------------------------------------------------------------------------------------------------
TABLE: dict[str, tuple[Callable[[str], Honest], tuple[str, ...]]] = {
    "bfloat16": (partial(in_dtype, torch.bfloat16), (*IMAGES, *TEXTS)),
    "float16": (partial(in_dtype, torch.float16), ("vit", "bert", "llama")),
    "float64": (partial(in_dtype, torch.float64), ("bert", "cnn")),
    "eager": (eager, ("vit", "bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "gptneox")),
    "unfused": (unfused, ("deit", "swin")),
    "eager, bfloat16": (eager_in_bfloat16, ("bert", "llama", "gpt2")),
    "batches of 1": (partial(batches, 1), ("vit", "bert")),
    "batches of 8": (partial(batches, 8), ("vit", "bert")),
    "recorded in batches of 8": (recorded, ("vit",)),
    "LoRA": (partial(lora, "lora", "merged"), ("bert", "llama")),
    "PEFT": (partial(lora, "peft", "peft-merged"), ("bert", "llama")),
    "compiled, eager": (partial(compiled, "eager"), ("bert", "vit", "llama")),
    "compiled, inductor": (partial(compiled, "inductor"), ("bert",)),
    "wrapped": (wrapped, ("bert", "llama", "vit", "cnn")),
    "headless": (headless, ("bert", "roberta", "gpt2", "llama")),
    "saved": (saved, ("bert", "gpt2", "vit", "swin")),
    "checkpointing": (checkpointing, ("bert", "llama", "vit", "deit")),
    "untied": (untied, ("gpt2", "t5")),
    "channels last": (channels_last, ("cnn", "convnext")),
    "timm": (timm_of_transformers, ("vit",)),
    "port": (port_of_bert, ("bert",)),
}
"""Kind -> what makes a pair of a family, and the families."""


def names() -> list[tuple[str, str]]:
    """Return kind and family of all honest pairs."""
    return [(kind, family) for kind, (_, families) in TABLE.items() for family in families]


def pair(kind: str, family: str) -> Honest:
    """Make an honest pair."""
    made = TABLE[kind][0](family)
    return Honest(kind, family, made.a, made.b, made.data, made.options)
