"""Which runtimes compute the same as transformers: families × variants of their configs × runtimes (``make ports``).

Every network is tiny and random, saved by transformers, read or converted by the runtime, and compared by ``same`` on
random inputs, also past the attention window. A default config hides faults (a RoPE base that a runtime does not read
is often its default), so every config key that ports lose has a variant. The record is ``docs/ports.json``; a second
run continues where the first one stopped, and a new version of a runtime starts it anew.

``python plugins/hf-stitch-versions/benchmarks/ports.py table mlx openvino`` · ``faults`` plants the faults of
``port_faults.toml`` in MLX or Keras copies · ``pages`` writes one page per runtime.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_stitch_versions import same
from hf_stitch_versions.sameness.result import Sameness
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_stitch

HERE = Path(__file__).parent
DOCS = Path(__file__).parents[3] / "docs"
RECORD = DOCS / "ports.json"

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
"""Config of the tiny networks; a family ignores keys that it does not have."""

DECODERS = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3",
    "cohere", "cohere2", "smollm3", "starcoder2", "granite", "helium", "glm", "glm4", "stablelm", "gpt_neox", "gpt2",
    "gpt_bigcode", "nemotron", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "exaone4",
    "ernie4_5", "seed_oss", "apertus", "gpt_oss", "hunyuan_v1_dense", "ministral3", "minimax", "mamba", "lfm2",
    "nanochat",
]  # fmt: skip
ENCODERS = ["bert", "roberta", "distilbert", "xlm-roberta", "electra", "albert"]
BODIES = [*ENCODERS, "esm"]
FAMILIES = {
    "mlx": DECODERS,
    "openvino": [*DECODERS, "falcon", "opt", "bloom", "gpt_neo", "mpt", *ENCODERS],
    "ctranslate2": [
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox",
        "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "bert", "distilbert", "roberta", "xlm-roberta",
    ],
    "gguf": ["llama", "qwen2", "qwen3", "phi3", "gemma2", "stablelm", "starcoder2", "nemotron"],
    "keras": [
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen2_moe",
        "qwen3_moe", "gpt2", "gpt_oss", "smollm3", "esm", *ENCODERS,
    ],
}  # fmt: skip

PACKAGES = {
    "mlx": "mlx-lm", "openvino": "openvino", "ctranslate2": "ctranslate2", "gguf": "transformers", "keras": "keras-hub",
}  # fmt: skip
BEFORE = {"original_max_position_embeddings": 64}


def rope(values: Mapping[str, Any], **new: Any) -> dict[str, Any] | None:
    """Return other RoPE parameters; ``None`` for families without, and with one table per type of layer."""
    own = values.get("rope_parameters")
    if not own or "rope_theta" not in own:
        return None
    new = {key: value(own["rope_theta"]) if callable(value) else value for key, value in new.items()}
    kept = {key: value for key, value in own.items() if key != "type"}  # an older name of rope_type
    return {"rope_parameters": {**kept, "rope_type": "default", **new}}


def keys(values: Mapping[str, Any], **new: Any) -> dict[str, Any] | None:
    """Return other values of the keys that a family has; ``None`` without the first one."""
    return {key: value for key, value in new.items() if key in values} if next(iter(new)) in values else None


def first(values: Mapping[str, Any], pattern: str, new: Callable[[Any], Any]) -> dict[str, Any] | None:
    """Return another value of the first key that matches."""
    return next(
        ({key: new(value)} for key, value in values.items() if re.fullmatch(pattern, key) and value is not None), None
    )


VARIANTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "default": lambda values: {},
    "config of 4.x": lambda values: {} if rope(values) else None,
    "RoPE base": lambda values: rope(values, rope_theta=lambda base: 500000.0 if base == 10000 else 10000.0),
    "linear scaling": lambda values: rope(values, rope_type="linear", factor=4.0),
    "llama3 scaling": lambda values: rope(
        values, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **BEFORE
    ),
    "yarn scaling": lambda values: rope(values, rope_type="yarn", factor=4.0, **BEFORE),
    "window": lambda values: keys(values, sliding_window=8, use_sliding_window=True),
    "activation": lambda values: first(
        values, "hidden_act|hidden_activation|activation_function",
        lambda own: "gelu" if own != "gelu" else "gelu_pytorch_tanh",
    ),
    "eps": lambda values: first(values, ".*(norm_eps|norm_epsilon)", lambda eps: 1e-3),
    "biases": lambda values: first(values, "attention_bias", lambda bias: not bias),
    "head size": lambda values: {"head_dim": 16} if values.get("head_dim") == 8 else None,
    "soft cap": lambda values: keys(values, final_logit_softcapping=2.0),
    "bfloat16": lambda values: {"dtype": "bfloat16"},
    "tied head": lambda values: first(values, "tie_word_embeddings", lambda tied: not tied),
}  # fmt: skip


OF_ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "layer_norm_eps": 1e-5}  # as in all published checkpoints

OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # one for each layer
    "gemma3_text": {"num_hidden_layers": 6},  # MLX reads the layer that ends a pattern of six
    "cohere2": {"num_hidden_layers": 4},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "roberta": OF_ROBERTA,
    "xlm-roberta": OF_ROBERTA,
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},  # even
}
"""Config values of families that do not run with the common ones."""


def base(family: str) -> dict[str, Any]:
    """Return the config of a family; texts are shorter than its window, except in the variant of windows."""
    window = AutoConfig.for_model(family).to_dict().get("sliding_window")
    own = {**BASE, **({"sliding_window": 100_000} if window else {}), **OWN.get(family, {})}
    return {key: value for key, value in own.items() if (family, key) != ("falcon", "head_dim")}  # it is computed


LEFT_OUT = {
    *((runtime, "config of 4.x") for runtime in ("openvino", "gguf", "ctranslate2")),  # they read no such config
    ("gguf", "llama3 scaling"),  # to_gguf does not write it
}


def built(family: str, changes: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a tiny random network; weights of norms and biases are random as well."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**base(family), **changes})
    kind = AutoModel if family in BODIES else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    if size > 5_000_000:
        raise ValueError(f"{family} has {size:,} weights with this config")
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.to(getattr(torch, changes.get("dtype", "float32")))


def adapter_of(model: Any) -> hf_stitch.Adapter:
    """Return an adapter with example inputs."""
    ids = torch.randint(3, BASE["vocab_size"], (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(model.config, "type_vocab_size"):  # GPT-2 has no such table, and adds the embeddings of words
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return hf_stitch.load(model, example_inputs=inputs)


# -- conversions -----------------------------------------------------------------------------------------------
def converted(runtime: str, model: Any, folder: Path) -> str:
    """Save a network, convert it if the runtime cannot read it, and return its name for ``same``."""
    model.save_pretrained(folder)
    return f"{runtime}:{CONVERTERS[runtime](model, folder)}"


def to_openvino(model: Any, folder: Path) -> Path:
    """Convert a network with the names of its modules, in float32."""
    import openvino

    forward, ids = model.forward, torch.randint(3, BASE["vocab_size"], (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    name = "last_hidden_state" if not hasattr(model, "lm_head") and "CausalLM" not in type(model).__name__ else "logits"
    options = {} if name == "last_hidden_state" else {"use_cache": False}
    model.forward = lambda input_ids, attention_mask: getattr(
        forward(input_ids=input_ids, attention_mask=attention_mask, **options), name
    )
    try:
        openvino.save_model(
            openvino.convert_model(model, example_input=inputs), folder / "model.xml", compress_to_fp16=False
        )
    finally:
        del model.forward
    return folder / "model.xml"


def to_keras(model: Any, folder: Path) -> Path:
    """Save the body of a network in a network with a head, as most checkpoints are; keras-hub expects its names."""
    if model.config.model_type in ENCODERS:
        whole = AutoModelForMaskedLM.from_config(model.config)
        setattr(whole, whole.base_model_prefix, model)
        whole.save_pretrained(folder)
    return folder


def to_ctranslate2(model: Any, folder: Path) -> Path:
    """Convert a network; the converter reads a tokenizer too."""
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"t{i}": i for i in range(4, BASE["vocab_size"])}}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), pad_token="<pad>", bos_token="<s>",
        eos_token="</s>", unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip
    TransformersConverter(str(folder)).convert(str(folder / "converted"), force=True)
    return folder / "converted"


def to_gguf(model: Any, folder: Path) -> Path:
    """Write a GGUF file with the keys that llama.cpp's converter writes for these families."""
    import gguf

    config = model.config.to_dict()
    arch = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama" if arch == "mistral" else arch)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == writer.arch), config["num_hidden_layers"]
    )
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    table = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_pad_token_id(config["pad_token_id"])
    written = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps, "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps, "norm_eps": writer.add_layer_norm_eps,
        "sliding_window": writer.add_sliding_window, "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
    }  # fmt: skip
    for key, add in written.items():
        if config.get(key):
            add(config[key])
    writer.add_rope_freq_base(table["rope_theta"])
    writer.add_rope_dimension_count(int(size * table.get("partial_rotary_factor", 1.0)))
    if table["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(table["rope_type"]))
        writer.add_rope_scaling_factor(table["factor"])
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"GGUF has no name for {name}")
        if writer.arch == "llama" and re.search(r"(q|k)_proj", name):
            value = (
                value.unflatten(0, (heads if "q_proj" in name else groups, 2, -1)).transpose(1, 2).reshape(value.shape)
            )
        if arch in ("gemma2", "nemotron") and "norm" in name and name.endswith("weight"):
            value = value + 1
        writer.add_tensor(new, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


CONVERTERS: dict[str, Callable[[Any, Path], Path]] = {
    "mlx": lambda model, folder: folder, "keras": to_keras, "openvino": to_openvino,
    "ctranslate2": to_ctranslate2, "gguf": to_gguf,
}  # fmt: skip


# -- the table -------------------------------------------------------------------------------------------------
def described(sameness: Sameness) -> dict[str, Any]:
    """Return what the table needs of a result."""
    found = sameness.findings[0] if sameness.findings else None
    return {
        "verdict": "equal" if sameness.is_same else "quantized" if sameness.quantized else "differs",
        "ratio": max((row.ratio for row in sameness.modules), default=0.0),
        "module": found.module if found else "", "seen_at": found.seen_at if found else "",
        "begins": next((cause.module for cause in sameness.causes), ""), "agreed": sameness.agreed,
        "weights": list(found.weights) if found else [], "causes": [str(cause) for cause in sameness.causes],
        "kinds": [cause.kind for cause in sameness.causes], "explained": sameness.explained,
        "modules": len(sameness.modules), "restored": found.restored if found else None,
    }  # fmt: skip


def compared(model: Any, name: str, python: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Compare a network with its port."""
    start = time.perf_counter()
    try:
        row = described(same(adapter_of(model), name, python=python, progress=False, **options))
    except Exception as error:
        row = {"verdict": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def table(runtimes: list[str], python: Mapping[str, str], only: list[str]) -> None:
    """Compare all that the record lacks or has of another version, and keep each result at once."""
    kept = read()
    for runtime in runtimes:
        asked = f"from importlib.metadata import version; print(version({PACKAGES[runtime]!r}))"
        release = subprocess.check_output([python.get(runtime, sys.executable), "-c", asked], text=True).strip()
        families = {each: AutoConfig.for_model(each, **base(each)).to_dict() for each in only or FAMILIES[runtime]}
        for variant, change in VARIANTS.items():
            for family, values in families.items():
                key = f"{runtime}/{family}/{variant}"
                changes = change(values)
                if changes is None or (runtime, variant) in LEFT_OUT or kept.get(key, {}).get("version") == release:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    old = variant == "config of 4.x"
                    row = {**of(runtime, family, changes, Path(folder), python, old), "version": release}
                write({**read(), key: row})
                print(
                    key,
                    *(row.get(part, "") for part in ("verdict", "reason", "ratio", "causes", "seconds")),
                    flush=True,
                )
                gc.collect()


def of(
    runtime: str, family: str, changes: Mapping[str, Any], folder: Path, python: Mapping[str, str], old: bool
) -> dict[str, Any]:  # fmt: skip
    """Return one row of the table; with ``old``, the runtime reads a config that transformers 4 wrote."""
    try:
        model = built(family, changes)
        model(input_ids=torch.randint(3, BASE["vocab_size"], (2, 7)))
    except Exception as error:
        return {"verdict": "no such network", "reason": f"{type(error).__name__}: {error}"[:200]}
    try:
        name = converted(runtime, model, folder)
        if old:
            as_before(folder / "config.json")
    except Exception as error:
        return {"verdict": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
    return compared(model, name, python)


def as_before(file: Path) -> None:
    """Write the RoPE parameters of a config as transformers 4 did, which most runtimes read."""
    config = json.loads(file.read_text("utf-8"))
    table = config.pop("rope_parameters")
    config |= {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}
    config |= {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    file.write_text(json.dumps({**config, "rope_scaling": None}), "utf-8")


def read() -> dict[str, Any]:
    """Return the record."""
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}


def write(kept: Mapping[str, Any]) -> None:
    """Replace the record."""
    new = RECORD.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
    os.replace(new, RECORD)


# -- planted faults --------------------------------------------------------------------------------------------
CODE = """
import mlx.core as mx, mlx.nn as nn, sys
from mlx_lm.models import {family} as original
ModelArgs = original.ModelArgs

def through(module, change):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {{"__call__": lambda self, *args, **kwargs: change(
        lambda *a, **k: kind.__call__(self, *a, **k), *args, **kwargs)}})

def half(call, x, *rest):
    return call(x.astype(mx.float16), *rest).astype(x.dtype)

def gate(call, x):
    return call(x.astype(mx.bfloat16)).astype(x.dtype)

def heads(number):
    def change(call, x):
        return call(x.reshape(*x.shape[:2], number, -1).swapaxes(2, 3).reshape(x.shape))
    return change

def late(state):
    def change(call, x, *rest, offset=0, **kwargs):
        state[0] += 1
        return call(x, *rest, offset=offset + state[0] % 2, **kwargs)
    return change

class Model(original.Model):
    def __init__(self, args):
        super().__init__(args)
        fault = "{fault}"
        if fault == "no_mask":
            original.create_attention_mask = lambda *args, **kwargs: None
        for name, module in list(self.named_modules()):
            leaf = name.rpartition(".")[2]
            if fault == "attention_scale" and hasattr(module, "scale") and leaf == "self_attn":
                module.scale *= 2 ** .5
            if fault == "missing_norm" and leaf == "post_attention_layernorm":
                through(module, lambda call, x: x)
            if fault == "query_position" and leaf == "rope":
                through(module, late([0]))
            if fault == "norm_in_half" and "norm" in leaf:
                module.weight = module.weight
                through(module, lambda call, x: call(x.astype(mx.float16)).astype(mx.float16).astype(x.dtype))
            if fault == "gate_in_half" and leaf == "gate_proj":
                through(module, lambda call, x: call(x).astype(mx.bfloat16).astype(x.dtype))
            if fault == "head_order" and leaf == "o_proj":
                through(module, heads(args.num_attention_heads))
            if fault == "no_residual" and leaf.isdigit():
                module.mlp_output = []
                through(module.mlp, lambda call, x, kept=module.mlp_output: (kept.append(call(x)), kept[-1])[1])
                through(module, lambda call, *a, kept=module.mlp_output, **k: (call(*a, **k), kept[-1])[1])
"""


def planted(kind: str, fault: str, change: str, family: str, model: Any, folder: Path) -> bool:
    """Plant a fault in a copy of a network; return whether the network has what it changes."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    if kind == "config":
        if change == "rope_theta":
            theta = config["rope_parameters"]["rope_theta"]
            config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 50000.0 if theta != 50000.0 else 10000.0
        elif config.get(change) is None:
            return False
        else:
            config[change] = 1e-3 if "eps" in change else 1 << 20
            if change == "sliding_window":
                config.pop("layer_types", None)
    elif kind == "code":
        config["model_file"] = "faulty.py"
        (folder / "faulty.py").write_text(
            CODE.format(family={"mistral": "llama"}.get(family, family), fault=fault), "utf-8"
        )
        if fault == "missing_norm" and not any("post_attention_layernorm" in name for name, _ in model.named_modules()):
            return False
    else:
        from safetensors.torch import load_file, save_file

        state = load_file(folder / "model.safetensors")
        original = dict(state)
        size, found = config["head_dim"], False
        for name, value in original.items():
            new = value
            if fault == "interleaved" and re.search(r"\.(q|k)_proj\.", name):
                new = value.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).reshape(value.shape)
            elif fault == "no_bias" and name.endswith("proj.bias"):
                new = torch.zeros_like(value)
            elif fault == "norm_offset" and "norm" in name:
                new = value + 1
            elif fault == "half":
                new = value.half().float()
            elif fault == "swapped_gate" and "gate_proj" in name:
                new = original[name.replace("gate_proj", "up_proj")]
            elif fault == "swapped_gate" and "up_proj" in name:
                new = original[name.replace("up_proj", "gate_proj")]
            elif (
                fault == "transposed"
                and "layers.1.self_attn.o_proj.weight" in name
                and value.shape[0] == value.shape[1]
            ):
                new = value.T
            found = found or new is not value
            state[name] = new.contiguous().clone()
        if not found:
            return False
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config), "utf-8")
    return True


