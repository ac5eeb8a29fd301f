"""Planted bugs: two networks of which the second computes something else in one module, which is known before.

The networks are as if trained: attention is not uniform, and norms and biases are not 1 and 0. The effect of a bug is
how much it changes the outputs of the network, computed in float64. Some bugs have none (positions that are off by one
and are rotated into queries and keys) and count nowhere. Some have less than computing the first network in float32
instead of float64, and are counted apart: another eps where variances are large. Dropout that is left in training mode
is no bug here: every comparison is made in evaluation mode.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from hf_stitch_versions.inputs import random_feeds
from hf_stitch_versions.recording import in_dtype
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter

from tests.tiny_networks import SIZE, TEXT, build, other_tokenizer, plain_tokenizer  # isort: skip

EFFECT = 1e-12
"""Relative difference of the outputs in float64 up to which a bug has no effect."""

GAIN = 1.5
"""Standard deviation of what a linear layer makes of unit vectors: attention is not uniform."""

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MORE: dict[str, Callable[[], nn.Module]] = {
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=48, vocab_size=80)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TEXT, **ENDS, num_key_value_heads=2, tie_word_embeddings=False)
    ),
    "gptneox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TEXT, **ENDS)),
}
"""Families beside those of ``tiny_networks``."""

IMAGES = ("vit", "deit", "swin", "convnext", "cnn")
TEXTS = ("bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "gptneox", "t5")


# -- networks ----------------------------------------------------------------------------------------------------------
def trained(family: str) -> nn.Module:
    """Build a network as if it were trained, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MORE[family]().eval() if family in MORE else build(family, 0)
    return as_if_trained(model)


@torch.no_grad()
def as_if_trained(model: nn.Module) -> nn.Module:
    """Scale the weights of a network, and change its norms, biases and statistics."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            noise = torch.randn(value.shape, generator=generator)
            if name == "running_var":
                value.mul_(torch.exp(0.3 * noise))
            elif name == "running_mean" or (isinstance(value, nn.Parameter) and value.dim() == 1):
                value.add_(0.1 * noise)
            elif isinstance(value, nn.Parameter):
                if float(value.std()) == 0:
                    value.copy_(noise)
                convolution = isinstance(module, nn.Conv2d)
                inputs = value[0].numel() if convolution else value.shape[-1]
                if type(module).__name__ == "Conv1D":  # of GPT-2, whose weights have the shape (inputs, outputs)
                    inputs = value.shape[0]
                value.mul_((1.0 if convolution else GAIN) / math.sqrt(inputs) / float(value.std()))
    return model


def loaded(family: str, model: nn.Module) -> Adapter:
    """Load a network of a family, or one that takes the same inputs, with a tokenizer or an example."""
    if family in IMAGES:
        example = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        return hf_stitch.load(model, example_inputs=example.to(next(model.parameters()).dtype))
    return hf_stitch.load(model, processor=other_tokenizer() if family == "roberta" else plain_tokenizer())


@cache
def first(family: str) -> Adapter:
    """Return the first network of a family; cached, because nothing changes it."""
    return loaded(family, trained(family))


# -- bugs: each changes the module of a name ---------------------------------------------------------------------------
Bug = Callable[[nn.Module, str], None]


def wrap(module: Any, around: Callable[..., Any]) -> None:
    """Replace the forward of a module by ``around(forward, *args, **kwargs)``."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = types.MethodType(wrapped, module)


def eps(model: nn.Module, name: str) -> None:
    """Set 1e-5 for smaller ones, 1e-6 for 1e-5, and 1e-3 for batch norms, as in TensorFlow."""
    module: Any = model.get_submodule(name)
    attribute = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    small = getattr(module, attribute) < 5e-6
    setattr(module, attribute, 1e-3 if isinstance(module, nn.BatchNorm2d) else 1e-5 if small else 1e-6)


def replaced(model: nn.Module, name: str, by: Callable[[], nn.Module]) -> None:
    """Replace a module: an activation, or a pooling."""
    model.set_submodule(name, by())


def changed(model: nn.Module, name: str, by: Callable[[Tensor], Tensor], of: str = "weight") -> None:
    """Replace a weight or a buffer of a module by what a function makes of it."""
    module = model.get_submodule(name)
    value = getattr(module, of)
    new = by(value.detach()).clone()
    setattr(module, of, nn.Parameter(new) if isinstance(value, nn.Parameter) else new)


