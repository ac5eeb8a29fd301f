"""Tiny random networks of every type in transformers and timm.

Sizes are reduced by the names of config fields. :data:`EXCEPTIONS` lists the types with sizes that depend on each other
in a way that the names do not show.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import timm
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

LAYERS = 4

SUITES = {
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    "text": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification"),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
}
"""Suite -> name of the table of its model types, and of its Auto class."""

COUNTS = """
num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
num_blocks depth conf_num_hidden_layers num_self_attends_per_block
"""
"""Fields that count layers. Lists with one entry per layer are shortened to the new number."""

NAMES = {
    64: """
        hidden_size d_model n_embd dim projection_dim embedding_size attention_hidden_size lru_width
        word_embed_proj_dim d_latents emb_dim cross_attention_hidden_size projection_size out_hidden_size
        pooler_output_size input_embedding_size output_embedding_size backbone_hidden_size mamba_d_ssm
        hidden_size_per_layer_input prediction_head_size classifier_proj_size image_size
    """,
    128: """
        intermediate_size encoder_ffn_dim decoder_ffn_dim n_inner ffn_dim d_ff ffn_hidden_size dff dim_ff mlp_dim
        hidden_dim expert_ffn_hidden_size feed_forward_size dense_intermediate_size shared_expert_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp
        max_position_embeddings n_positions max_target_positions max_source_positions
    """,
    32: "moe_intermediate_size d_inner qk_head_dim",
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads num_cross_attention_heads
        linear_num_value_heads linear_num_heads index_n_heads conf_num_attention_heads
        num_experts n_routed_experts num_local_experts moe_num_experts
    """,
    2: """
        num_key_value_heads num_kv_heads linear_num_key_heads kv_n_heads num_query_groups
        num_experts_per_tok moe_topk moe_k moe_top_k num_experts_per_token
    """,
    16: """
        head_dim d_kv v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim q_lora_rank dim_head
        kv_lora_rank attention_head_size o_lora_rank query_pre_attn_scalar global_head_dim
        qk_rope_head_dim qk_nope_head_dim linear_head_dim mamba_d_state state_size ssm_state_size num_latents
    """,
    8: "rotary_dim mamba_chunk_size chunk_size",
    1: "n_group topk_group num_expert_group first_k_dense_replace",
    200: """
        vocab_size vocab_size_per_layer_input entity_vocab_size decoder_vocab_size shape_vocab_size
        pronunciation_vocab_size unpadded_vocab_size audio_vocab_size
    """,
}
SIZES = {name: size for size, names in {**NAMES, LAYERS: NAMES[LAYERS] + COUNTS}.items() for name in names.split()}
"""Config field -> its maximum value."""

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OWN_IDS = ("vocab_size", *SPECIAL)
"""Fields that keep the special ids of a type's config, where some are ``None``."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": HYBRID, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "efficientnet": {"hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0},
    "funnel": {"block_sizes": [2, 2, 2]},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": HYBRID, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID, "num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 64},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "mistral4": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "reformer": {
        "hidden_size": 64,
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (8, 16),
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
"""Model type -> config arguments that override the rules: dependent sizes, or defaults that do not run."""


def types(suite: str) -> dict[str, str]:
    """Return the model types of a suite, with the name of the model class of each."""
    table = getattr(modeling_auto, SUITES[suite][0])
    return {kind: class_name if isinstance(class_name, str) else class_name[0] for kind, class_name in table.items()}


def config(kind: str, keep: tuple[str, ...] = ()) -> Any:
    """Create a tiny transformers config.

    Args:
        kind: Model type, e.g. ``bert``.
        keep: Fields that keep their default.

    Returns:
        The config.
    """
    exceptions = EXCEPTIONS.get(kind, {})
    return _shrunk(transformers.CONFIG_MAPPING[kind](**exceptions), keep, exceptions)


def _shrunk(default: Any, keep: tuple[str, ...], exceptions: dict[str, Any]) -> Any:
    """Create a config of the same class with smaller sizes, including nested configs."""
    values = dict(exceptions)
    for name, value in vars(default).items():
        if name in keep or name.startswith("_"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            values[name] = _shrunk(value, keep, exceptions.get(name, {}))
        elif name not in exceptions and isinstance(value, int) and not isinstance(value, bool):
            limit = SIZES.get(name)
            if limit is not None and value > limit:
                values[name] = limit
    if hasattr(default, "vocab_size"):
        values |= {name: value for name, value in SPECIAL.items() if name not in exceptions and name not in keep}
    kind = type(default)
    heads = getattr(default, "num_attention_heads", None)
    if getattr(default, "num_key_value_heads", None) == heads and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, value in vars(default).items():
        if name == "depths" and name not in values:
            values[name] = type(value)(min(blocks, 2) for blocks in value)
    before = {getattr(default, name) for name in COUNTS.split() if isinstance(getattr(default, name, None), int)}
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, (list, tuple)) and len(value) in before and len(value) > LAYERS and name not in values
    }
    try:
        shrunk = kind(**values)
    except Exception:  # lists with one entry per layer are not derived: shorten them too
        shrunk = kind(**values, **{name: _some(value) for name, value in lists.items()})
    left = {name: _some(value) for name, value in lists.items() if len(getattr(shrunk, name, None) or ()) == len(value)}
    return kind(**values, **left) if left else shrunk


def _some(entries: Any) -> Any:
    """Shorten a list to :data:`LAYERS` entries: the first ones, then the kinds of entries that are missing."""
    kinds = list(dict.fromkeys(entries)) if isinstance(entries[0], (str, int, float)) else []
    missing = [kind for kind in kinds if kind not in entries[:LAYERS]][: LAYERS - 1]
    return type(entries)([*entries[: LAYERS - len(missing)], *missing])


def shaken(model: nn.Module) -> nn.Module:
    """Add noise to every weight and switch the model to eval mode.

    Weights that are initialised as zeros, or as the identity, would hide an inexact cut.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):  # keeps the scale of the signal at any depth
                nn.init.kaiming_normal_(module.weight, generator=generator)
    return model.eval()


