"""Conformance checks for adapters, overrides of architectures and rewrites of networks."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, NotACutError, Override, load
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.surgery import is_bookkeeping
from hf_stitch.adapters.discovery.verify import same
from hf_stitch.adapters.overrides import full_name, override_of
from hf_stitch.adapters.rewriting import Rewrite, rewrite, rewrites_of
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.options import did_you_mean
from hf_stitch.registry import Entry, registries
from hf_stitch.representation import Representation
from hf_stitch_testing.kit import Configuration, Kit, must, require, require_error, skip_unless
from hf_stitch_testing.parts import conformance

Inputs = Mapping[str, Any]


@conformance
def check_adapter(adapter: Adapter, *batches: Mapping[str, Any]) -> _AdapterKit:
    """Check that an adapter satisfies the contract of ``Adapter`` on batches of inputs.

    The parts, each for every listed cut:

    - ``layers``: layers have distinct names, and ``encode`` returns them in the requested order.
    - ``verified``: ``verify_cut`` verifies each layer.
    - ``spec``: representations have the layout, width and prefix tokens of ``spec``.
    - ``alone``: joint and separate encoding of layers are equal.
    - ``exact``: ``decode(encode(x))`` equals the output of the model bit for bit.
    - ``context``: the context does not contain content of the input.
    - ``halves``: both halves as separate modules give the same outputs.
    - ``size``: halves are not larger than the model.
    - ``hooks``: halves do not have hooks.
    - ``not_a_cut``: layers that are not cuts raise a ``NotACutError``.
    - ``unmodified``: the parts do not modify the model: mode, gradients, hooks, parameters, buffers and random state.
      Networks that draw random numbers in eval mode may change the random state.

    Args:
        adapter: The adapter.
        *batches: Inputs, preferably of several sizes; for text with different lengths and padding on either side.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> check_adapter(hf_stitch.load(net, example_inputs=torch.randn(2, 4)), {"input": torch.randn(3, 4)})
    """
    return _AdapterKit(adapter, batches)


class _AdapterKit(Kit):
    """Parts for adapters; each part records modifications of the model for the last part, ``unmodified``."""

    def __init__(self, adapter: Adapter, batches: Sequence[Inputs]) -> None:
        self.adapter, self.batches = adapter, batches
        self.ran, self.modified = set[str](), set[str]()

    def _run(self, name: str) -> None:
        before = _model_state(self.adapter.model)
        try:
            with torch.no_grad():
                super()._run(name)
        finally:
            after = _model_state(self.adapter.model)
            self.modified |= {aspect for aspect in before if before[aspect] != after[aspect]}
            self.ran.add(name)

    @cached_property
    def encoded(self) -> list[tuple[Inputs, dict[str, Representation], Any]]:
        """Batches with their representations at all layers, and the output of the model."""
        encode, forward, layers = self.adapter.encode, self.adapter.forward, self.adapter.layers
        return [(inputs, encode(inputs, layers), forward(inputs)) for inputs in self.batches]

    def _cases(self) -> Iterator[tuple[str, Representation, Inputs, Any]]:
        for inputs, representations, output in self.encoded:
            for layer, representation in representations.items():
                yield layer, representation, inputs, output

    def _halves(self, layer: str) -> tuple[nn.Module, nn.Module]:
        return self.adapter.front(layer), self.adapter.back(layer)

    def layers(self) -> None:
        layers = self.adapter.layers
        require(len(layers) > 0 and len(set(layers)) == len(layers), f"layers must be distinct names, got {layers}")
        in_order = all(list(representations) == list(layers) for _, representations, _ in self.encoded)
        require(in_order, "encode must return the layers in the requested order")

    def verified(self) -> None:
        for layer in self.adapter.layers:
            verdict = self.adapter.verify_cut(layer)
            require(verdict.status == "verified", f"listed layer {layer} must be a cut, got {verdict}")

    def spec(self, layer: str, encoded: Representation, inputs: Inputs, output: Any) -> None:
        spec, got = self.adapter.spec(layer), encoded.spec
        equal = (got.layout, got.width, got.prefix_tokens) == (spec.layout, spec.width, spec.prefix_tokens)
        require(equal, f"{layer}: spec must be {spec}, got {got}")

    def alone(self, layer: str, encoded: Representation, inputs: Inputs, output: Any) -> None:
        equal = torch.equal(self.adapter.encode(inputs, layer)[layer].values, encoded.values)
        require(equal, f"{layer}: joint and separate encoding must agree")

    def exact(self, layer: str, encoded: Representation, inputs: Inputs, output: Any) -> None:
        equal = same(self.adapter.decode(encoded, layer), output)
        require(equal, f"{layer}: decode(encode(x)) must equal the output of the model")

    def context(self, layer: str, encoded: Representation, inputs: Inputs, output: Any) -> None:
        interface = self.adapter.interface
        allowed = {interface.filler_id, *interface.special_ids}
        for name in interface.content:
            erased, value = encoded.context[name], inputs[name]
            require(erased.shape == value.shape, f"{layer}: the context must keep the shape of {name}")
            values = erased.unique().tolist() if not value.is_floating_point() else []
            is_blank = set(values) <= allowed if values else not bool(erased.any())
            require(is_blank, f"{layer}: the context must not contain {name}")

    def halves(self) -> None:
        for layer in self.adapter.layers:
            front, back = self._halves(layer)
            for inputs, representations, output in self.encoded:
                front_output = front(**inputs)
                equal = torch.equal(front_output.values, representations[layer].values)
                require(equal, f"{layer}: the front half must return the representation")
                require(same(back(front_output), output), f"{layer}: the back half must return the output of the model")

    def size(self) -> None:
        for layer in self.adapter.layers:
            modules = (*self._halves(layer), self.adapter.model)
            *halves, whole = (sum(p.numel() for p in module.parameters()) for module in modules)
            require(max(halves) <= whole, f"{layer}: halves must not be larger than the model, got {halves} of {whole}")

    def hooks(self) -> None:
        allowed = "halves must not have hooks, except transformers' hooks for hidden states"
        for layer in self.adapter.layers:
            hooks = [hook for half in self._halves(layer) for module in half.modules() for hook in _hooks(module)]
            require(all(map(is_bookkeeping, hooks)), f"{layer}: {allowed}")

    def not_a_cut(self) -> None:
        encode = self.adapter.encode
        require_error(NotACutError, lambda: encode(self.batches[0], "no.such.layer"), "an unknown layer")

    def unmodified(self) -> None:
        for name, part in self:
            if name not in {*self.ran, "unmodified"}:
                with suppress(AssertionError):
                    part()
        for aspect in sorted(self.modified):
            require(aspect == "random numbers" and self._draws(), f"{aspect} of the model must not be modified")

    def _draws(self) -> bool:
        """Return whether the network draws random numbers in eval mode, as older speech models do without effect."""
        state = torch.get_rng_state()
        with evaluating(self.adapter.model):
            self.adapter.model(**{**self.adapter.interface.options, **self.adapter.inputs(self.batches[0])})
        return not torch.equal(torch.get_rng_state(), state)


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _model_state(model: nn.Module) -> dict[str, Any]:
    tensors = model.state_dict(keep_vars=True).items()
    return {
        "modes": [module.training for module in model.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "values": [(name, value._version, value.data_ptr()) for name, value in tensors],
        "random numbers": torch.get_rng_state().tolist(),
    }


@conformance
def check_override(override: Override, model: nn.Module, *batches: Mapping[str, Any]) -> _OverrideKit:
    """Check that an override satisfies the contract of ``Override`` on a network of its class.

    The parts:

    - ``config``: the class is a subclass of ``Override`` without required arguments.
    - ``stateless``: the override does not store anything about a network.
    - ``pure``: the override does not modify the network: modes, parameters and buffers.
    - ``options``: the options of the forward pass are a mapping from names to JSON values.
    - ``example``: the example, if provided, is a mapping with the same names, shapes and dtypes in every call.
    - ``runs``: the network runs on the example with the options.
    - ``special_ids``: token ids are a tuple of non-negative integers.
    - ``blocks``: blocks, if provided, are a tuple of different module names of the network.
    - ``cuts``: with the override, the network has at least one cut.
    - ``exact``: the adapter passes ``check_adapter`` on the batches, or on the example without batches.

    Args:
        override: The override. It does not have to be registered.
        model: A network of the override's class.
        *batches: Inputs, preferably of several sizes.

    Example:
        >>> class Pairs(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 3)
        ...     def forward(self, pairs):
        ...         return self.second(self.first(pairs).tanh())
        >>> class ForPairs(Override):
        ...     def example(self, model):
        ...         return {"pairs": torch.randn(2, 2)}
        >>> check_override(ForPairs(), Pairs(), {"pairs": torch.randn(5, 2)})
    """
    return _OverrideKit(override, model, batches)


class _OverrideKit(Kit):
    def __init__(self, override: Override, model: nn.Module, batches: Sequence[Inputs]) -> None:
        self.override, self.model, self.batches = override, model, batches

    @cached_property
    def adapter(self) -> Adapter:
        """The network with the override, which is registered temporarily if needed."""
        name, override_class = full_name(type(self.model)), type(self.override)
        entries = {} if type(override_of(self.model)) is override_class else {name: Entry.of(name, override_class)}
        with patch.dict(registries.overrides._entries, entries):
            return load(self.model)

    def _call(self) -> None:
        """Call all methods of the override."""
        for method in (self.override.example, self.override.special_ids, self.override.blocks):
            method(self.model)

    def config(self) -> None:
        kind = type(self.override)
        require(issubclass(kind, Override), f"an override must be a subclass of Override, got {kind.__name__}")
        with must(f"{kind.__name__} must not require arguments"):
            kind()

    def stateless(self) -> None:
        object_names, class_names = set(vars(self.override)), set(vars(type(self.override)))
        self._call()
        stored = (set(vars(self.override)) - object_names) | (set(vars(type(self.override))) - class_names)
        require(not stored, f"an override must not store anything, but it stores {', '.join(sorted(stored))}")

    def pure(self) -> None:
        before = _model_state(self.model)
        self._call()
        unchanged = {**_model_state(self.model), "random numbers": before["random numbers"]} == before
        require(unchanged, "an override must not modify the network")

    def options(self) -> None:
        options = self.override.options
        named = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        require(named, f"options must be a mapping with argument names as keys, got {options!r}")
        with must(f"options must be JSON values: {dict(options)}"):
            json.dumps(dict(options), allow_nan=False)

    def example(self) -> None:
        first, second = (self.override.example(self.model) for _ in range(2))
        skip_unless(first is not None or second is not None, "the override does not provide an example")
        mapping = isinstance(first, Mapping) and len(first) > 0
        require(mapping, f"an example must be a mapping of inputs, got {first!r:.200}")
        shapes, second_shapes = map(_shapes, (first, second))
        require(shapes == second_shapes, f"examples must have equal shapes, got {shapes} and {second_shapes}")

    def runs(self) -> None:
        example = self.override.example(self.model)
        skip_unless(example is not None, "the override does not provide an example")
        inputs = {**self.override.options, **(example or {})}
        with (
            must(f"the network must run on the example and the options ({', '.join(inputs)})"),
            torch.no_grad(),
            evaluating(self.model),
        ):
            self.model(**inputs)

    def special_ids(self) -> None:
        ids = self.override.special_ids(self.model)
        valid = isinstance(ids, tuple) and all(type(token) is int and token >= 0 for token in ids)
        require(valid, f"special ids must be a tuple of integers >= 0, got {ids!r}")

    def blocks(self) -> None:
        blocks: Any = self.override.blocks(self.model)
        skip_unless(blocks is not None, "the override does not name blocks")
        named = isinstance(blocks, tuple) and all(isinstance(name, str) for name in blocks)
        require(named, f"blocks must be a tuple of names, got {blocks!r}")
        require(len(set(blocks)) == len(blocks), f"blocks must be different names, got {blocks}")
        names = [name for name, _ in self.model.named_modules() if name]
        for name in blocks:
            hint = f"; did you mean {similar!r}?" if (similar := did_you_mean(name, names)) else ""
            require(name in names, f"blocks must be modules of the network, got {name!r}{hint}")

    def cuts(self) -> None:
        require(len(self.adapter.layers) > 0, "with the override, the network must have a cut")

    def exact(self) -> None:
        check_adapter(self.adapter, *(self.batches or [self.adapter.example]))


def _shapes(example: Inputs | None) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        for name, value in dict(example or {}).items()
    }


@conformance
def check_rewrite(change: Rewrite, model: nn.Module) -> _RewriteKit:
    """Check that a rewrite satisfies the contract of ``Rewrite``.

    The parts:

    - ``config``: the rewrite is a frozen config that can be rebuilt from JSON.
    - ``recorded``: the network records the rewrite.
    - ``changes``: the rewrite changes modules or tensors of the network in place.
    - ``copied``: a copy of the rewritten network is equal to it.
    - ``values``: names, classes, shapes and dtypes of modules and tensors do not depend on the values of weights.
    - ``dtype``: new tensors have the dtype of the network.
    - ``weightless``: the rewrite works on a network on the meta device, and new tensors are on that device.

    Args:
        change: The rewrite.
        model: A supported network with weights of one dtype. It is not changed.

    Example:
        >>> check_rewrite(registries.rewrites.build("my_rewrite"), timm.create_model("resnet10t"))  # doctest: +SKIP
    """
    return _RewriteKit(change, model)


class _RewriteKit(Configuration[Rewrite]):
    def __init__(self, change: Rewrite, model: nn.Module) -> None:
        super().__init__(registries.rewrites, change)
        self.model = model

    @cached_property
    def rewritten(self) -> nn.Module:
        network = copy.deepcopy(self.model)
        rewrite(network, self.entry)
        return network

    def recorded(self) -> None:
        record = [*rewrites_of(self.model), json.loads(json.dumps(self.entry.to_dict()))]
        recorded = rewrites_of(self.rewritten)
        require(recorded == record, f"the network must record {record}, got {recorded}")

    def changes(self) -> None:
        changed = _outline(self.rewritten) != _outline(self.model)
        require(changed, "the rewrite must change modules or tensors of the network")

    def copied(self) -> None:
        self._require_alike(copy.deepcopy(self.rewritten), "a copy of the rewritten network must equal it")

    def values(self) -> None:
        negated = copy.deepcopy(self.model)
        with torch.no_grad():
            for tensor in _tensors(negated).values():
                if tensor.is_floating_point():
                    tensor.neg_()
        self.entry.apply(negated)
        self._require_alike(negated, "with different values of the weights, it must create the same modules")

    def dtype(self) -> None:
        double = copy.deepcopy(self.model).double()
        self.entry.apply(double)
        wrong = sorted({str(t.dtype) for t in _tensors(double).values() if t.is_floating_point()} - {"torch.float64"})
        require(not wrong, f"new tensors in a network of float64 must be float64, got {', '.join(wrong)}")

    def weightless(self) -> None:
        empty = copy.deepcopy(self.model).to("meta")
        with must("the rewrite must support a network on the meta device"), weightless():
            self.entry.apply(empty)
        self._require_alike(empty, "on the meta device, it must create the same modules")
        misplaced = [name for name, tensor in _tensors(empty).items() if not tensor.is_meta]
        require(not misplaced, f"tensors must be on the device of the network; elsewhere: {', '.join(misplaced)}")

    def _require_alike(self, network: nn.Module, message: str) -> None:
        require(_outline(network) == _outline(self.rewritten), message)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _outline(model: nn.Module) -> tuple[dict[str, type], dict[str, tuple[torch.Size, torch.dtype]]]:
    """Return the classes of all modules, and the shapes and dtypes of all tensors, by name."""
    modules = {name: type(module) for name, module in model.named_modules()}
    return modules, {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(model).items()}
