"""Writes GGUF files, as llama.cpp reads them: a header, typed metadata, a table of tensors, and their values."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import transformers as hf
from torch import nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

ALIGNMENT, VERSION = 32, 3
TENSORS = {
    "model.embed_tokens.": "token_embd.", "model.embedding_norm.": "token_embd_norm.", "lm_head.": "output.",
    "model.layers.": "blk.", ".operator_norm.": ".attn_norm.", ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.", ".self_attn.v_proj.": ".attn_v.", ".self_attn.out_proj.": ".attn_output.",
    ".self_attn.q_layernorm.": ".attn_q_norm.", ".self_attn.k_layernorm.": ".attn_k_norm.",
    ".feed_forward.w1.": ".ffn_gate.", ".feed_forward.w3.": ".ffn_up.", ".feed_forward.w2.": ".ffn_down.",
    ".conv.": ".shortconv.",
}  # fmt: skip
"""Part of the name of a weight of LFM2 in transformers -> in llama.cpp."""

CHARACTERS = [*bytes_to_unicode().values(), "<pad>", "<end>"]


def lfm2(*, layers: int = 3) -> Any:
    return hf.Lfm2ForCausalLM(
        hf.Lfm2Config(
            vocab_size=len(CHARACTERS), hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, block_auto_adjust_ff_dim=False, max_position_embeddings=64,
            layer_types=["conv", *["full_attention"] * (layers - 1)], tie_word_embeddings=False,
            pad_token_id=len(CHARACTERS) - 2, eos_token_id=len(CHARACTERS) - 1, bos_token_id=None,
        )
    ).eval()  # fmt: skip


def metadata_of(config: Any) -> dict[str, Any]:
    """Return what llama.cpp writes of the config of an LFM2, and its tokenizer."""
    heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    return {
        "general.architecture": "lfm2",
        "lfm2.context_length": config.max_position_embeddings,
        "lfm2.embedding_length": config.hidden_size,
        "lfm2.feed_forward_length": config.intermediate_size,
        "lfm2.block_count": config.num_hidden_layers,
        "lfm2.attention.head_count": config.num_attention_heads,
        "lfm2.attention.head_count_kv": heads,
        "lfm2.attention.layer_norm_rms_epsilon": config.norm_eps,
        "lfm2.shortconv.l_cache": config.conv_L_cache,
        "lfm2.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "lfm2",
        "tokenizer.ggml.tokens": CHARACTERS,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [*[1] * (len(CHARACTERS) - 2), 3, 3],
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }


def write(model: nn.Module, file: Path) -> None:
    tensors = {_renamed(name): value.detach().float().contiguous() for name, value in model.state_dict().items()}
    tensors = {name: v.squeeze(1) if name.endswith("shortconv.conv.weight") else v for name, v in tensors.items()}
    metadata = metadata_of(model.config)
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    head += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    data = b""
    for name, value in tensors.items():
        sizes = value.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, len(data))
        data += _aligned(value.numpy().tobytes())
    file.write_bytes(_aligned(head) + data)


def _renamed(name: str) -> str:
    for there, here in TENSORS.items():
        name = name.replace(there, here, 1)
    return name.replace(".shortconv.shortconv.", ".shortconv.conv.")


def _aligned(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    """Return a value after the number of its type: 4 integers, 6 numbers, 8 texts, 9 lists."""
    if isinstance(value, list):
        kind, each = (4, lambda item: struct.pack("<I", item)) if value and isinstance(value[0], int) else (8, _text)
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(each, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
