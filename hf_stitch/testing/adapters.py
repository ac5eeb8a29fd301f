"""Conformance check for adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, CutInfo, NotACutError
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.cutting.surgery import is_bookkeeping
from hf_stitch.adapters.discovery.verify import same
from hf_stitch.representation import Representation
from hf_stitch.testing._require import require, require_error
from hf_stitch.testing.conformance import conformance


@conformance
def check_adapter(adapter: Adapter, *batches: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that an adapter satisfies the contract of ``Adapter`` on batches of inputs.

    The parts, each for every listed cut:

    - ``layers``: layers have distinct names, and ``encode`` returns them in the requested order.
    - ``verified``: ``verify_cut`` verifies each of them.
    - ``spec``: representations have the layout, width and prefix tokens of ``spec``.
    - ``alone``: encoding several layers at once gives the same as encoding them separately.
    - ``exact``: ``decode(encode(x))`` equals the output of the model bit for bit.
    - ``context``: the context contains no content of the input.
    - ``halves``: both halves as separate modules give the same outputs.
    - ``size``: they are not larger than the model.
    - ``hooks``: they have no hooks.
    - ``not_a_cut``: layers that are not cuts raise a ``NotACutError``.
    - ``unmodified``: none of this modifies the model: mode, gradients, hooks, parameters, buffers and random state
      (unless the network itself draws random numbers in eval mode).

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
    run = _Run(adapter, batches)
    yield "layers", run.check_layers
    yield "verified", run.check_verified
    yield "spec", run.check_spec
    yield "alone", run.check_alone
    yield "exact", run.check_exact
    yield "context", run.check_context
    yield "halves", run.check_halves
    yield "size", run.check_size
    yield "hooks", run.check_hooks
    yield "not_a_cut", run.check_not_a_cut
    yield "unmodified", run.check_unmodified


@dataclass(frozen=True)
class _Half:
    """What is known of the halves of a model at a layer: whether they are exact, their sizes and their hooks."""

    front: bool
    back: bool
    sizes: list[int]
    hooked: bool


class _Run:
    """What an adapter computes on batches of inputs, each once, and what it modified in its model."""

    def __init__(self, adapter: Adapter, batches: Sequence[Mapping[str, Any]]) -> None:
        self.adapter, self.batches = adapter, batches
        self.modified: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what is modified in the model."""
        before = _state(self.adapter.model)
        with torch.no_grad():
            yield
        after = _state(self.adapter.model)
        self.modified |= {what for what in before if before[what] != after[what]}

    @cached_property
    def explained(self) -> dict[str, CutInfo]:
        with self.watched():
            return {layer: self.adapter.verify_cut(layer) for layer in self.adapter.layers}

    @cached_property
    def encoded(self) -> list[tuple[Mapping[str, Any], dict[str, Representation], Any]]:
        """Batches with their representations at all layers, and the output of the model."""
        with self.watched():
            layers = self.adapter.layers
            return [
                (inputs, self.adapter.encode(inputs, layers), self.adapter.forward(inputs)) for inputs in self.batches
            ]

    @cached_property
    def alone(self) -> list[tuple[str, bool]]:
        """Layers, and whether they are the same when they are encoded alone."""
        found, encoded = [], self.encoded
        with self.watched():
            for inputs, together, _ in encoded:
                for layer, representation in together.items():
                    alone = self.adapter.encode(inputs, layer)[layer]
                    found.append((layer, torch.equal(alone.values, representation.values)))
        return found

    @cached_property
    def decoded(self) -> list[tuple[str, bool]]:
        """Layers, and whether decoding them gives the output of the model."""
        encoded = self.encoded
        with self.watched():
            return [
                (layer, same(self.adapter.decode(representation, layer), output))
                for _, together, output in encoded
                for layer, representation in together.items()
            ]

    @cached_property
    def halves(self) -> list[tuple[str, _Half]]:
        found, encoded = [], self.encoded
        with self.watched():
            for inputs, together, output in encoded:
                for layer, representation in together.items():
                    front, back = self.adapter.front(layer), self.adapter.back(layer)
                    passed = front(**inputs)
                    right = torch.equal(passed.values, representation.values), same(back(passed), output)
                    sizes = [sum(p.numel() for p in half.parameters()) for half in (front, back, self.adapter.model)]
                    hooks = [hook for half in (front, back) for m in half.modules() for hook in _hooks(m)]
                    found.append((layer, _Half(*right, sizes, not all(map(is_bookkeeping, hooks)))))
        return found

    def check_layers(self) -> None:
        layers = self.adapter.layers
        distinct = len(layers) > 0 and len(set(layers)) == len(layers)
        require(distinct, f"layers must be distinct names, got {layers}")
        for _, together, _ in self.encoded:
            require(list(together) == list(layers), "encode must return the layers in the requested order")

    def check_verified(self) -> None:
        for layer, explanation in self.explained.items():
            require(explanation.status == "verified", f"{layer} is listed and must be a cut: {explanation}")

    def check_spec(self) -> None:
        for _, together, _ in self.encoded:
            for layer, representation in together.items():
                spec, got = self.adapter.spec(layer), representation.spec
                equal = (got.layout, got.width, got.prefix_tokens) == (spec.layout, spec.width, spec.prefix_tokens)
                require(equal, f"{layer}: spec must be {spec}, got {got}")

    def check_alone(self) -> None:
        for layer, equal in self.alone:
            require(equal, f"{layer}: encoding it alone and with other layers must agree")

    def check_exact(self) -> None:
        for layer, equal in self.decoded:
            require(equal, f"{layer}: decode(encode(x)) must equal the output of the model")

    def check_context(self) -> None:
        interface = self.adapter.interface
        allowed = {interface.filler_id, *interface.special_ids}
        for inputs, together, _ in self.encoded:
            for layer, representation in together.items():
                for name in interface.content:
                    erased, value = representation.context[name], inputs[name]
                    values = erased.unique().tolist() if not value.is_floating_point() else []
                    require(erased.shape == value.shape, f"{layer}: the context must keep the shape of {name}")
                    require(
                        set(values) <= allowed if values else not bool(erased.any()),
                        f"{layer}: the context must not contain {name}",
                    )

    def check_halves(self) -> None:
        for layer, half in self.halves:
            require(half.front, f"{layer}: the front half must give the representation")
            require(half.back, f"{layer}: the back half must give the output of the model")

    def check_size(self) -> None:
        for layer, half in self.halves:
            fits = max(half.sizes[:2]) <= half.sizes[2]
            require(fits, f"{layer}: halves must not be larger than the model, got {half.sizes}")

    def check_hooks(self) -> None:
        for layer, half in self.halves:
            require(
                not half.hooked,
                f"{layer}: halves must have no hooks except those that transformers uses to collect hidden states",
            )

    def check_not_a_cut(self) -> None:
        with self.watched():
            require_error(
                NotACutError, lambda: self.adapter.encode(self.batches[0], "no.such.layer"), "an unknown layer"
            )

    def check_unmodified(self) -> None:
        _ = self.explained, self.encoded, self.alone, self.decoded, self.halves
        with suppress(AssertionError):
            self.check_not_a_cut()
        for what in sorted(self.modified):
            allowed = what == "random numbers" and self._draws()
            require(allowed, f"{what} of the model must not be modified")

    def _draws(self) -> bool:
        """Whether the network itself draws random numbers in eval mode, as older speech models do, in vain."""
        state = torch.get_rng_state()
        with torch.no_grad(), evaluating(self.adapter.model):
            self.adapter.model(**{**self.adapter.interface.options, **self.adapter.inputs(self.batches[0])})
        return not torch.equal(torch.get_rng_state(), state)


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
