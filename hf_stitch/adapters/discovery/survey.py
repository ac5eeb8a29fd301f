"""Where a network can be cut: candidates from a watched forward, and plans for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, NotACutError
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.cutting.plan import CutPlan
from hf_stitch.adapters.cutting.surgery import Outline, outline
from hf_stitch.adapters.discovery.probes import Probes
from hf_stitch.adapters.discovery.shapes import Shapes
from hf_stitch.adapters.discovery.trace import Reads, Trace, TracedTensor, readers, trace
from hf_stitch.adapters.discovery.verify import Run, Verifier, same, unchanged
from hf_stitch.registry import did_you_mean

INSTEAD = "Cut instead at"
"""How the last sentence of a refusal begins, which names other layers."""


class Survey:
    """What is known of the cuts of one model for inputs of one size.

    Args:
        model: The model.
        run: Calls the model with a mapping of inputs, in eval mode.
        interface: How it takes its input.
        example: A batch of inputs (any number of samples).
        named: The blocks, where an override names them.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        interface: Interface,
        example: Mapping[str, Any],
        named: tuple[str, ...] | None = None,
    ) -> None:
        """Nothing runs before it is needed."""
        self._named = named
        self.model, self.run, self.interface = model, run, interface
        self._probes = Probes(interface, example)
        self._verifier = Verifier(model, run, self._probes)
        self._cuts: dict[str, Cut] = {}
        self._plans: dict[str, CutPlan] = {}
        self._refused: dict[str, str] = {}

    # -- what ran ------------------------------------------------------------------------------------
    @cached_property
    def _name_of(self) -> dict[int, str]:
        return {id(module): name for name, module in self.model.named_modules()}

    @cached_property
    def trace(self) -> Trace:
        """The watched forward of two samples.

        Raises:
            ValueError: If what the model returns cannot be compared, or is random in eval mode, or nothing of it is
                seen to depend on the content of the input.
        """
        with unchanged(self.model):
            watched = self._trace(2)
            with torch.no_grad():
                output = self.run(self._probes.vary(2))
                self._check_comparable(output)
                if not same(output, self.run(self._probes.vary(2))):
                    raise ValueError(
                        f"{type(self.model).__name__} gives different outputs for the same input in eval mode: a "
                        "network that is random cannot be cut exactly; switch the randomness off"
                    )
        if not watched.has_source:
            raise ValueError(
                f"{type(self.model).__name__}: no module turns {', '.join(self.interface.content)} into values, so it "
                "cannot be seen what depends on the input; pass floating-point inputs or use an embedding module"
            )
        if not watched.reaches:
            raise ValueError(
                f"{type(self.model).__name__}: no gradient passes from what it returns to "
                f"{', '.join(self.interface.content)}, so it cannot be seen what depends on the input; does its "
                "forward run under torch.no_grad, detach, or return integers alone?"
            )
        return watched

    def _check_comparable(self, output: Any) -> None:
        what = type(self.model).__name__
        if not tree.tensors(output):
            raise ValueError(
                f"{what} returns no tensor (nor a tuple, list or mapping of any) but {type(output).__name__}: there is "
                "nothing to compare; wrap it in a module that returns one"
            )
        for path, leaf in tree.leaves(output):
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                place = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"{what} returns a {type(leaf).__name__} at output{place}, which cannot be looked into: wrap it in "
                    "a module that returns tensors, or a tuple, list or mapping of them"
                )
        values = [leaf for leaf in tree.tensors(output).values() if leaf.is_floating_point()]
        if values and not any(bool(leaf.isfinite().any()) for leaf in values):
            raise ValueError(
                f"{what} returns no finite number for the inputs that it is tried with, so that nothing can be told: "
                "pass example_inputs as it expects them"
            )

    @cached_property
    def _examples(self) -> list[tuple[int, int, Trace]]:
        """Traces at the sizes from which the rules of shapes are read."""
        with unchanged(self.model):
            if self.interface.modality != "text":
                return [(2, 0, self.trace), (3, 0, self._trace(3))]
            n = self._probes.tokens
            return [
                (2, n, self.trace),
                (3, n, self._trace(3)),
                (2, n + 1, self._trace(2, n + 1)),
                (3, n + 1, self._trace(3, n + 1)),
            ]

    @cached_property
    def _shapes(self) -> Shapes:
        content = self._probes.vary(2)[self.interface.content[0]].shape
        traces = [watched for _, _, watched in self._examples]
        return Shapes(self.model, traces, self._long, tuple(content), self.interface.modality)

    def _long(self) -> Trace:
        """A trace of a text of up to four times as many tokens."""
        return self._trace(2, min(4 * self._probes.tokens, self.interface.max_tokens or 4 * self._probes.tokens))

    def _trace(self, batch: int, tokens: int | None = None) -> Trace:
        return trace(self.model, self.run, self._probes.vary(batch, tokens), self.interface.content, self._reads)

    @cached_property
    def _reads(self) -> Reads:
        """The calls that read the content, where it is token ids."""
        inputs = self._probes.vary(2)
        others = self._probes.other_words(inputs)
        alike = all(inputs[name] is others[name] for name in self.interface.content)
        return frozenset() if alike else readers(self.model, self.run, inputs, others)

    # -- candidates ------------------------------------------------------------------------------------
    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The outputs of blocks that everything flows through, in order.

        Blocks are the elements of stacks (``Sequential``, ``ModuleList``): composite ones of a repeated class first,
        and of stacks within stacks the innermost. A model with less than two has its other layers listed too.
        """
        if self._named is not None:
            return self._named
        listed = [name for name in self.trace.calls if name and self._dominates(name)]
        composite = [
            n for n in listed if self._in_stack(n) and any(True for _ in self.model.get_submodule(n).children())
        ]
        repeated = [n for n in composite if self._is_stack(n.rpartition(".")[0], composite)]
        chosen = repeated or composite
        if len(chosen) < 2:
            inside = tuple(f"{n}." for n in chosen)
            chosen = [
                *chosen,
                *(n for n in listed if n not in chosen and not n.startswith(inside) and not self._is_output(n)),
            ]
        innermost = [n for n in chosen if not any(m.startswith(n + ".") for m in chosen)]
        return tuple(sorted(innermost, key=lambda n: self.trace.calls[n].exited))

    def _in_stack(self, name: str) -> bool:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return isinstance(parent, (nn.Sequential, nn.ModuleList))

    def _is_stack(self, parent: str, composite: list[str]) -> bool:
        """Whether a class repeats among the elements; for a single one (a stage of one block), among all stacks."""
        elements = list(self.model.get_submodule(parent).children())
        pool = elements if len(elements) > 1 else [self.model.get_submodule(n) for n in composite]
        classes = Counter(map(type, pool))
        return any(classes[type(element)] > 1 for element in elements)

    def _dominates(self, name: str) -> bool:
        """Whether a module is a candidate: runs once, and everything passes through one of its outputs."""
        call = self.trace.calls[name]
        return len(call.outputs) == 1 and any(s.dominates and 2 <= len(s.shape) <= 4 for s in call.seen().values())

    def _is_output(self, name: str) -> bool:
        """Whether what a module returns is what the model returns."""
        return any(seen.is_output for seen in self.trace.calls[name].seen().values())

    # -- one cut ------------------------------------------------------------------------------------
    def cut(self, layer: str) -> Cut:
        """The cut at a layer, not yet verified.

        Raises:
            NotACutError: Where the layer cannot be one: unknown, never run, run several times, or without a tensor.
        """
        if layer not in self._cuts:
            self._cuts[layer] = self._describe(layer)
        return self._cuts[layer]

    def _describe(self, layer: str) -> Cut:
        names = [name for name, _ in self.model.named_modules() if name]
        what = f"layer {layer!r} of {type(self.model).__name__}"
        if layer not in names:
            hint = did_you_mean(layer, self.blocks) or did_you_mean(layer, names)
            raise NotACutError(
                f"{what} does not exist{f'; did you mean {hint!r}?' if hint else '.'} Cuts: {_short(self.blocks)}"
            )
        call = self.trace.calls.get(layer)
        if call is None:
            raise NotACutError(f"{what} does not run in a forward; cuts: {_short(self.blocks)}")
        if len(call.outputs) > 1:
            raise NotACutError(
                f"{what} fires {len(call.outputs)} times in one forward: its output is no single representation"
            )
        dependent = {path: s for path, s in call.seen().items() if s.depends}
        if not dependent:
            raise NotACutError(f"{what} returns nothing that depends on the input")
        path, seen = next(((p, s) for p, s in dependent.items() if s.dominates), next(iter(dependent.items())))
        if not 2 <= len(seen.shape) <= 4 or not seen.dtype.is_floating_point:
            raise NotACutError(
                f"{what} returns a tensor of shape {seen.shape} and dtype {seen.dtype}: no vectors, tokens or grid"
            )
        axes = self._shapes.axes(layer, path, what)
        return Cut(
            layer,
            path,
            axes.spec,
            str(seen.dtype).removeprefix("torch."),
            call.flops / self.trace.flops if self.trace.flops else 0.0,
            axes.order,
            axes.padding,
        )

    # -- how the rest runs alone ------------------------------------------------------------------------------------
    def plan(self, layer: str) -> CutPlan:
        """The verified plan for what follows a cut.

        Raises:
            NotACutError: If something bypasses the layer; the message says what.
        """
        if layer in self._refused:
            raise NotACutError(self._refused[layer])
        if layer not in self._plans:
            cut = self.cut(layer)
            try:
                with unchanged(self.model):
                    self._plans[layer] = self._found(cut)
            except NotACutError as error:
                self._refused[layer] = str(error)
                raise
        return self._plans[layer]

    def _found(self, cut: Cut) -> CutPlan:
        for plan in self._proposals(cut):
            if self._verifier.holds(cut, plan):
                return plan
        raise NotACutError(self._why_not(cut))

    def status(self, layer: str) -> str:
        """``verified``, ``refused`` or ``pending``."""
        return "verified" if layer in self._plans else "refused" if layer in self._refused else "pending"

    def _proposals(self, cut: Cut) -> Iterator[CutPlan]:
        """Plans from the cheapest to the one that leaves out the least."""
        read = None
        while read != self._verifier.read:  # what the first tries found to be looked into stays
            read = set(self._verifier.read)
            stubs, entry = self._stubs(cut)
            after = dict(self._after(cut))
            yield CutPlan("stubs", stubs, entry, after=after, records=self._records)
        sources = {n: o for n in self.trace.sources if (o := self._outline(n, cut)) is not None}
        for kept in (after, {}):  # a front half that keeps everything is a last resort
            yield CutPlan("stubs", stubs, entry, materialise=True, after=kept, records=self._records)
            yield CutPlan("full", sources, entry, after=kept, records=self._records)

    @property
    def _records(self) -> bool:
        """Whether transformers has installed hooks by which it collects hidden states."""
        return any(vars(module).get("_output_capturing_hooks_installed") for module in self.model.modules())

    def _stubs(self, cut: Cut) -> tuple[dict[str, Outline], Outline | None]:
        """The largest modules before the cut of which all outputs depend on the input, and the outline of the cut's."""
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
        """First entry and last exit of a module and all in it (a ``ModuleList`` runs only through its elements)."""
        inside = [c for n, c in self.trace.calls.items() if n == name or n.startswith(name + ".") or not name]
        return min((c.entered for c in inside), default=math.inf), max((c.exited for c in inside), default=math.inf)

    def _children(self, name: str) -> list[str]:
        return [self._name_of[id(child)] for child in self.model.get_submodule(name).children()]

    def _outline(self, name: str, cut: Cut, *, content_only: bool = True) -> Outline | None:
        """The outline of a module's output.

        ``None`` if it has none or, with ``content_only``, the module makes something that does not depend on the input.
        """
        examples = []
        for batch, tokens, watched in self._examples:
            call = watched.calls.get(name)
            if call is None or not call.seen():
                return None
            if content_only and any(not (seen.depends or seen.given) for seen in call.seen().values()):
                return None
            if not all(_shapes(o) == _shapes(call.outputs[0]) and tree.is_plain(_shapes(o)) for o in call.outputs):
                return None
            examples.append((batch, tokens, call.outputs[-1]))
        return outline(examples, getattr(torch, cut.dtype))

    def _after(self, cut: Cut) -> Iterator[tuple[str, Outline | None]]:
        """The largest modules that the part up to the cut does not run, with the outline of those that run at all."""
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

    def _why_not(self, cut: Cut) -> str:
        """What bypasses a layer: the last module before it whose output matters although the layer's is held fixed."""
        end = self.trace.calls[cut.layer].exited
        before = [c for c in self.trace.calls.values() if c.exited < end and not c.name.startswith(cut.layer + ".")]
        depending = [call for call in before if any(seen.depends for seen in call.seen().values())]
        latest = sorted(depending, key=lambda c: (-c.exited, len(c.name)))
        if name := self._verifier.bypass(cut, (call.name for call in latest)):
            why = f"the output of {name!r} bypasses it (what follows uses it directly)."
        else:
            why = "what follows depends on the input by another way than through it."
            if said := self._verifier.failure(cut):
                why += f" The model's own code said: {said}."
        return f"{type(self.model).__name__} cannot be cut at {cut.layer!r}: {why}{self._instead(cut)}"

    def _instead(self, cut: Cut) -> str:
        """Where to cut instead: blocks that are verified, else those that may be; none that is refused."""
        known = tuple(name for name in self.blocks if name in self._plans)
        names = known or tuple(n for n in self.blocks if n not in self._refused and n != cut.layer)
        return f" {INSTEAD}{'' if known else ' (not verified yet)'}: {_short(names)}" if names else ""


def _shapes(output: Any) -> Any:
    return tree.transform(output, lambda leaf: list(leaf.shape) if isinstance(leaf, TracedTensor) else leaf)


def _short(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 8 else ", ".join((*names[:4], "…", *names[-3:]))
