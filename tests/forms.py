"""Forms of one network: wrapped, compiled, adapted, pruned, parametrised, quantised, offloaded, …

Each form computes what a plain network computes, its :func:`twin`: the network of the same seed, or what the way out
makes of the form (``prune.remove``, ``remove_parametrizations``, ``dequantize``).
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import return_and_correct_aliasing

import hf_stitch
from hf_stitch import Adapter

from tests.tiny_networks import LANGUAGE, SIZE, build, plain_tokenizer  # isort: skip

EXACT = (
    "plain", "wrapped", "compiled", "compiled in place", "parallel", "peft of zeros", "offloaded", "on disk",
    "half pruned", "spectral norm", "orthogonal", "old spectral norm", "tensor subclass",
)  # fmt: skip
"""Forms that compute the same bits as their twins."""

ROUNDED = ("bf16", "fp16", "int8")
"""Forms that compute in a lower precision."""

FORMS = (
    *EXACT, *ROUNDED, "lora", "weight norm", "old weight norm", "layer of integers", "peft", "peft-merged",
    "peft of another kind",
)  # fmt: skip
"""Forms that are taken."""

REFUSED = ("TorchScript", "TorchScript inside", "exported", "compiled block", "prompts", "on meta", "sharded")
"""Forms that are refused when they are loaded."""

TARGETS = {
    "bert": ("query", "value"), "llama": ("q_proj", "v_proj"), "vit": ("q_proj", "v_proj"), "cnn": ("conv1", "conv2"),
}  # fmt: skip
"""The layers that a form changes in each family."""

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


class Int8(Tensor):
    """A weight of bytes with a scale for each row, as torchao makes them: a wrapper of tensors that torch can see."""

    def __new__(cls, integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8:
        made: Any = Tensor._make_wrapper_subclass(cls, integers.shape, dtype=dtype, device=integers.device)
        return made

    def __init__(self, integers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.integers, self.scales = integers, scales

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["integers", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["integers"], inner["scales"], dtype)

    def __repr__(self, **_: Any) -> str:
        return f"Int8({tuple(self.shape)})"

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales, weight.dtype)

    def dequantize(self) -> Tensor:
        return self.integers.to(self.dtype) * self.scales.to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and isinstance(args[1], Int8):
            return func(args[0], args[1].dequantize(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Move, copy and cast; whatever computes needs ``dequantize``."""
        aten, one, given = torch.ops.aten, args[0], dict(kwargs or {})
        if func is aten._to_copy.default:
            return cls(one.integers.to(given.get("device")), one.scales, given.get("dtype") or one.dtype)
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return return_and_correct_aliasing(func, args, given, cls(func(one.integers), func(one.scales), one.dtype))
        raise NotImplementedError(f"Int8 has no {func}")


class LinearOfIntegers(nn.Linear):
    """A linear layer whose weight is integers, and whose scales are a plain attribute, as those of bitsandbytes."""

    def forward(self, x: Tensor) -> Tensor:
        scales: Any = self.SCB
        return nn.functional.linear(x, self.weight.to(x.dtype) * scales.to(x.dtype), self.bias)

    def dequantize(self) -> Tensor:
        scales: Any = self.SCB
        return self.weight.to(scales.dtype) * scales


def form_of(family: str, form: str, seed: int = 0) -> Any:
    network = build(family, seed)
    targets = _targets(family, network)
    match form:
        case "plain":
            return network
        case "wrapped":
            if hasattr(network, "config"):
                network.config.use_cache = False
            return Wrapper(network)
        case "compiled":
            return torch.compile(network, backend="eager")
        case "compiled in place":
            network.compile(backend="eager")
            return network
        case "parallel":
            return nn.DataParallel(network)
        case "bf16":
            return network.to(torch.bfloat16)
        case "fp16":
            return network.half()
        case "pruned":  # of masks that hide nothing, which hooks apply
            for _, module in targets:
                prune.identity(module, "weight")
        case "half pruned":
            for _, module in targets:
                prune.l1_unstructured(module, "weight", 0.3)
                prune.l1_unstructured(module, "weight", 0.3)
        case "weight norm" | "spectral norm" | "orthogonal":
            with torch.random.fork_rng():
                torch.manual_seed(seed)  # of the first vectors of the spectral norm
                for _, module in targets:
                    getattr(parametrizations, form.replace(" ", "_"))(module)
        case "old weight norm":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                for _, module in targets:
                    nn.utils.weight_norm(module)
        case "old spectral norm":
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                for _, module in targets:
                    nn.utils.spectral_norm(module)
        case "offloaded":
            import accelerate

            return accelerate.cpu_offload(network, torch.device("cpu"))
        case "on disk":
            import accelerate

            return accelerate.disk_offload(network, _folder(family, seed), torch.device("cpu"))
        case "int8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.ao.quantization and the tensors of it are deprecated
                return torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
        case "tensor subclass":
            for _, module in targets:
                module.weight = nn.Parameter(Int8.of(module.weight.data), requires_grad=False)
        case "layer of integers":
            for _, module in targets:
                weight = Int8.of(module.weight.data)
                module.weight = nn.Parameter(weight.integers, requires_grad=False)
                module.SCB, module.__class__ = weight.scales, LinearOfIntegers
        case "lora" | "merged":
            for name, module in targets:
                part = LoRA(module, *_low_rank(name, module))
                network.set_submodule(name, part.merged() if form == "merged" else part)
            return Wrapper(network) if form == "lora" else network
        case "peft" | "peft-merged" | "peft of zeros" | "peft of another kind" | "prompts":
            return _of_peft(network, form, targets)
        case _:
            return _of_refused(family, network, form)
    return network.eval()


