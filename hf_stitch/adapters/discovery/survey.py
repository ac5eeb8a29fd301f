"""The possible cuts of a network: candidates from a traced forward, with a plan for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, CutPlan, NotACutError
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.cutting.surgery import Outline, outline
from hf_stitch.adapters.discovery.probes import Probes
from hf_stitch.adapters.discovery.shapes import Shapes
from hf_stitch.adapters.discovery.trace import Integers, Reads, Trace, TracedTensor, noting, noting_outside, trace
from hf_stitch.adapters.discovery.verify import Run, Verifier, same, sweep, unchanged
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.options import did_you_mean
from hf_stitch.printing import warn

INSTEAD = "Cut instead at"
"""Start of the last sentence of a refusal, a list of other layers."""


class Survey:
    """Cached cuts of a model for inputs of one size."""

    def __init__(
        self, model: nn.Module, run: Run, interface: Interface, example: Mapping[str, Any],
        block_names: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self._named = block_names
        self.model, self.run, self.interface = model, run, interface
        self._probes = Probes(interface, example)
        self._verifier = Verifier(model, run, self._probes)
        self._reads: Reads = set()  # calls that read the content if it is token ids
        self._cuts: dict[str, Cut] = {}
        self._plans: dict[str, CutPlan] = {}
        self._refused: dict[str, str] = {}
        self._tried: set[str] = set()

    # -- traces --------------------------------------------------------------------------------------
    @cached_property
    def _name_of(self) -> dict[int, str]:
        return {id(module): name for name, module in self.model.named_modules()}

    @cached_property
    def trace(self) -> Trace:
        """Trace of a forward of two samples."""
        with unchanged(self.model):
            output, integers = self._first(self._batch_of_other_words())
            self._check_comparable(output)
            traced = self._trace(2, integers=integers)
            with torch.no_grad():
                if not same(output, self.run(self._batch_of_other_words())):
                    raise ValueError(
                        f"{type(self.model).__name__} returns different outputs for the same input in eval mode and "
                        "cannot be cut exactly: disable its random operations"
                    )
        if not traced.has_source:
            raise ValueError(
                f"{type(self.model).__name__}: dependence on the input cannot be traced because no module embeds "
                f"{', '.join(self.interface.content)}; pass floating-point inputs or use an embedding module"
            )
        if not traced.reaches:
            raise ValueError(
                f"{type(self.model).__name__}: dependence on the input cannot be traced because gradients do not flow "
                f"from the output to {', '.join(self.interface.content)}; check whether its forward runs under "
                "torch.no_grad, detaches, or returns only integers. Layers that quantize their inputs (dynamic "
                "activations of torchao) block gradients: quantize only the weights"
            )
        return traced

    def _first(self, batch: Mapping[str, Any]) -> tuple[Any, Integers]:
        """Run two samples and record the integers that modules read; an error names the example inputs."""
        try:
            with torch.no_grad(), noting(self.model) as integers, noting_outside(self.model) as self._outside:
                return self.run(batch), integers
        except Exception as failure:
            shapes = [
                ", ".join(f"{n} {tuple(v.shape)}" for n, v in inputs.items() if isinstance(v, Tensor))
                for inputs in (self._probes.example, batch)
            ]
            raise ExampleError(
                f"{type(self.model).__name__} fails on its example inputs, {shapes[0]}, or on a batch of two of them, "
                f"{shapes[1]}: {failure}. example_inputs= must be a batch: samples on the first axis, then the "
                "channels and sizes that the network requires" + _attention_advice(self.model),
                self.model,
            ) from failure

    def _check_comparable(self, output: Any) -> None:
        kind = type(self.model).__name__
        if not tree.tensors(output):
            raise ValueError(
                f"{kind} must return a tensor, or a tuple, list or mapping of tensors, got {type(output).__name__}: "
                "wrap the model in a module that returns tensors"
            )
        for path, leaf in tree.leaves(output):
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                location = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"{kind} returns a {type(leaf).__name__} at output{location}, which cannot be traversed: wrap the "
                    "model in a module that returns tensors, or a tuple, list or mapping of tensors; for a language "
                    "model, disable the cache (config.use_cache = False)"
                )
        values = [leaf for leaf in tree.tensors(output).values() if leaf.is_floating_point()]
        if values and not any(bool(leaf.isfinite().any()) for leaf in values):
            raise ValueError(
                f"{kind} returns only NaN or infinite numbers for its example inputs: pass example_inputs with finite "
                "outputs"
            )

    @cached_property
    def _examples(self) -> list[tuple[int, int, Trace]]:
        with unchanged(self.model):
            if self.interface.text is None:
                return [(2, 0, self.trace), (3, 0, self._trace(3))]
            n = self._probes.tokens
            return [(2, n, self.trace), (3, n, self._trace(3)), (2, n + 1, self._trace(2, n + 1))]

    @cached_property
    def _shapes(self) -> Shapes:
        content = self._probes.vary(2)[self.interface.content[0]].shape
        traces = [traced for _, _, traced in self._examples]
        tokens = self._probes.tokens or (content[1] if len(content) > 1 else 0)
        interface = self.interface
        return Shapes(self.model, traces, self._long, tuple(content), tokens, interface.modality, interface.grids)

    def _long(self) -> Trace:
        return self._trace(2, min(4 * self._probes.tokens, self.interface.max_tokens or 4 * self._probes.tokens))

    def _trace(self, batch: int, tokens: int | None = None, integers: Integers | None = None) -> Trace:
        """Trace a forward; ``integers`` are those read in a forward of other words, to find readers of words."""
        inputs, content = self._probes.vary(batch, tokens), self.interface.content
        ids = any(not inputs[name].is_floating_point() for name in content)
        try:
            return trace(self.model, self.run, inputs, content, self._reads, integers if integers and ids else {})
        except NotImplementedError as error:
            raise ValueError(
                f"{type(self.model).__name__} does not run with gradients, which are required to find its cuts: "
                + str(error).rstrip(".")
                + _attention_advice(self.model)
            ) from error

    def _batch_of_other_words(self) -> dict[str, Any]:
        return self._probes.other_words(self._probes.vary(2))

    # -- candidates ------------------------------------------------------------------------------------
    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks on every path from the input to the output, in execution order.

        Blocks are the elements of stacks (``Sequential``, ``ModuleList``). Composite elements of a repeated class are
        preferred, and the innermost of nested stacks. If a model has fewer than two blocks, further layers are
        included.
        """
        if self._named is not None:
            return self._named
        dominating = [name for name in self.trace.calls if name and self.dominates(name)]
        composite = [n for n in dominating if self._is_composite(n)]
        repeated = [n for n in composite if self._is_stack(n.rpartition(".")[0], composite)]
        chosen = repeated or composite
        if len(chosen) < 2:
            prefixes = tuple(f"{n}." for n in chosen)
            calls = self.trace.calls
            outputs = [n for n in dominating if any(tensor.is_output for tensor in calls[n].tensors().values())]
            chosen = [*chosen, *(n for n in dominating if n not in (*chosen, *outputs) and not n.startswith(prefixes))]
        if self._outside:
            message = (
                f"{type(self.model).__name__} runs modules that are not its submodules (in "
                f"{', '.join(sorted(self._outside))}), so cuts and hashes ignore them: store them as attributes or in "
                "an nn.ModuleList"
            )
            if not chosen:
                raise ValueError(message)
            warn(message)
        innermost = [n for n in chosen if not any(m.startswith(n + ".") for m in chosen)]
        return tuple(sorted(innermost, key=lambda n: self.trace.calls[n].exited))

    def _is_composite(self, name: str) -> bool:
        """Return whether an element of a stack contains modules other than modules that compute its weight."""
        parent, module = (self.model.get_submodule(path) for path in (name.rpartition(".")[0], name))
        children = [key for key, _ in getattr(module, "base_layer", module).named_children()]  # without an adapter
        composite = any(key not in ("parametrizations", "_packed_params") for key in children)
        return composite and isinstance(parent, (nn.Sequential, nn.ModuleList))

    def _is_stack(self, parent: str, composite: list[str]) -> bool:
        """Return whether a class repeats among the elements of a stack, or of all stacks if it has one element."""
        elements = list(self.model.get_submodule(parent).children())
        pool = elements if len(elements) > 1 else [self.model.get_submodule(n) for n in composite]
        classes = Counter(map(type, pool))
        return any(classes[type(element)] > 1 for element in elements)

    def dominates(self, name: str) -> bool:
        """Return whether a module can be a candidate: it runs once, with an output on every path."""
        call = self.trace.calls.get(name)
        if call is None or len(call.outputs) != 1:
            return False
        return any(tensor.dominates and 2 <= len(tensor.shape) <= 4 for tensor in call.tensors().values())

    # -- one cut ------------------------------------------------------------------------------------
    def cut(self, layer: str) -> Cut:
        """Return the cut at a layer, without verification."""
        if layer not in self._cuts:
            self._cuts[layer] = self._describe(layer)
        return self._cuts[layer]

    def _describe(self, layer: str) -> Cut:
        names = [name for name, _ in self.model.named_modules() if name]
        subject = f"layer {layer!r} of {type(self.model).__name__}"
        if layer not in names:
            hint = did_you_mean(layer, self.blocks) or did_you_mean(layer, names)
            raise NotACutError(
                f"{subject} does not exist{f'; did you mean {hint!r}?' if hint else '.'} {self._list_blocks()}"
            )
        call = self.trace.calls.get(layer)
        if call is None:
            raise NotACutError(f"{subject} does not run in a forward. {self._list_blocks()}")
        if len(call.outputs) > 1:
            raise NotACutError(
                f"{subject} runs {len(call.outputs)} times in one forward and does not have a single representation"
            )
        dependent = {path: s for path, s in call.tensors().items() if s.depends}
        if not dependent:
            raise NotACutError(f"the output of {subject} does not depend on the input")
        path, tensor = next(((p, s) for p, s in dependent.items() if s.dominates), next(iter(dependent.items())))
        if not 2 <= len(tensor.shape) <= 4 or not tensor.dtype.is_floating_point:
            kind = f"a tensor of shape {tensor.shape}" if tensor.shape else "a nested tensor or a single number"
            raise NotACutError(
                f"{subject} returns {kind} and dtype {tensor.dtype}, expected floating-point vectors, tokens or a grid"
            )
        axes = self._shapes.axes(layer, path, subject)
        return Cut(
            layer,
            path,
            axes.spec,
            str(tensor.dtype).removeprefix("torch."),
            call.flops / self.trace.flops if self.trace.flops else 0.0,
            axes.order,
            axes.padding,
            axes.fold,
        )

    # -- plans ------------------------------------------------------------------------------------------------------
    def plan(self, layer: str) -> CutPlan:
        """Return the verified plan of the cut at a layer."""
        if layer in self._refused:
            raise NotACutError(self._refused[layer])
        if layer not in self._plans:
            cut = self.cut(layer)
            self._tried.add(layer)
            try:
                with unchanged(self.model):
                    self._plans[layer] = self._first_plan(cut)
            except NotACutError as error:
                self._refused[layer] = error.args[0]
                raise
        return self._plans[layer]

    def verify(self, layers: Iterable[str]) -> None:
        """Verify several cuts together, in a fraction of the time of separate verification."""
        names = tuple(layers)
        self._sweep(names)
        for layer in names:
            with suppress(NotACutError):
                self.plan(layer)

    def _sweep(self, layers: Iterable[str]) -> None:
        """Verify the untried cuts together; cuts that do not pass stay pending."""
        pending = []
        for layer in layers:
            if self.status(layer) == "pending" and layer not in self._tried:
                with suppress(NotACutError):  # plan() raises it with the reason
                    pending.append(self.cut(layer))
        self._tried |= {cut.layer for cut in pending}
        if pending:
            pending.sort(key=lambda cut: self.trace.calls[cut.layer].exited)
            with unchanged(self.model):
                self._plans.update(sweep(self._verifier, pending, lambda cut: next(self._proposals(cut))))

    def _first_plan(self, cut: Cut) -> CutPlan:
        for plan in self._proposals(cut):
            if self._verifier.holds(cut, plan):
                return plan
        raise NotACutError(self._reason_of_refusal(cut))

    def status(self, layer: str) -> str:
        """Return the verification status of a layer: ``verified``, ``refused`` or ``pending``."""
        return "verified" if layer in self._plans else "refused" if layer in self._refused else "pending"

    def _proposals(self, cut: Cut) -> Iterator[CutPlan]:
        """Iterate over plans, from the cheapest to the plan that replaces the fewest modules."""
        read = None
        while read != self._verifier.read:  # do not replace modules with attributes that the first tries read
            read = set(self._verifier.read)
            stubs, entry = self._stubs(cut)
            after = dict(self._after(cut))
            yield CutPlan("stubs", stubs, entry, after=after, records=self._records)
        sources = {n: o for n in self.trace.sources if (o := self._outline(n, cut)) is not None}
        for removed in (after, {}):  # last resort: the front half replaces no modules
            yield CutPlan("stubs", stubs, entry, materialise=True, after=removed, records=self._records)
            yield CutPlan("full", sources, entry, after=removed, records=self._records)

    @property
    def _records(self) -> bool:
        """Whether transformers has installed hooks to collect hidden states."""
        return any(vars(module).get("_output_capturing_hooks_installed") for module in self.model.modules())

    def _stubs(self, cut: Cut) -> tuple[dict[str, Outline], Outline | None]:
        """Return outlines of the largest modules before the cut with only input-dependent outputs, and of the layer."""
        stubs: dict[str, Outline] = {}
        end = self.trace.calls[cut.layer].exited
        entry = self._outline(cut.layer, cut) if cut.layer not in self._verifier.read else None

        def walk(name: str) -> None:
            entered, exited = self._span(name)
            if entered > end or (name == cut.layer and entry is not None):
                return
            if exited < end and name not in self._verifier.read and (rule := self._outline(name, cut)) is not None:
                stubs[name] = rule
                return
            for child in self._children(name):
                walk(child)

        walk("")
        return stubs, entry

    def _span(self, name: str) -> tuple[float, float]:
        """Return the first entry and last exit of a module and its children (a ``ModuleList`` never runs)."""
        return self._spans.get(name, (math.inf, math.inf))

    @cached_property
    def _spans(self) -> dict[str, tuple[float, float]]:
        spans: dict[str, tuple[float, float]] = {}
        for call in self.trace.calls.values():
            parts = call.name.split(".") if call.name else []
            for outer in [".".join(parts[:depth]) for depth in range(len(parts) + 1)]:
                entered, exited = spans.get(outer, (math.inf, -math.inf))
                spans[outer] = min(entered, call.entered), max(exited, call.exited)
        return spans

    def _children(self, name: str) -> list[str]:
        return [self._name_of[id(child)] for child in self.model.get_submodule(name).children()]

    def _outline(self, name: str, cut: Cut, *, content_only: bool = True) -> Outline | None:
        """Return the outline of the output of a module.

        ``None`` without an outline or, with ``content_only``, if the module computes tensors that do not depend on the
        input.
        """
        examples = []
        for batch, tokens, traced in self._examples:
            call = traced.calls.get(name)
            if call is None or not call.tensors():
                return None
            if content_only and any(not (tensor.depends or tensor.given) for tensor in call.tensors().values()):
                return None
            if not all(_shapes(o) == _shapes(call.outputs[0]) and tree.is_plain(_shapes(o)) for o in call.outputs):
                return None
            examples.append((batch, tokens, call.outputs[-1]))
        return outline(examples, getattr(torch, cut.dtype))

    def _after(self, cut: Cut) -> Iterator[tuple[str, Outline | None]]:
        """Iterate over the largest modules after the cut with their outline; ``None`` for modules that never run."""
        end = self.trace.calls[cut.layer].exited

        def walk(name: str) -> Iterator[tuple[str, Outline | None]]:
            for child in self._children(name):
                entered, exited = self._span(child)
                rule = self._outline(child, cut, content_only=False) if entered > end else None
                if child in self._verifier.read:
                    yield from walk(child)
                elif rule is not None or entered == math.inf:
                    yield child, rule
                elif exited > end:
                    yield from walk(child)

        return walk("")

    def _reason_of_refusal(self, cut: Cut) -> str:
        """Explain a refusal by the last module before the layer that changes the output while the layer is fixed."""
        end = self.trace.calls[cut.layer].exited
        before = [c for c in self.trace.calls.values() if c.exited < end and not c.name.startswith(cut.layer + ".")]
        depending = [call for call in before if any(tensor.depends for tensor in call.tensors().values())]
        latest = sorted(depending, key=lambda c: (-c.exited, len(c.name)))
        if name := self._verifier.bypass(cut, (call.name for call in latest)):
            reason = f"the output of {name!r} bypasses it (later modules use it directly)."
        else:
            reason = "the output also depends on the input through other paths."
            if failure := self._verifier.failure(cut):
                reason += f" Verification failed with {failure}."
        return f"{type(self.model).__name__} cannot be cut at {cut.layer!r}: {reason}{self._list_cuts()}"

    def _list_cuts(self) -> str:
        """List the blocks that are cuts."""
        with suppress(torch.OutOfMemoryError):  # all layers require more memory than one
            self._sweep(self.blocks)
        names = tuple(name for name in self.blocks if name in self._plans)
        return f" {INSTEAD}: {_join_names(names)}" if names else ""

    def _list_blocks(self) -> str:
        """List the blocks that are cuts or, without any, the candidates."""
        names = tuple(name for name in self.blocks if name in self._plans)
        return f"Cuts: {_join_names(names)}" if names else f"Candidates, not verified yet: {_join_names(self.blocks)}"


def _shapes(output: Any) -> Any:
    return tree.transform(output, lambda leaf: list(leaf.shape) if isinstance(leaf, TracedTensor) else leaf)


def _attention_advice(model: nn.Module) -> str:
    """Return advice to replace an attention implementation that some devices lack; empty if it is not needed."""
    configs = (getattr(module, "config", None) for module in model.modules())
    used = {str(getattr(config, "_attn_implementation", None)) for config in configs} - {"None", "eager", "sdpa"}
    remedy = 'load it with attn_implementation="sdpa", or call set_attn_implementation("sdpa") on the live network'
    return f". Its attention implementation is {', '.join(sorted(used))}: {remedy}" if used else ""


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 8 else ", ".join((*names[:4], "…", *names[-3:]))