def without_bias(model: nn.Module, name: str) -> None:
    """Take the bias of a module away."""
    module: Any = model.get_submodule(name)
    module.bias = nn.Parameter(torch.zeros_like(module.bias)) if type(module).__name__ == "Conv1D" else None


def attribute(model: nn.Module, name: str, **values: Any) -> None:
    """Set attributes of a module; a function makes the new value of the old one."""
    module = model.get_submodule(name)
    for key, value in values.items():
        setattr(module, key, value(getattr(module, key)) if callable(value) else value)


def masked(model: nn.Module, name: str) -> None:
    """Shift masks by one key in the forward of a module."""

    def shifted(value: Any) -> Any:
        is_mask = isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == 1
        return torch.roll(value, 1, -1) if is_mask else value

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*map(shifted, args), **{key: shifted(value) for key, value in kwargs.items()})

    wrap(model.get_submodule(name), around)


def mask_at_top(model: nn.Module, name: str) -> None:
    """Hide the last token of every text in what a network, or its body, makes its mask of."""

    def around(forward: Callable[..., Any], *args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(1, keepdim=True)
        return forward(*args, attention_mask=attention_mask.scatter(1, last, 0), **kwargs)

    wrap(model.get_submodule(name), around)


def output(model: nn.Module, name: str, by: Callable[[Tensor], Tensor]) -> None:
    """Change what a module yields, the first of several tensors."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        return (by(found[0]), *found[1:]) if isinstance(found, tuple) else by(found)

    wrap(model.get_submodule(name), around)


def reads(model: nn.Module, name: str, by: Callable[[Tensor], Tensor]) -> None:
    """Change the first argument of a module."""
    wrap(model.get_submodule(name), lambda forward, x, *args, **kwargs: forward(by(x), *args, **kwargs))


def positions(model: nn.Module, name: str) -> None:
    """Number the positions from 1 on."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        kwargs["position_ids"] = torch.arange(1, ids.shape[1] + 1)[None].expand(ids.shape)
        return forward(*args, **kwargs)

    wrap(model.get_submodule(name), around)


def exchanged(model: nn.Module, name: str, other: str) -> None:
    """Exchange a module and one that is called later."""
    one, two = model.get_submodule(name), model.get_submodule(other)
    model.set_submodule(name, two)
    model.set_submodule(other, one)


def unfused(model: nn.Module, name: str) -> None:
    """Scale attention of timm otherwise, in its code that is not fused."""
    attribute(model, name, fused_attn=False, scale=lambda scale: 0.9 * scale)


def interleaved_rows(weight: Tensor) -> Tensor:
    """Order the rows of queries as another layout of rotations does: pairs of neighbours, in heads of 8."""
    return weight.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


def keys_first_rows(weight: Tensor) -> Tensor:
    """Put keys before queries in a matrix of queries, keys and values."""
    queries, keys, values = weight.chunk(3)
    return torch.cat([keys, queries, values])


tanh_gelu: Bug = partial(replaced, by=lambda: nn.GELU("tanh"))
erf_gelu: Bug = partial(replaced, by=nn.GELU)
transposed: Bug = partial(changed, by=lambda weight: weight.T)
rounded: Bug = partial(changed, by=lambda weight: weight.bfloat16().float())
patches: Bug = partial(changed, by=lambda weight: weight.transpose(2, 3))
shifted: Bug = partial(changed, by=lambda weight: weight.roll(1, 0))
scaling: Bug = partial(attribute, scaling=lambda scaling: 0.9 * scaling)
residual: Bug = partial(output, by=lambda values: 1.001 * values)
last_first: Bug = partial(reads, by=lambda values: values.flip(1))
rotations: Bug = partial(changed, by=lambda inverse: inverse ** math.log(5e5, 1e4), of="inv_freq")
head: Bug = partial(changed, by=lambda weight: weight.roll(1, 1))
next_position: Bug = partial(changed, by=lambda ids: ids.roll(-1, 1), of="position_ids")
replicate: Bug = partial(attribute, padding_mode="replicate", _reversed_padding_repeated_twice=[1, 1, 1, 1])


# -- the table ---------------------------------------------------------------------------------------------------------
def _bert_like(body: str) -> dict[str, tuple[Bug, str]]:
    """Return bugs of BERT and RoBERTa, whose blocks have the same names."""
    block = f"{body}.encoder.layer.1"
    return {
        "eps of the embeddings": (eps, f"{body}.embeddings.LayerNorm"),
        "eps": (eps, f"{block}.attention.output.LayerNorm"),
        "tanh for erf": (tanh_gelu, f"{block}.intermediate.intermediate_act_fn"),
        "transposed": (transposed, f"{block}.attention.self.query"),
        "no bias": (without_bias, f"{block}.attention.self.value"),
        "mask in attention": (masked, f"{block}.attention.self"),
        "mask at the top": (mask_at_top, body),
        "scale of attention": (scaling, f"{block}.attention.self"),
        "bf16": (rounded, f"{block}.output.dense"),
        "scale of a residual": (residual, f"{block}.output"),
    }


def _llama_like() -> dict[str, tuple[Bug, str]]:
    """Return bugs of Llama and Qwen2."""
    block = "model.layers.1"
    return {
        "eps": (eps, f"{block}.post_attention_layernorm"),
        "eps of the first norm": (eps, "model.layers.0.input_layernorm"),
        "eps of the last norm": (eps, "model.norm"),
        "gelu for silu": (erf_gelu, f"{block}.mlp.act_fn"),
        "transposed": (transposed, f"{block}.self_attn.o_proj"),
        "mask in attention": (masked, f"{block}.self_attn"),
        "mask at the top": (mask_at_top, "model"),
        "base of rotations": (rotations, "model.rotary_emb"),
        "layout of rotations": (partial(changed, by=interleaved_rows), f"{block}.self_attn.q_proj"),
        "positions": (positions, "model"),  # rotations are relative: no effect
        "head": (head, "lm_head"),
        "scale of attention": (scaling, f"{block}.self_attn"),
        "bf16": (rounded, f"{block}.mlp.down_proj"),
        "scale of a residual": (residual, block),
        "norms exchanged": (
            partial(exchanged, other=f"{block}.post_attention_layernorm"), f"{block}.input_layernorm",
        ),
    }  # fmt: skip


TABLE: dict[str, dict[str, tuple[Bug, str]]] = {
    "vit": {
        "eps": (eps, "vit.layers.1.layernorm_before"),
        "eps of the first norm": (eps, "vit.layers.0.layernorm_before"),
        "tanh for erf": (tanh_gelu, "vit.layers.1.mlp.activation_fn"),
        "transposed": (transposed, "vit.layers.1.attention.v_proj"),
        "no bias": (without_bias, "vit.layers.1.attention.o_proj"),
        "no bias of keys": (without_bias, "vit.layers.1.attention.k_proj"),  # softmax cancels it: no effect
        "positions": (partial(changed, by=lambda p: p.roll(1, 1), of="position_embeddings"), "vit.embeddings"),
        "scale of attention": (scaling, "vit.layers.1.attention"),
        "bf16": (rounded, "vit.layers.2.mlp.fc1"),
        "scale of a residual": (residual, "vit.layers.0"),
        "norms exchanged": (partial(exchanged, other="vit.layers.1.layernorm_after"), "vit.layers.1.layernorm_before"),
        "patches transposed": (patches, "vit.embeddings.patch_embeddings.projection"),
        "head": (head, "classifier"),
    },
    "deit": {
        "eps": (eps, "blocks.1.norm2"),
        "eps of the first norm": (eps, "blocks.0.norm1"),
        "tanh for erf": (tanh_gelu, "blocks.2.mlp.act"),
        "transposed": (transposed, "blocks.1.attn.proj"),
        "no bias": (without_bias, "blocks.1.mlp.fc1"),
        "keys before queries": (partial(changed, by=keys_first_rows), "blocks.1.attn.qkv"),
        "positions": (partial(changed, by=lambda p: p.roll(1, 1), of="pos_embed"), ""),
        "scale of attention": (unfused, "blocks.1.attn"),
        "bf16": (rounded, "blocks.0.attn.qkv"),
        "scale of a residual": (residual, "blocks.1"),
    },
    "swin": {
        "eps": (eps, "layers.1.blocks.0.norm1"),
        "tanh for erf": (tanh_gelu, "layers.0.blocks.1.mlp.act"),
        "no bias": (without_bias, "layers.1.blocks.1.attn.proj"),
        "relative bias": (
            partial(changed, by=lambda table: table.roll(1, 0), of="relative_position_bias_table"),
            "layers.0.blocks.1.attn",
        ),
        "mask of the shift": (partial(changed, by=torch.zeros_like, of="attn_mask"), "layers.0.blocks.1"),
        "merging order": (shifted, "layers.1.downsample.reduction"),
        "bf16": (rounded, "layers.0.blocks.0.mlp.fc2"),
        "scale of attention": (unfused, "layers.1.blocks.0.attn"),
    },
    "convnext": {
        "eps": (eps, "stages.1.blocks.0.norm"),
        "tanh for erf": (tanh_gelu, "stages.1.blocks.0.mlp.act"),
        "layer scale": (partial(changed, by=torch.ones_like, of="gamma"), "stages.2.blocks.0"),
        "no bias": (without_bias, "stages.1.blocks.0.conv_dw"),
        "patches transposed": (patches, "stem.0"),
        "bf16": (rounded, "stages.2.blocks.0.mlp.fc1"),
    },
    "cnn": {
        "eps": (eps, "layer2.0.bn1"),
        "variances": (partial(changed, by=torch.ones_like, of="running_var"), "layer3.0.bn1"),
        "padding": (replicate, "layer1.0.conv1"),
        "another activation": (partial(replaced, by=nn.GELU), "layer2.0.act1"),
        "bf16": (rounded, "layer2.0.conv2"),
        "maximum for mean": (partial(replaced, by=lambda: nn.AdaptiveMaxPool2d(1)), "global_pool.pool"),
        "no bias": (without_bias, "fc"),
    },
    "bert": {
        **_bert_like("bert"),
        "token types": (partial(changed, by=lambda weight: weight.flip(0)), "bert.embeddings.token_type_embeddings"),
        "positions": (next_position, "bert.embeddings"),
        "pools the last token": (last_first, "bert.pooler"),
        "no tanh": (partial(replaced, by=nn.Identity), "bert.pooler.activation"),
        "mask before everything": (mask_at_top, ""),
    },
    "roberta": {
        **_bert_like("roberta"),
        "positions": (partial(attribute, padding_idx=0), "roberta.embeddings"),
        "pools the last token": (last_first, "classifier"),
    },
    "distilbert": {
        "eps": (eps, "distilbert.transformer.layer.1.sa_layer_norm"),
        "tanh for erf": (tanh_gelu, "distilbert.transformer.layer.1.ffn.activation"),
        "transposed": (transposed, "distilbert.transformer.layer.1.attention.q_lin"),
        "no bias": (without_bias, "distilbert.transformer.layer.1.ffn.lin2"),
        "mask in attention": (masked, "distilbert.transformer.layer.1.attention"),
        "mask at the top": (mask_at_top, "distilbert"),
        "positions": (next_position, "distilbert.embeddings"),
        "scale of attention": (scaling, "distilbert.transformer.layer.1.attention"),
        "bf16": (rounded, "distilbert.transformer.layer.2.attention.v_lin"),
        "norms exchanged": (
            partial(exchanged, other="distilbert.transformer.layer.1.output_layer_norm"),
            "distilbert.transformer.layer.1.sa_layer_norm",
        ),
        "activation before the head": (partial(output, by=torch.relu), "pre_classifier"),  # another follows: no effect
    },
    "gpt2": {
        "eps": (eps, "transformer.h.1.ln_2"),
        "eps of the first norm": (eps, "transformer.h.0.ln_1"),
        "erf for tanh": (erf_gelu, "transformer.h.1.mlp.act"),
        "transposed": (transposed, "transformer.h.1.attn.c_proj"),
        "no bias": (without_bias, "transformer.h.1.attn.c_attn"),
        "mask in attention": (masked, "transformer.h.1.attn"),
        "mask at the top": (mask_at_top, "transformer"),
        "positions": (positions, "transformer"),
        "weights of positions": (shifted, "transformer.wpe"),
        "head untied": (partial(changed, by=lambda weight: 1.01 * weight), "lm_head"),
        "scale of attention": (scaling, "transformer.h.1.attn"),
        "bf16": (rounded, "transformer.h.1.mlp.c_fc"),
        "scale of a residual": (residual, "transformer.h.1"),
    },
    "llama": _llama_like(),
    "qwen2": {**_llama_like(), "no bias": (without_bias, "model.layers.1.self_attn.v_proj")},
    "gptneox": {
        "eps": (eps, "gpt_neox.layers.1.input_layernorm"),
        "eps of the first norm": (eps, "gpt_neox.layers.0.input_layernorm"),
        "tanh for erf": (tanh_gelu, "gpt_neox.layers.1.mlp.act"),
        "no bias": (without_bias, "gpt_neox.layers.1.attention.dense"),
        "mask in attention": (masked, "gpt_neox.layers.1.attention"),
        "base of rotations": (rotations, "gpt_neox.rotary_emb"),
        "residual in turn": (partial(attribute, use_parallel_residual=False), "gpt_neox.layers.1"),
        "scale of attention": (scaling, "gpt_neox.layers.1.attention"),
        "head": (head, "lm_head"),
        "bf16": (rounded, "gpt_neox.layers.2.mlp.dense_h_to_4h"),
    },
    "t5": {
        "eps": (eps, "encoder.block.1.layer.0.layer_norm"),
        "eps of the first norm": (eps, "encoder.block.0.layer.0.layer_norm"),
        "eps of the last norm": (eps, "encoder.final_layer_norm"),
        "gelu for relu": (erf_gelu, "encoder.block.1.layer.1.DenseReluDense.act"),
        "transposed": (transposed, "encoder.block.1.layer.0.SelfAttention.o"),
        "buckets": (partial(attribute, relative_attention_num_buckets=16), "encoder.block.0.layer.0.SelfAttention"),
        "mask in attention": (masked, "encoder.block.1.layer.0.SelfAttention"),
        "mask at the top": (mask_at_top, "encoder"),
        "bf16": (rounded, "encoder.block.2.layer.1.DenseReluDense.wo"),
        "scale of embeddings": (residual, "encoder.embed_tokens"),
    },
}
"""Family -> bug -> how it is made, and the name of the module that computes something else."""

BESIDE = {
    "eager": [
        ("bert", "eps"), ("bert", "mask in attention"), ("vit", "tanh for erf"), ("llama", "mask in attention"),
        ("llama", "base of rotations"), ("gpt2", "scale of attention"), ("gptneox", "no bias"),
        ("distilbert", "transposed"),
    ],
    "bfloat16": [
        ("bert", "transposed"), ("bert", "mask in attention"), ("vit", "norms exchanged"),
        ("llama", "base of rotations"), ("gpt2", "positions"), ("roberta", "positions"), ("swin", "merging order"),
        ("t5", "transposed"),
    ],
}  # fmt: skip
"""Honest difference -> bugs that are planted beside it, into a second network that differs from the first anyway."""


@dataclass(frozen=True)
class Planted:
    """A first network, and a second one with a bug in one module."""

    family: str
    bug: str
    a: Adapter
    b: Adapter
    answer: str
    effect: float  # how much the bug changes the outputs of the network in float64, relative to them
    rounding: float  # how much float32 does

    @property
    def counts(self) -> bool:
        """Whether the bug has an effect."""
        return self.effect > EFFECT

    @property
    def shows(self) -> bool:
        """Whether the bug has more effect than rounding to float32."""
        return self.effect > max(EFFECT, self.rounding)


def names() -> list[tuple[str, str, str]]:
    """Return family, bug and honest difference (or nothing) of all planted bugs, also of those without effect."""
    alone = [(family, bug, "") for family, bugs in TABLE.items() for bug in bugs]
    return alone + [(family, bug, beside) for beside, each in BESIDE.items() for family, bug in each]


def plant(family: str, bug: str, beside: str = "") -> Planted:
    """Make a pair of networks of which the second has a bug, and perhaps an honest difference."""
    make, answer = TABLE[family][bug]
    a = first(family)
    model: Any = copy.deepcopy(a.model)
    make(model, answer)
    changed = effect(a, b := loaded(family, model))
    if beside == "eager":
        model.set_attn_implementation("eager")
    elif beside:
        b = loaded(family, model.to(getattr(torch, beside)))
    return Planted(family, f"{bug}, {beside}" if beside else bug, a, b, answer, changed, rounding(family))


@cache
def rounding(family: str) -> float:
    """Return how much the outputs of the first network of a family change if it is computed in float32."""
    return effect(first(family), first(family), torch.float32)


@torch.no_grad()
def effect(a: Adapter, b: Adapter, dtype: torch.dtype = torch.float64) -> float:
    """Return how far the outputs of a network, in a dtype, are from those of the first in float64, on random inputs."""
    gap = size = 0.0
    for feed in random_feeds(a):
        found = []
        for adapter, computed in ((a, torch.float64), (b, dtype)):
            given = {name: x.to(computed) if x.is_floating_point() else x for name, x in feed.arguments.items()}
            with in_dtype(adapter.model, computed):
                value: Any = adapter._run(given)
            value = (value if isinstance(value, Tensor) else next(iter(value.values()))).double()
            found.append(value[feed.mask] if feed.mask is not None and value.dim() == 3 else value)
        gap += float((found[0] - found[1]).square().sum())
        size += float(found[0].square().sum())
    return math.sqrt(gap / size)
