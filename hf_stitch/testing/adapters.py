"""What any adapter must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, NotACutError
from hf_stitch.adapters.cutting.surgery import is_bookkeeping
from hf_stitch.adapters.discovery.verify import same
from hf_stitch.testing._require import require, require_error


@torch.no_grad()
def check_adapter(adapter: Adapter, *batches: Mapping[str, Any]) -> None:
    """Check that an adapter keeps the contract of ``Adapter`` on batches of inputs.

    At every listed cut: ``decode(encode(x))`` is the model's own output bit for bit; the context holds nothing of the
    content; several layers encoded at once are those encoded alone; both halves as modules of their own give the same,
    hold no hook and are smaller than the model. The model is left as it was: mode, gradients, hooks, parameters,
    buffers, random state. What is no cut is refused.

    Args:
        adapter: The adapter.
        *batches: Inputs, best of several sizes, for text ragged and padded on either side.

    Raises:
        AssertionError: It breaks the contract; the message says where.

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
        require(list(together) == list(layers), "encode must return the layers in the order asked for")
        output = adapter.forward(inputs)
        for layer in layers:
            _check_layer(adapter, layer, inputs, together[layer], output)
    require_error(NotACutError, lambda: adapter.encode(batches[0], "no.such.layer"), "an unknown layer")
    after = _state(adapter.model)
    for what in before:
        require(before[what] == after[what], f"{what} of the model must be left as they were")


def _check_layer(adapter: Adapter, layer: str, inputs: Mapping[str, Any], representation: Any, output: Any) -> None:
    explanation = adapter.verify_cut(layer)
    require(explanation.status == "verified", f"{layer} is listed and must be a cut: {explanation}")
    spec = adapter.spec(layer)
    got = representation.spec
    require(
        (got.layout, got.width, got.prefix_tokens) == (spec.layout, spec.width, spec.prefix_tokens),
        f"{layer}: form {spec}, got {got}",
    )
    alone = adapter.encode(inputs, layer)[layer]
    require(torch.equal(alone.values, representation.values), f"{layer}: encoded alone and with others must agree")
    require(
        same(adapter.decode(representation, layer), output),
        f"{layer}: decode(encode(x)) must be the model's own output",
    )
    for name in adapter.interface.content:
        erased, value = representation.context[name], inputs[name]
        values = erased.unique().tolist() if not value.is_floating_point() else []
        allowed = {adapter.interface.filler_id, *adapter.interface.special_ids}
        require(erased.shape == value.shape, f"{layer}: the context must keep the shape of {name}")
        require(
            set(values) <= allowed if values else not bool(erased.any()), f"{layer}: the context must not hold {name}"
        )
    front, back = adapter.front(layer), adapter.back(layer)
    passed = front(**inputs)
    require(torch.equal(passed.values, representation.values), f"{layer}: the front half must give the representation")
    require(same(back(passed), output), f"{layer}: the back half must give the model's own output")
    sizes = [sum(p.numel() for p in part.parameters()) for part in (front, back, adapter.model)]
    require(max(sizes[:2]) <= sizes[2], f"{layer}: halves must not be larger than the model, got {sizes}")
    for half in (front, back):
        require(
            all(is_bookkeeping(hook) for m in half.modules() for hook in _hooks(m)),
            f"{layer}: halves must hold no hooks but those by which transformers collects hidden states",
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
