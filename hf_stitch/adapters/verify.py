"""Whether a plan for a cut is to be believed: it is tried.

The part after the cut must give the model's own output bit for bit, on other batch sizes, other lengths, and with
padding on either side; nothing of the output may be computed from what stands in for the rest, and no code may look at
its values. A bypass through weights that happen to be zero, or through a comparison that happens to come out alike,
shows only so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..representation import Representation
from . import _tree
from .cut import Cut, NotACutError, Plan, run_after, run_before
from .flow import Flow
from .probes import Probes, copied
from .surgery import StubReadError

Run = Callable[[Mapping[str, Any]], Any]


class Verifier:
    """Tries plans on a model.

    Args:
        model: The model.
        run: Calls the model with a mapping of inputs, in eval mode.
        probes: The inputs by which it is tried.

    Attributes:
        read: Modules that the code around them was seen to look into: no plan can do without them.
        failure: What the model's own code last said to a plan.
    """

    def __init__(self, model: nn.Module, run: Run, probes: Probes) -> None:
        """Nothing is tried yet."""
        self.model, self.run, self.probes, self.interface = model, run, probes, probes.interface
        self.read: set[str] = set()
        self.failure = ""

    def holds(self, cut: Cut, plan: Plan) -> bool:
        """Whether both parts give what the whole model gives.

        The whole model runs on all probes first, then the one part on all and the other on all: state that one forward
        left behind does not pass for another's.
        """
        try:
            with torch.no_grad():
                probes = list(self.probes)
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
        except Exception as error:  # the model's own code refuses what the plan gives it: the next plan is tried
            self.failure = f"{type(error).__name__}: {error}"
        return False

    def _observed(self, cut: Cut, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """What passes the cut, and the model's output."""
        with self._capture(cut) as captured:
            output = self.run(copied(inputs))
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

    def bypass(self, cut: Cut, before: Iterable[str]) -> str:
        """The first of some modules before a cut whose output matters although the cut's is held fixed; or nothing."""
        inputs = next(iter(self.probes))
        with torch.no_grad(), self._capture(cut) as captured:
            expected = self.run(inputs)
        for name in before:
            try:
                with torch.no_grad(), self._capture(cut, poisoned=name, entering=captured[0]):
                    if not same(expected, self.run(inputs)):
                        return name
            except Exception as error:  # the model's own code refuses the NaN: so it is read
                self.failure = f"{type(error).__name__}: {error}"
                return name
        return ""


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
