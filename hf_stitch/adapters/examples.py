"""Checks and names of the example inputs for finding and verifying the cuts of a network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.plugins import plugin_of
from hf_stitch.printing import see

SAMPLES: dict[str, tuple[Any, ...]] = {
    "text": ("a good film", "We waited for an hour, and then the play was over: what a pity!"),
    "RGB image": (Image.new("RGB", (48, 40), "red"), Image.new("RGB", (64, 96), "blue")),
    "grey image": (Image.new("L", (48, 40), 200), Image.new("L", (64, 96), 100)),
}
"""Samples of each kind, to test which kinds a user-defined function accepts."""


class ExampleError(ValueError):
    """Raised if the example inputs of a network are missing or do not match its forward.

    Args:
        message: Text of the error.
        model: The network.
    """

    def __init__(self, message: str, model: nn.Module) -> None:
        super().__init__(message)
        self.model = model

    def __str__(self) -> str:
        text, plugin = super().__str__(), plugin_of(*self.model.modules())
        return text + (f". For {plugin}" if plugin and "hf_stitch_" not in text else "") + see("no-example")


def named(model: nn.Module, example: Any, options: Mapping[str, Any], content: str | None = None) -> dict[str, Any]:
    """Return example inputs as keyword arguments of the forward of a network."""
    kind, signature = type(model).__name__, inspect.signature(model.forward)
    names = _names(model)
    if isinstance(example, Tensor):
        example = {content or first_argument(model): example}
    elif isinstance(example, (tuple, list)):
        if len(example) > len(names):
            raise ExampleError(
                f"example_inputs contain {len(example)} values, but the forward of {kind} accepts {len(names)}: "
                f"{', '.join(names)}",
                model,
            )
        example = dict(zip(names, example, strict=False))
    elif not isinstance(example, Mapping):
        raise ExampleError(
            "example_inputs must be a tensor, or the arguments of the forward as a tuple or as a dict, got "
            f"{type(example).__name__}",
            model,
        )
    try:
        signature.bind(**{**{n: v for n, v in options.items() if n in signature.parameters}, **example})
    except TypeError as error:
        accepted = ", ".join(str(p) for p in signature.parameters.values())
        raise ExampleError(
            f"example_inputs ({', '.join(example) or 'none'}) do not match the forward of {kind}, ({accepted}), which "
            f"receives all arguments by name: {error}",
            model,
        ) from error
    return dict(example)


def _outputs_of(processor: Any) -> dict[str, list[Any]]:
    """Return the outputs of a processor on :data:`SAMPLES`, for each kind that it accepts."""
    outputs = {}
    for kind, samples in SAMPLES.items():
        with suppress(Exception):  # it accepts another kind of samples
            outputs[kind] = [processor(deepcopy(sample)) for sample in samples]
    return {kind: pair for kind, pair in outputs.items() if all(isinstance(x, (Tensor, Mapping)) for x in pair)}


def kinds_of(processor: Any) -> set[str]:
    """Return the kinds of raw samples that a processor accepts, of ``text`` and ``image``."""
    return {kind.rpartition(" ")[2] for kind in _outputs_of(processor)}


def example_of(model: nn.Module, processor: Any) -> Any:
    """Return example inputs of a network in the shapes that its processor returns, with random numbers for floats."""
    outputs, name = _outputs_of(processor), type(model).__name__
    kinds = {kind.rpartition(" ")[2] for kind in outputs}
    advice = f"load {name} with hf_stitch.load(net, example_inputs=batch, processor=…)"
    if len(kinds) != 1:
        accepts = "accepts both texts and images" if kinds else "accepts neither texts nor images"
        raise ExampleError(
            f"the kind of samples of {name} is unknown because its processor= {accepts}: {advice}, and with "
            "task='text-classification' or 'image-classification' if it is a classifier",
            model,
        )
    batches = {shapes: batch for samples in outputs.values() for shapes, batch in [_stack(samples, model)] if batch}
    runs = [batch for batch in batches.values() if len(batches) == 1 or _runs(model, batch)]
    if len(runs) != 1:
        shapes = "; ".join(f"of {kind}s {_stack(samples, model)[0]}" for kind, samples in outputs.items())
        remedy = "pad or truncate them to one length" if kinds == {"text"} else f"resize them to one size, or {advice}"
        raise ExampleError(
            f"the processor= must return tensors of one shape that {name} accepts, got shapes {shapes}: {remedy}", model
        )
    return runs[0]


def _stack(samples: list[Any], model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """Return the shapes of samples and, if all have the same shape, their batch."""
    by_name = [sample if isinstance(sample, Mapping) else {first_argument(model): sample} for sample in samples]
    shapes = {tuple(value.shape): None for sample in by_name for value in sample.values() if isinstance(value, Tensor)}
    text = ", ".join(map(str, shapes)) or "none"
    if len(shapes) != 1:
        return text, {}
    (device, dtype), random = place_of(model), torch.Generator().manual_seed(0)
    batch = {name: torch.stack([sample[name] for sample in by_name]) for name in by_name[0]}
    return text, {
        name: (torch.randn(v.shape, generator=random).to(dtype) if v.is_floating_point() else v).to(device)
        for name, v in batch.items()
    }


def _runs(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    try:
        with torch.no_grad(), evaluating(model):
            model(**batch)
    except Exception:  # the code of the network can raise anything
        return False
    return True


def check_runs(model: Any) -> None:
    """Check that a network is in a form that can be run, traced and cut."""
    if not isinstance(model, nn.Module):
        return
    kind, offloaded = type(model).__name__, any(hasattr(module, "_hf_hook") for module in model.modules())
    if type(model).__module__ == "peft.peft_model":
        raise ValueError(f"{kind} adds prompts or selects adapters in its forward: load peft_model.get_base_model()")
    for name, module in model.named_modules():
        if reason := _reason_not_cut(module) or (LACKING if lacks_weights(module) and not offloaded else ""):
            raise ValueError(f"{f'module {name!r} of ' if name else ''}{kind} {reason}")


def _reason_not_cut(module: Any) -> str:
    """Return the reason why a module cannot be traced or replaced, with a remedy; empty if it can."""
    graph = getattr(module, "graph", None)
    nodes = graph.nodes if isinstance(graph, torch.fx.Graph) else ()
    exported = any(isinstance(node.target, torch._ops.OpOverload) for node in nodes)
    if exported or isinstance(module, torch.jit.ScriptModule):
        return f"is {'an exported program' if exported else 'TorchScript'}: pass the original nn.Module"
    if isinstance(module, torch._dynamo.OptimizedModule):
        return "is wrapped by torch.compile, which renames its weights: compile it in place, module.compile()"
    lazy = any(map(is_lazy, (*module.parameters(False), *module.buffers(False))))
    return "has lazy weights without a shape: run it once on a batch of its inputs" if lazy else ""


LACKING = (
    "has weights that are not in this process: sharded (FSDP, tensor parallelism, ZeRO-3) or on the meta device. Load "
    "all weights with load_state_dict(…, assign=True) in one process; in training, use DDP"
)


def lacks_weights(module: nn.Module) -> bool:
    """Return whether direct weights of a module are missing in this process, wholly or in part."""
    tensors = (*module.parameters(False), *module.buffers(False))
    is_partial = any(value.is_meta or hasattr(value, "device_mesh") or hasattr(value, "ds_id") for value in tensors)
    return is_partial or type(module).__name__ == "FullyShardedDataParallel"


def first_argument(model: nn.Module) -> str:
    """Return the name of the first argument of the forward of a model."""
    return _names(model)[0]


def arguments_of(model: nn.Module, content: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments that a network accepts in addition to its content.

    A forward with ``**kwargs`` may pass arguments on to the forward of a base class. If none of these forwards names
    the content, the arguments of the first inner module that names it are added.
    """
    arguments: dict[str, inspect.Parameter] = {}
    extended = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    for forward in (model.forward, *extended):
        parameters = inspect.signature(forward).parameters
        arguments |= {name: p for name, p in parameters.items() if name not in arguments}
        if not _has_kwargs(parameters):
            return arguments
    if content not in arguments:
        inner = (inspect.signature(module.forward).parameters for module in model.modules())
        arguments |= next((parameters for parameters in inner if content in parameters), {})
    return arguments


def passes_on(model: nn.Module) -> bool:
    """Return whether the forward of a network has ``**kwargs``."""
    return _has_kwargs(inspect.signature(model.forward).parameters)


def _has_kwargs(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _names(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a forward; if it names none, of the first inner method that does."""
    for module in model.modules():
        for method in (module.forward, getattr(module, "call", None)):  # Keras layers delegate to call
            parameters = inspect.signature(method).parameters.values() if method else ()
            if names := [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
                return names
    return list(inspect.signature(model.forward).parameters)
