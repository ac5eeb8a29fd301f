"""Forms of one network, which all compute the same: wrapped, compiled, pruned, with LoRA, in bfloat16, in int8, …"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter

from tests.tiny_networks import build, plain_tokenizer  # isort: skip

EXACT = ("plain", "wrapped", "compiled")
"""Forms that compute the same bits as the network."""

FORMS = (
    *EXACT, "pruned", "offloaded", "lora", "merged", "weight-norm", "bf16", "fp16", "int8", "peft", "peft-merged"
)  # fmt: skip

ROUNDED = ("bf16", "fp16", "int8")
"""Forms that compute in a lower precision."""

TARGETS = {"bert": ("query", "value"), "llama": ("q_proj", "v_proj")}
"""The layers that LoRA changes in each family."""

RANK = 2


class Wrapper(nn.Module):
    """A module that passes on whatever it gets, like a ``PeftModel``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class LoRA(nn.Module):
    """A linear layer whose weight is divided into a frozen one and one of low rank."""

    def __init__(self, whole: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base_layer = copy.deepcopy(whole)
        self.base_layer.weight.data -= b @ a
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T

    def merged(self) -> nn.Linear:
        whole = copy.deepcopy(self.base_layer)
        whole.weight.data += self.lora_B.data @ self.lora_A.data
        return whole


def form_of(family: str, form: str, seed: int = 0) -> nn.Module:
    """Build a network in one of the forms, which all compute the same up to the rounding of their dtype."""
    network = build(family, seed)
    match form:
        case "plain":
            return network
        case "wrapped":
            return Wrapper(network)
        case "compiled":
            compiled: Any = torch.compile(network, backend="eager")
            return compiled
        case "bf16":
            return network.to(torch.bfloat16)
        case "fp16":
            return network.half()
        case "pruned":  # of masks that hide nothing, which hooks apply
            for _, module in _targets(family, network):
                nn.utils.prune.identity(module, "weight")
            return network
        case "weight-norm":
            for _, module in _targets(family, network):
                nn.utils.parametrizations.weight_norm(module)
            return network
        case "offloaded":
            import accelerate

            return accelerate.cpu_offload(network, torch.device("cpu"))
        case "int8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.ao.quantization and the tensors of it are deprecated
                quantised: nn.Module = torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
                return quantised
        case "lora" | "merged":
            for name, module in _targets(family, network):
                part = LoRA(module, *_low_rank(name, module))
                network.set_submodule(name, part.merged() if form == "merged" else part)
            return Wrapper(network) if form == "lora" else network
        case "peft" | "peft-merged":
            peft = pytest.importorskip("peft")
            names = {name: _low_rank(name, module) for name, module in _targets(family, network)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers 5.24 renamed
                config = peft.LoraConfig(target_modules=list(names), r=RANK, lora_alpha=RANK)
                model = peft.get_peft_model(network, config)
            for name, (a, b) in names.items():
                part = network.get_submodule(name)
                part.base_layer.weight.data -= b @ a
                part.lora_A["default"].weight.data, part.lora_B["default"].weight.data = a, b
            return (model.merge_and_unload() if form == "peft-merged" else model).eval()
    raise ValueError(form)


def load_form(family: str, form: str, seed: int = 0) -> Adapter:
    """Load a network in one of the forms into an adapter, with its tokenizer."""
    model = form_of(family, form, seed)
    needed = {"example_inputs": {"input_ids": torch.arange(4, 16).reshape(2, 6)}} if isinstance(model, Wrapper) else {}
    return hf_stitch.load(model, processor=plain_tokenizer(), **needed)


@cache
def loaded(family: str, form: str, seed: int = 0) -> Adapter:
    """As :func:`load_form`; cached, because adapters do not change models."""
    return load_form(family, form, seed)


def layer_in(adapter: Adapter, layer: str) -> str:
    """Return the name of a layer of the plain network in one of its forms."""
    return f"inner.{layer}" if isinstance(adapter.model, Wrapper) else layer


def _targets(family: str, network: nn.Module) -> list[tuple[str, nn.Linear]]:
    ends = TARGETS[family]
    return [(n, m) for n, m in network.named_modules() if n.endswith(ends) and isinstance(m, nn.Linear)]


def _low_rank(name: str, module: nn.Linear) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    outputs, inputs = module.weight.shape
    return torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