def faults(runtime: str, python: Mapping[str, str], only: list[str]) -> None:
    """Plant every fault in every family, and print whether the module and the kind are right."""
    listed = tomllib.loads((HERE / "port_faults.toml").read_text("utf-8"))
    right = total = 0
    for family, options in listed.pop("families")[runtime].items():
        config = {"tie_word_embeddings": False, **{key: value for key, value in options.items() if key != "seed"}}
        for kind, group in listed.items():
            for fault, expected in group.items():
                if (only and fault not in only and family not in only) or (kind == "code" and runtime != "mlx"):
                    continue
                # MLX does not apply the window of Mistral and Gemma 2, so only one fault is about windows.
                window = {} if fault == "window" or "sliding_window" not in config else {"sliding_window": 100_000}
                model = built(family, config | window, options["seed"])
                with tempfile.TemporaryDirectory() as folder:
                    if not planted(kind, fault, expected.get("change", ""), family, model, Path(folder)):
                        continue
                    row = compared(model, f"{runtime}:{folder}", python, trust=kind == "code")
                named = [row[part] for part in ("module", "seen_at", "begins") if row.get(part)]
                named = named or [row.get("agreed", "")]
                kinds = row.get("kinds", []) or (["weights"] if row.get("weights") else [])
                good = any(re.search(expected["module"], name) for name in named) and expected["kind"] in kinds
                if row["verdict"] == "equal":
                    print(f"{family} {kind}.{fault}: without effect in this runtime", flush=True)
                    continue
                right, total = right + good, total + 1
                shown = [row.get(part) for part in ("causes", "explained", "ratio", "reason", "seconds")]
                print(f"{family} {kind}.{fault}: {'right' if good else 'WRONG'}", named, kinds, *shown, flush=True)
    print(f"{right} of {total}")


