"""Whether a plan for a cut is to be believed: it is tried.

The part after the cut must give the model's own output bit for bit, on other batch sizes, other lengths, and with
padding on either side; nothing of the output may be computed from what stands in for the rest, and no code may look at
its values. A bypass through weights that happen to be zero, or through a comparison that happens to come out alike,
shows only so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, NotACutError
from hf_stitch.adapters.cutting.flow import Flow, ValuesReadError
from hf_stitch.adapters.cutting.plan import CutPlan, run_after, run_before
from hf_stitch.adapters.cutting.surgery import StubReadError
from hf_stitch.adapters.discovery.probes import Probes, copied
from hf_stitch.representation import Representation

Run = Callable[[Mapping[str, Any]], Any]


class Verifier:
    """Tries plans on a model.

    Args:
        model: The model.
        run: Calls the model with a mapping of inputs, in eval mode.
        probes: The inputs by which it is tried.

    Attributes:
        read: Modules that the code around them was seen to look into: no plan can do without them.
    """

    def __init__(self, model: nn.Module, run: Run, probes: Probes) -> None:
        """Nothing is tried yet."""
        self.model, self.run, self.probes, self.interface = model, run, probes, probes.interface
        self.read: set[str] = set()
        self._reading: dict[str, str] = {}
        self._failure: dict[str, str] = {}

    def failure(self, cut: Cut) -> str:
        """What the model's own code said to plans for a cut: that it reads values before it, or what it said last."""
        return self._reading.get(cut.layer) or self._failure.get(cut.layer, "")

    def holds(self, cut: Cut, plan: CutPlan) -> bool:
        """Whether both parts give what the whole model gives.

        The whole model runs on all probes first, then the one part on all and the other on all: state that one forward
        left behind does not pass for another's.
        """
        try:
            with torch.no_grad():
                probes = [*self.probes, *self._further]
                whole = [self._observed(cut, inputs) for inputs in probes]
                seen = [
                    cut.represent(values, inputs, self.interface)
                    for inputs, (values, _) in zip(probes, whole, strict=True)
                ]
                before = [run_before(self.model, self.run, cut, plan, self.interface, copied(p)) for p in probes]
                return all(same(a.values, b.values) for a, b in zip(before, seen, strict=True)) and all(
                    self._follows(cut, plan, representation, output)
                    for representation, (_, output) in zip(seen, whole, strict=True)
                )
        except StubReadError as error:
            self.read.add(error.stub)
        except (torch.OutOfMemoryError, NotACutError):
            raise
        except ValuesReadError as error:
            self._reading[cut.layer] = f"{type(error).__name__}: {error}"
        except Exception as error:  # the model's own code refuses what the plan gives it: the next plan is tried
            self._failure[cut.layer] = f"{type(error).__name__}: {error}"
        return False

    @cached_property
    def _further(self) -> list[dict[str, Any]]:
        """The further probes that the network takes."""

        def runs(inputs: Mapping[str, Any]) -> bool:
            try:
                self.run(copied(inputs))
            except Exception:
                return False
            return True

        return [inputs for inputs in self.probes.further() if runs(inputs)]

    def _observed(self, cut: Cut, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """What passes the cut, and the model's output."""
        with self._capture(cut) as captured:
            output = self.run(copied(inputs))
        if not captured:
            raise NotACutError(
                f"layer {cut.layer!r} of {type(self.model).__name__} does not run for all inputs (not for "
                f"{len(inputs[self.interface.content[0]])} samples)"
            )
        return captured[0], output

    def _follows(self, cut: Cut, plan: CutPlan, representation: Representation, output: Any) -> bool:
        """Whether the model's output follows from the representation, and from nothing else of the content."""
        after = run_after(self.model, self.run, cut, plan, self.interface, representation)
        if not same(after, output):
            return False
        largest = max((m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)), default=0) - 1
        with Flow(self.interface.special_ids, largest) as flow:  # which may keep a network from its fused kernels
            for name in self.interface.content:
                flow.mark(representation.context[name])
            if flow.reaches(run_after(self.model, self.run, cut, plan, self.interface, representation, flow)):
                return False
        # what no operation shows (kernels of its own, threads) would come out otherwise
        return same(run_after(self.model, self.run, cut, plan, self.interface, representation, noise=True), output)

    @contextmanager
    def _capture(self, cut: Cut, poisoned: str | None = None, entering: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Record what passes the cut; optionally let another module return NaN and the cut a given value."""
        captured: list[Tensor] = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> Any:
            values = tree.get(output, cut.path)
            if values.is_nested:
                raise NotACutError(
                    f"layer {cut.layer!r} of {type(self.model).__name__} returns texts of several lengths as a nested "
                    "tensor in inference, which is no tensor of tokens: build nn.TransformerEncoder with "
                    "enable_nested_tensor=False"
                )
            captured.append(values.clone())
            return output if entering is None else tree.put(output, cut.path, entering)

        def poison(module: nn.Module, args: Any, output: Any) -> Any:
            return tree.transform(
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

    def bypass(self, cut: Cut, before: Iterable[str]) -> str:
        """The first of some modules before a cut whose output matters although the cut's is held fixed; or nothing."""
        inputs = self.probes.vary(2)
        with torch.no_grad():
            values, expected = self._observed(cut, inputs)
        for name in before:
            try:
                with torch.no_grad(), self._capture(cut, poisoned=name, entering=values):
                    if not same(expected, self.run(copied(inputs))):
                        return name
            except Exception as error:  # the model's own code refuses the NaN: so it is read
                self._failure[cut.layer] = f"{type(error).__name__}: {error}"
                return name
        return ""


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are equal: tensors bit for bit and of one dtype, numbers, all else; NaN equal to NaN."""
    left, right = dict(tree.leaves(a)), dict(tree.leaves(b))
    return left.keys() == right.keys() and all(_equal(x, right[path]) for path, x in left.items())


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What modules keep beside their parameters as it was afterwards: modules, buffers, attributes, lists and dicts.

    A forward on a short text may switch a network over for good, or leave something in a buffer. (Attributes with a
    leading underscore are left: by these libraries note which hooks they have installed.)
    """
    modules = [(module, dict(module._modules), dict(module._buffers)) for module in model.modules()]
    attributes = [
        (module, {n: v for n, v in vars(module).items() if not n.startswith("_")}) for module in model.modules()
    ]
    lists = [(v, list(v)) for _, values in attributes for v in values.values() if type(v) is list]
    dicts = [(v, dict(v)) for _, values in attributes for v in values.values() if type(v) is dict]
    buffers = {id(buffer): buffer for _, _, held in modules for buffer in held.values() if buffer is not None}
    before = [(buffer, buffer.clone()) for buffer in buffers.values() if not buffer.is_meta]
    try:
        yield
    finally:
        for module, children, held in modules:
            module._modules.update(children)
            module._buffers.update(held)
        for module, values in attributes:
            for name in [name for name in vars(module) if not name.startswith("_") and name not in values]:
                del vars(module)[name]
            vars(module).update(values)
        for now, then in lists:
            now[:] = then
        for table, entries in dicts:
            table.clear()
            table.update(entries)
        with torch.no_grad():
            for buffer, was in before:
                if not (buffer.is_meta or torch.equal(buffer, was)):
                    buffer.copy_(was)