@torch.no_grad()
def calibrate(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Set the statistics of every BatchNorm from a batch, so that the signal does not vanish in deep networks."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.training, norm.momentum = True, 1.0
    try:
        model(**inputs)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.training, norm.momentum = False, momentum


Attempt = Callable[[], tuple[nn.Module, Any]]
"""Creates a model and example inputs (``None``: the adapter invents them). It may raise."""


def attempts(suite: str, kind: str, kept_ids: tuple[str, ...] = ()) -> Iterator[Attempt]:
    """Yield attempts to create a model of a type, the smallest first.

    Args:
        suite: One of :data:`SUITES`.
        kind: Model type, e.g. ``bert``.
        kept_ids: Fields that keep their default, e.g. :data:`OWN_IDS`.
    """
    model_class: Any = getattr(transformers, types(suite)[kind])

    def attempt(keep: tuple[str, ...]) -> tuple[nn.Module, Any]:
        small = config(kind, keep)
        if not isinstance(small, model_class.config_class):  # the model class takes one of the nested configs
            parts = [part for part in vars(small).values() if isinstance(part, model_class.config_class)]
            small = parts[0] if parts else small
        if suite == "causal" and hasattr(small, "is_decoder"):
            small.is_decoder = True
        torch.manual_seed(0)
        model = shaken(model_class._from_config(small))
        return model, example(model)

    yield from (functools.partial(attempt, (*kept_ids, *keep)) for keep in ((), ("image_size",)))


def example(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return small images for image models without an image size in the config, and ``None`` for all other models."""
    name = getattr(model, "main_input_name", "")
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    if name == "pixel_values" and not (
        isinstance(getattr(vision, "image_size", None), (int, list, tuple)) or hasattr(vision, "num_patches")
    ):
        return {name: torch.randn(2, 3, 64, 64, generator=generator)}
    return None


def smallest(module: str) -> str:
    """Return the name of the model with the fewest parameters in a module of ``timm.models``."""
    counts: dict[str, int] = {}
    for name in timm.list_models(module=module):
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            try:
                counts[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            except Exception:  # some models cannot be built on the meta device
                continue
    if not counts:
        counts = {
            name: sum(p.numel() for p in timm.create_model(name).parameters())
            for name in timm.list_models(module=module)
        }
    return min(counts, key=lambda name: (counts[name], name))


def timm_attempts(name: str, sizes: tuple[int, ...] = (64, 56, 128)) -> Iterator[Attempt]:
    """Yield attempts to create a timm model with random weights for small inputs, and finally for its default input."""

    def attempt(size: int | None, **arguments: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = shaken(timm.create_model(name, **arguments))
        return model, None if size is None else torch.randn(2, 3, size, size)

    for size in sizes:
        yield functools.partial(attempt, size, img_size=size)
        yield functools.partial(attempt, size)
    yield functools.partial(attempt, None)