def _of_peft(network: Any, form: str, targets: list[tuple[str, Any]]) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = [name for name, _ in targets]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers 5.24 renamed
        if form == "prompts":
            config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
        elif form == "peft of another kind":  # its forward adds to the loss
            config = peft.AdaLoraConfig(target_modules=names, init_r=RANK, target_r=1, total_step=10)
        else:
            config = peft.LoraConfig(target_modules=names, r=RANK, lora_alpha=RANK)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(network, config)
    if form in ("peft", "peft-merged"):
        for name, module in targets:
            part, (a, b) = network.get_submodule(name), _low_rank(name, module)
            part.base_layer.weight.data -= b @ a
            part.lora_A["default"].weight.data, part.lora_B["default"].weight.data = a, b
    return (model.merge_and_unload() if form == "peft-merged" else model).eval()


def _of_refused(family: str, network: Any, form: str) -> Any:
    ids = torch.arange(4, 16).reshape(2, 6)
    name, linear = _targets(family, network)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match form:
            case "TorchScript":
                return torch.jit.trace(network, ids, strict=False)
            case "TorchScript inside":
                network.set_submodule(name, torch.jit.script(linear))
            case "exported":
                return torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),)).module()
            case "compiled block":
                block = name.partition(".attention")[0]
                network.set_submodule(block, torch.compile(network.get_submodule(block), backend="eager"))
            case "on meta":
                return network.to("meta")
            case "sharded":  # as by FSDP, in each of its processes
                linear.weight.device_mesh = object()
            case _:
                raise ValueError(form)
    return network


def twin(family: str, form: str, seed: int = 0) -> nn.Module:
    """Build the plain network that computes what a form does."""
    if form not in OWN:
        return build(family, seed)
    network: Any = form_of(family, form, seed)
    if form == "peft of another kind":
        return network.merge_and_unload().eval()  # type: ignore[no-any-return]
    for _, module in _targets(family, network):
        if form == "half pruned":
            prune.remove(module, "weight")
        elif form == "old spectral norm":
            nn.utils.remove_spectral_norm(module)
        elif form == "tensor subclass":
            module.weight = nn.Parameter(module.weight.dequantize())
        elif form == "layer of integers":
            module.weight, module.__class__ = nn.Parameter(module.dequantize()), nn.Linear
            del module.SCB
        else:
            parametrize.remove_parametrizations(module, "weight")
    return network


OWN = (
    "half pruned", "spectral norm", "orthogonal", "old spectral norm", "tensor subclass", "layer of integers",
    "peft of another kind",
)  # fmt: skip
"""Forms whose twin is not the network of the same seed, but what the way out makes of them."""


def load_form(family: str, form: str, seed: int = 0) -> Adapter:
    """Load a network in one of the forms into an adapter, with its tokenizer."""
    return adapter_of(family, form_of(family, form, seed))


def adapter_of(family: str, model: Any) -> Adapter:
    if family in LANGUAGE:
        ids = {"example_inputs": {"input_ids": torch.arange(4, 16).reshape(2, 6)}} if isinstance(model, Wrapper) else {}
        return hf_stitch.load(model, processor=plain_tokenizer(), **ids)
    example = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return hf_stitch.load(model, example_inputs=example)


@cache
def loaded(family: str, form: str, seed: int = 0) -> Adapter:
    """As :func:`load_form`; cached, because adapters do not change models."""
    return load_form(family, form, seed)


def layer_in(adapter: Adapter, layer: str) -> str:
    """Return the name of a layer of the plain network in one of its forms."""
    return f"inner.{layer}" if isinstance(adapter.model, Wrapper) else layer


@cache
def _folder(family: str, seed: int) -> str:
    """Return a folder of weights that are offloaded to the disk, which is there until the process ends."""
    place = tempfile.TemporaryDirectory()
    KEPT.append(place)
    return place.name


KEPT: list[Any] = []


def _targets(family: str, network: nn.Module) -> list[tuple[str, Any]]:
    ends, kinds = TARGETS[family], (nn.Linear, nn.Conv2d)
    return [(n, m) for n, m in network.named_modules() if n.endswith(ends) and isinstance(m, kinds)]


def _low_rank(name: str, module: nn.Linear) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    outputs, inputs = module.weight.shape
    a, b = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
    return 0.1 * a, 0.1 * b