# -- pages -----------------------------------------------------------------------------------------------------
TITLES = {
    "mlx": "MLX (mlx-lm)", "openvino": "OpenVINO", "ctranslate2": "CTranslate2", "gguf": "GGUF, read by transformers",
    "keras": "Keras (keras-hub)",
}  # fmt: skip


def page(runtime: str, found: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """Return the page of a runtime, from its rows by family and variant."""
    variants = [name for name in VARIANTS if any(key[1] == name for key in found)]
    families = list(dict.fromkeys(family for family, _ in found))
    versions = ", ".join(sorted({row["version"] for row in found.values() if row.get("version")}))
    counts = {
        verdict: sum(row["verdict"] == verdict for row in found.values()) for verdict in ("equal", "differs", "refused")
    }
    proved = sum(row["verdict"] == "differs" and row["explained"] for row in found.values())
    lines = [
        f"# Ports to {TITLES[runtime]}", "",
        f"Written by `make ports` with version {versions} and transformers {transformers.__version__}. Each cell is a "
        "tiny random network of a family (two layers, width 32) with one changed config value, compared by "
        "[`same`](../how-to/port.md) on 17 or more random texts. A number is the largest difference of all compared "
        "outputs, in units of the effect of rounding; up to 4, a network counts as equal. Bold cells differ without an "
        "error, and name the kind of fault. Empty cells: no such key, or not compared.", "",
        f"{counts['equal']} networks are equal, {counts['differs']} differ ({proved} with a proved cause), "
        f"{counts['refused']} were refused.",
        "", "| family | " + " | ".join(variants) + " |", "|" + "---|" * (len(variants) + 1),
    ]  # fmt: skip
    for family in families:
        lines.append("| " + " | ".join([family, *(cell(found.get((family, variant))) for variant in variants)]) + " |")
    differing = {key: row for key, row in found.items() if row["verdict"] == "differs"}
    if differing:
        lines += [
            "",
            "## What differs",
            "",
            "| family, variant | first module | times the null | cause |",
            "|---|---|---|---|",
        ]
        for (family, variant), row in differing.items():
            cause = (
                "; ".join(row["causes"]) + ("" if row["explained"] or not row["causes"] else " (likely)") or "not found"
            )
            where = row["module"] or row["seen_at"] or "the outputs"
            lines.append(f"| {family}, {variant} | `{where}` | {row['ratio']:,.0f} | {cause} |")
    refused = {key: row for key, row in found.items() if row["verdict"] == "refused"}
    if refused:
        lines += ["", "## What was refused", "", "| family, variant | error |", "|---|---|"]
        for (family, variant), row in refused.items():
            reason = re.sub(r"/\S*/", "", row["reason"]).replace("|", "/").replace("\n", " ")[:140]
            lines.append(f"| {family}, {variant} | `{reason.replace('`', '')}` |")
    return "\n".join([*lines, ""])


def cell(row: Mapping[str, Any] | None) -> str:
    """Return the text of a cell."""
    if row is None or row["verdict"] == "no such network":
        return ""
    if row["verdict"] == "differs":
        return f"**{', '.join(dict.fromkeys(row['kinds'])) or 'differs'}**"
    return f"{row['ratio']:.2g}" if row["verdict"] == "equal" else row["verdict"]


def pages() -> None:
    """Write one page per runtime."""
    (DOCS / "ports").mkdir(exist_ok=True)
    kept = read()
    for runtime in dict.fromkeys(key.partition("/")[0] for key in kept):
        rows = {
            (family, variant): row
            for key, row in kept.items()
            for each, family, variant in [key.split("/")]
            if each == runtime
        }
        (DOCS / "ports" / f"{runtime}.md").write_text(page(runtime, rows), "utf-8")


def main() -> None:
    """Run one of the jobs."""
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=["table", "faults", "pages"])
    parser.add_argument("runtimes", nargs="*", default=["mlx", "openvino", "gguf", "ctranslate2"])
    parser.add_argument("--only", nargs="+", default=[], help="families, or names of faults")
    parser.add_argument("--python", action="append", default=[], help="RUNTIME=INTERPRETER")
    options = parser.parse_args()
    python = dict(each.split("=", 1) for each in options.python)
    if options.job == "table":
        table(options.runtimes, python, options.only)
    elif options.job == "faults":
        faults(options.runtimes[0], python, options.only)
    else:
        pages()


if __name__ == "__main__":
    main()
