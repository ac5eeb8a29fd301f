"""Conformance check for adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, NotACutError
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.cutting.surgery import is_bookkeeping
from hf_stitch.adapters.discovery.verify import same
from hf_stitch.testing._require import require, require_error


@torch.no_grad()
def check_adapter(adapter: Adapter, *batches: Mapping[str, Any]) -> None:
    """Check that an adapter satisfies the contract of ``Adapter`` on batches of inputs.

    At every listed cut: ``decode(encode(x))`` equals the output of the model bit for bit; the context contains no
    content of the input; encoding several layers at once gives the same as encoding them separately; both halves as
    separate modules give the same outputs, have no hooks and are not larger than the model. The model is not modified:
    mode, gradients, hooks, parameters, buffers and random state (unless the network itself draws random numbers in
    eval mode). Layers that are not cuts raise an error.

    Args:
        adapter: The adapter.
        *batches: Inputs, preferably of several sizes; for text with different lengths and padding on either side.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> check_adapter(hf_stitch.load(net, example_inputs=torch.randn(2, 4)), {"input": torch.randn(3, 4)})
    """
    before = _state(adapter.model)
    layers = adapter.layers
    require(len(layers) > 0 and len(set(layers)) == len(layers), f"layers must be distinct names, got {layers}")
    for inputs in batches:
        together = adapter.encode(inputs, layers)
        require(list(together) == list(layers), "encode must return the layers in the requested order")
        output = adapter.forward(inputs)
        for layer in layers:
            _check_layer(adapter, layer, inputs, together[layer], output)
    require_error(NotACutError, lambda: adapter.encode(batches[0], "no.such.layer"), "an unknown layer")
    after = _state(adapter.model)
    for what in before:
        kept = before[what] == after[what] or (what == "random numbers" and _draws(adapter, batches[0]))
        require(kept, f"{what} of the model must not be modified")


def _draws(adapter: Adapter, inputs: Mapping[str, Any]) -> bool:
    """Whether the network itself draws random numbers in eval mode, as older speech models do without using them."""
    state = torch.get_rng_state()
    with evaluating(adapter.model):
        adapter.model(**{**adapter.interface.options, **adapter.inputs(inputs)})
    return not torch.equal(torch.get_rng_state(), state)


def _check_layer(adapter: Adapter, layer: str, inputs: Mapping[str, Any], representation: Any, output: Any) -> None:
    explanation = adapter.verify_cut(layer)
    require(explanation.status == "verified", f"{layer} is listed and must be a cut: {explanation}")
    spec = adapter.spec(layer)
    got = representation.spec
    require(
        (got.layout, got.width, got.prefix_tokens) == (spec.layout, spec.width, spec.prefix_tokens),
        f"{layer}: spec must be {spec}, got {got}",
    )
    alone = adapter.encode(inputs, layer)[layer]
    require(
        torch.equal(alone.values, representation.values), f"{layer}: encoding it alone and with other layers must agree"
    )
    require(
        same(adapter.decode(representation, layer), output),
        f"{layer}: decode(encode(x)) must equal the output of the model",
    )
    for name in adapter.interface.content:
        erased, value = representation.context[name], inputs[name]
        values = erased.unique().tolist() if not value.is_floating_point() else []
        allowed = {adapter.interface.filler_id, *adapter.interface.special_ids}
        require(erased.shape == value.shape, f"{layer}: the context must keep the shape of {name}")
        require(
            set(values) <= allowed if values else not bool(erased.any()),
            f"{layer}: the context must not contain {name}",
        )
    front, back = adapter.front(layer), adapter.back(layer)
    passed = front(**inputs)
    require(torch.equal(passed.values, representation.values), f"{layer}: the front half must give the representation")
    require(same(back(passed), output), f"{layer}: the back half must give the output of the model")
    sizes = [sum(p.numel() for p in part.parameters()) for part in (front, back, adapter.model)]
    require(max(sizes[:2]) <= sizes[2], f"{layer}: halves must not be larger than the model, got {sizes}")
    for half in (front, back):
        require(
            all(is_bookkeeping(hook) for m in half.modules() for hook in _hooks(m)),
            f"{layer}: halves must have no hooks except those that transformers uses to collect hidden states",
        )


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [module.training for module in model.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "values": [
            (name, value._version, value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()
        ],
        "random numbers": torch.get_rng_state().tolist(),
    }
