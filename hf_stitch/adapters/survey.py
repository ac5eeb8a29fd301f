"""Where a network can be cut: candidates from a watched forward, plans, and their verification.

A plan is believed only after it was tried: the part after the cut must give the model's own output bit for bit, on
other batch sizes, other lengths, and with padding on either side, and nothing of the output may be computed from what
stands in for the rest, nor may any code look at its values. A bypass through weights that happen to be zero, or
through a comparison that happens to come out alike, shows only so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..registry import did_you_mean
from ..representation import Representation
from . import _tree
from .cut import Cut, Interface, NotACutError, Plan, mask_of, run_after, run_before
from .flow import Flow
from .shapes import Shapes
from .surgery import Outline, StubReadError, outline
from .trace import Reads, Seen, Trace, readers, trace

Run = Callable[[Mapping[str, Any]], Any]

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
        self.example = dict(example)
        self._cuts: dict[str, Cut] = {}
        self._plans: dict[str, Plan] = {}
        self._refused: dict[str, str] = {}
        self._read: set[str] = set()  # modules that the code around them looks into: they stay
        self._failure = ""  # what the model's own code last said to a plan

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
                output = self.run(self._vary(2))
                self._check_comparable(output)
                if not same(output, self.run(self._vary(2))):
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
        if not _tree.tensors(output):
            raise ValueError(
                f"{what} returns no tensor (nor a tuple, list or mapping of any) but {type(output).__name__}: there is "
                "nothing to compare; wrap it in a module that returns one"
            )
        for path, leaf in _tree.leaves(output):
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                place = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"{what} returns a {type(leaf).__name__} at output{place}, which cannot be looked into: wrap it in "
                    "a module that returns tensors, or a tuple, list or mapping of them"
                )
        values = [leaf for leaf in _tree.tensors(output).values() if leaf.is_floating_point()]
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
            n = self._tokens
            return [
                (2, n, self.trace),
                (3, n, self._trace(3)),
                (2, n + 1, self._trace(2, n + 1)),
                (3, n + 1, self._trace(3, n + 1)),
            ]

    @cached_property
    def _shapes(self) -> Shapes:
        content = self._vary(2)[self.interface.content[0]].shape
        traces = [watched for _, _, watched in self._examples]
        return Shapes(self.model, traces, self._long, tuple(content), self.interface.modality)

    def _long(self) -> Trace:
        """A trace of a text of up to four times as many tokens."""
        return self._trace(2, min(4 * self._tokens, self.interface.max_tokens or 4 * self._tokens))

    def _trace(self, batch: int, tokens: int | None = None) -> Trace:
        return trace(self.model, self.run, self._vary(batch, tokens), self.interface.content, self._reads)

    @cached_property
    def _reads(self) -> Reads:
        """The calls that read the content, where it is token ids."""
        inputs = self._vary(2)
        ids = {name: inputs[name] for name in self.interface.content if not inputs[name].is_floating_point()}
        others = {name: self._mixed(value) for name, value in ids.items()}
        return readers(self.model, self.run, inputs, {**inputs, **others}) if ids else frozenset()

    def _mixed(self, ids: Tensor) -> Tensor:
        """Token ids, those that a head may look for in their places and the others in each other's."""
        special = self.interface.special_ids
        mixed, ordinary = ids.clone(), ~torch.isin(ids, ids.new_tensor(special))
        mixed[ordinary] = ids[ordinary].roll(1)
        if torch.equal(mixed, ids):  # they are all the same: one more will do
            mixed[ordinary] = next(i for i in range(len(special) + 2) if i not in special and i not in ids)
        return mixed

    @property
    def _tokens(self) -> int:
        return int(self.example[self.interface.content[0]].shape[1]) if self.interface.modality == "text" else 0

    def _vary(self, batch: int, tokens: int | None = None) -> dict[str, Any]:
        """The example with another number of samples, and of tokens, by repetition."""
        old_batch = self.example[self.interface.content[0]].shape[0]
        varied = {}
        for name, value in self.example.items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == old_batch:
                value = value[torch.arange(batch, device=value.device) % old_batch]
                if tokens is not None and value.dim() > 1 and value.shape[1] == self._tokens:
                    places = torch.arange(tokens, device=value.device) % max(self._tokens - 1, 1)
                    places[-1] = self._tokens - 1  # texts may end with a token that heads look for
                    value = value[:, places]
            varied[name] = value
        return varied

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
            axes.form,
            str(seen.dtype).removeprefix("torch."),
            call.flops / self.trace.flops if self.trace.flops else 0.0,
            axes.order,
            axes.padding,
        )

    # -- how the rest runs alone ------------------------------------------------------------------------------------
    def plan(self, layer: str) -> Plan:
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

    def _found(self, cut: Cut) -> Plan:
        for plan in self._proposals(cut):
            if self._verified(cut, plan):
                return plan
        raise NotACutError(self._why_not(cut))

    def status(self, layer: str) -> str:
        """``verified``, ``refused`` or ``pending``."""
        return "verified" if layer in self._plans else "refused" if layer in self._refused else "pending"

    def _proposals(self, cut: Cut) -> Iterator[Plan]:
        """Plans from the cheapest to the one that leaves out the least."""
        read = None
        while read != self._read:  # what the first tries found to be looked into stays
            read = set(self._read)
            stubs, entry = self._stubs(cut)
            after = dict(self._after(cut))
            yield Plan("stubs", stubs, entry, after=after, records=self._records)
        sources = {n: o for n in self.trace.sources if (o := self._outline(n, cut)) is not None}
        for kept in (after, {}):  # a front half that keeps everything is a last resort
            yield Plan("stubs", stubs, entry, materialise=True, after=kept, records=self._records)
            yield Plan("full", sources, entry, after=kept, records=self._records)

    @property
    def _records(self) -> bool:
        """Whether transformers has installed hooks by which it collects hidden states."""
        return any(vars(module).get("_output_capturing_hooks_installed") for module in self.model.modules())

    def _stubs(self, cut: Cut) -> tuple[dict[str, Outline], Outline | None]:
        """The largest modules before the cut of which all outputs depend on the input, and the outline of the cut's."""
        stubs: dict[str, Outline] = {}
        end = self.trace.calls[cut.layer].exited
        entry = self._outline(cut.layer, cut) if cut.layer not in self._read else None

        def walk(name: str) -> None:
            entered, exited = self._span(name)
            if entered > end or (name == cut.layer and entry is not None):
                return
            if exited < end and name not in self._read and (rule := self._outline(name, cut)) is not None:
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
            if not all(_shapes(o) == _shapes(call.outputs[0]) and _tree.is_plain(_shapes(o)) for o in call.outputs):
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
                if child in self._read:
                    yield from walk(child)
                elif rule is not None or entered == math.inf:
                    yield child, rule
                elif exited > end:
                    yield from walk(child)

        return walk("")

    # -- verification ------------------------------------------------------------------------------------
    def _verified(self, cut: Cut, plan: Plan) -> bool:
        """Whether both parts give what the whole model gives.

        The whole model runs on all probes first, then the one part on all and the other on all: state that one forward
        left behind does not pass for another's.
        """
        try:
            with torch.no_grad():
                probes = list(self._probes())
                whole = [self._observed(cut, inputs) for inputs in probes]
                seen = [
                    cut.represent(values, inputs, self.interface)
                    for inputs, (values, _) in zip(probes, whole, strict=True)
                ]
                before = [run_before(self.model, self.run, cut, plan, self.interface, _copied(p)) for p in probes]
                return all(same(a.values, b.values) for a, b in zip(before, seen, strict=True)) and all(
                    self._follows(cut, plan, representation, output)
                    for representation, (_, output) in zip(seen, whole, strict=True)
                )
        except StubReadError as error:
            self._read.add(error.stub)
        except (torch.OutOfMemoryError, NotACutError):
            raise
        except Exception as error:  # the model's own code refuses what the plan gives it: the next plan is tried
            self._failure = f"{type(error).__name__}: {error}"
        return False

    def _observed(self, cut: Cut, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """What passes the cut, and the model's output."""
        with self._capture(cut) as captured:
            output = self.run(_copied(inputs))
        return captured[0], output

    def _follows(self, cut: Cut, plan: Plan, representation: Representation, output: Any) -> bool:
        """Whether the model's output follows from the representation, and from nothing else of the content."""
        after = run_after(self.model, self.run, cut, plan, self.interface, representation)
        if not same(after, output):
            return False
        with Flow(self.interface.special_ids) as flow:  # which may keep a network from its fused kernels
            for name in self.interface.content:
                flow.mark(representation.context[name])
            return not flow.reaches(run_after(self.model, self.run, cut, plan, self.interface, representation, flow))

    def _probes(self) -> Iterator[dict[str, Any]]:
        """Inputs other than those that the plan was made from: other sizes, ragged, padded right and left.

        No two in a row are of one size: what a forward leaves behind for the next would show.
        """
        if self.interface.modality != "text":
            yield self._vary(1)
            yield {n: v.flip(0) if n in self.interface.content else v for n, v in self._vary(4).items()}
            return
        n = self._tokens + 3
        full = self._vary(3, n)
        for name in self.interface.given:  # what has a length of its own, of another one
            if full[name].shape[1] != n:
                for one in {name, mask_of(name)} & full.keys():
                    full[one] = torch.cat([full[one], full[one][:, -1:]], 1)
        yield full
        mask = self.interface.mask
        if mask in full and (self.interface.pad_id is not None or len(self.interface.content) == 1):
            for left in (False, True):
                n -= 1
                lengths = torch.tensor([n, max(n - 2, 1), 1])
                ragged = self._vary(3, n)
                real = torch.arange(n)[None] < lengths[:, None]
                real = (real.flip(1) if left else real).to(full[mask].device)
                last = (real * torch.arange(1, n + 1, device=real.device)).argmax(1, keepdim=True)
                ends = {name: ragged[name].scatter(1, last, ragged[name][:, -1:]) for name in self.interface.content}
                pad = self.interface.pad_id or 0
                padded = {name: torch.where(real, ids, pad) for name, ids in ends.items()}
                yield {**ragged, **padded, mask: real.long()}

    @contextmanager
    def _capture(self, cut: Cut, poisoned: str | None = None, entering: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Record what passes the cut; optionally let another module return NaN and the cut a given value."""
        captured: list[Tensor] = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> Any:
            values = _tree.get(output, cut.path)
            if values.is_nested:
                raise NotACutError(
                    f"layer {cut.layer!r} of {type(self.model).__name__} returns texts of several lengths as a nested "
                    "tensor in inference, which is no tensor of tokens: build nn.TransformerEncoder with "
                    "enable_nested_tensor=False"
                )
            captured.append(values.clone())
            return output if entering is None else _tree.put(output, cut.path, entering)

        def poison(module: nn.Module, args: Any, output: Any) -> Any:
            return _tree.transform(
                output,
                lambda t: torch.full_like(t, float("nan")) if isinstance(t, Tensor) and t.is_floating_point() else t,
            )

        handles = [self.model.get_submodule(cut.layer).register_forward_hook(at_cut)]
        if poisoned is not None:
            handles.append(self.model.get_submodule(poisoned).register_forward_hook(poison))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def _why_not(self, cut: Cut) -> str:
        """What bypasses a layer: the last module before it whose output matters although the layer's is held fixed."""
        what = f"{type(self.model).__name__} cannot be cut at {cut.layer!r}"
        inputs = next(self._probes())
        with torch.no_grad(), self._capture(cut) as captured:
            expected = self.run(inputs)
        end = self.trace.calls[cut.layer].exited
        before = [c for c in self.trace.calls.values() if c.exited < end and not c.name.startswith(cut.layer + ".")]
        for call in sorted(before, key=lambda c: (-c.exited, len(c.name))):
            if not any(seen.depends for seen in call.seen().values()):
                continue
            try:
                with torch.no_grad(), self._capture(cut, poisoned=call.name, entering=captured[0]):
                    bypasses = not same(expected, self.run(inputs))
            except Exception as error:  # the model's own code refuses the NaN: so it is read
                bypasses, self._failure = True, f"{type(error).__name__}: {error}"
            if bypasses:
                return (
                    f"{what}: the output of {call.name!r} bypasses it (what follows uses it directly)."
                    f"{self._instead(cut)}"
                )
        told = f" The model's own code said: {self._failure}." if self._failure else ""
        return f"{what}: what follows depends on the input by another way than through it.{told}{self._instead(cut)}"

    def _instead(self, cut: Cut) -> str:
        """Where to cut instead: blocks that are verified, else those that may be; none that is refused."""
        known = tuple(name for name in self.blocks if name in self._plans)
        names = known or tuple(n for n in self.blocks if n not in self._refused and n != cut.layer)
        return f" {INSTEAD}{'' if known else ' (not verified yet)'}: {_short(names)}" if names else ""


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are equal: tensors bit for bit and of one dtype, numbers, all else; NaN equal to NaN."""
    left, right = dict(_tree.leaves(a)), dict(_tree.leaves(b))
    return left.keys() == right.keys() and all(_equal(x, right[path]) for path, x in left.items())


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What modules keep beside their parameters as it was afterwards: modules, buffers, plain attributes.

    A forward on a short text may switch a network over for good, or leave something in a buffer.
    """
    kept = [
        (
            module,
            dict(module._modules),
            {
                name: (buffer, buffer.clone())
                for name, buffer in module._buffers.items()
                if buffer is not None and not buffer.is_meta
            },
            {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))},
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, modules, buffers, values in kept:
            module._modules.update(modules)
            for name, (buffer, before) in buffers.items():
                with torch.no_grad():
                    module._buffers[name] = buffer
                    if not (buffer.is_meta or torch.equal(buffer, before)):
                        buffer.copy_(before)
            vars(module).update(values)


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that a forward may overwrite."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _shapes(output: Any) -> Any:
    return _tree.transform(output, lambda leaf: list(leaf.shape) if isinstance(leaf, Seen) else leaf)


def _short(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 8 else ", ".join((*names[:4], "…", *names[-3:]))
