"""Plans to run either part of a network without the other, and their execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from hf_stitch.adapters.cutting.cut import Cut, size_of
from hf_stitch.adapters.cutting.flow import Flow
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.surgery import Entry, Exit, Gone, Outline, Slot, Stub, swapped
from hf_stitch.records import Record
from hf_stitch.representation import Representation


@dataclass(frozen=True)
class CutPlan(Record):
    """Which modules are replaced so that either part of a network runs without the other.

    :meth:`hf_stitch.Adapter.cut` returns the verified plan of a cut.

    Attributes:
        kind: ``stubs`` replaces everything before the cut that depends on the input; ``full`` replaces only the modules
            that read the content, and the others compute on empty tensors (for models that do not run otherwise).
        stubs: Module name -> outline of its output, for each replaced module before the cut.
        entry: Outline of the output of the layer; ``None`` if the layer must run because its output also contains
            tensors that do not depend on the input.
        materialise: Whether stubs and erased content allocate their full memory, for code that writes into them.
        after: Module name -> outline of its output, for each module that runs only after the cut and that the front
            half replaces; ``None`` for a module that never runs.
        records: Whether transformers collects hidden states with hooks, which the halves need too.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import hf_stitch
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(network, example_inputs=torch.randn(2, 4))
        >>> cut, plan = adapter.cut("1")
        >>> plan.kind, sorted(plan.stubs), sorted(plan.after)
        ('stubs', ['0'], ['2'])
    """

    kind: Literal["stubs", "full"]
    stubs: Mapping[str, Outline]
    entry: Outline | None
    materialise: bool = False
    after: Mapping[str, Outline | None] = field(default_factory=dict)
    records: bool = False

    def context(self, representation: Representation, interface: Interface) -> Mapping[str, Any]:
        """Return the arguments of the forward of the part after the cut.

        Args:
            representation: Representation with a context.
            interface: How the network takes its input.

        Returns:
            The context, with writable copies of the content if :attr:`materialise` is set.
        """
        context = representation.context
        if not self.materialise:
            return context
        return {name: value.clone() if name in interface.content else value for name, value in context.items()}

    def before_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """Return the replacement modules with which a model runs up to the cut.

        Args:
            model: The network; it is not changed.
            cut: Cut at which the part ends.
            slot: State that the replacement modules share.

        Returns:
            Module name -> replacement.
        """
        stand_ins = {
            name: Gone(name)
            if rule is None
            else Stub(name, model.get_submodule(name), rule, slot, self.materialise, after=True)
            for name, rule in self.after.items()
        }
        return {**stand_ins, cut.layer: Exit(cut.layer, model.get_submodule(cut.layer), cut.path, slot)}

    def after_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """Return the replacement modules with which a model runs from the cut on.

        Args:
            model: The network; it is not changed.
            cut: Cut at which the part begins.
            slot: State that the replacement modules share.

        Returns:
            Module name -> replacement.
        """
        stand_ins: dict[str, nn.Module] = {
            name: Stub(name, model.get_submodule(name), rule, slot, self.materialise)
            for name, rule in self.stubs.items()
        }
        stand_ins[cut.layer] = Entry(cut.layer, model.get_submodule(cut.layer), self.entry, cut.path, slot)
        return stand_ins


def fill(slot: Slot, values: Tensor | None, size: tuple[int, int]) -> None:
    """Reset a slot before a forward."""
    slot.values, (slot.batch, slot.tokens), slot.passed = values, size, False


def came_out(slot: Slot, cut: Cut) -> Tensor:
    """Return the values that a forward captured at the cut."""
    if slot.values is None:
        raise RuntimeError(f"the forward ended without running layer {cut.layer!r}: no representation was captured")
    return slot.values


def run_part(
    model: nn.Module, run: Callable[[Mapping[str, Any]], Any], interface: Interface,
    given: Representation | Mapping[str, Any], first: tuple[Cut, CutPlan] | None = None,
    last: tuple[Cut, CutPlan] | None = None, flow: Flow | None = None, noise: bool = False,
) -> Any:  # fmt: skip
    """Run a network from one cut to another, and restore it afterwards.

    Without a first cut it runs on its inputs, and without a last one to its output. The other modules are replaced as
    in the halves.
    """
    entering, leaving = Slot(), Slot()
    entering.flow, entering.noise = flow, noise
    stand_ins: dict[str, nn.Module] = {}
    if isinstance(given, Representation):
        assert first is not None
        cut, plan = first
        size = size_of(given, interface)
        fill(entering, cut.restore(given.values), size)
        stand_ins |= plan.after_cut(model, cut, entering)
        arguments = plan.context(given, interface)
    else:
        arguments, size = given, size_of_inputs(given, interface)
    if last is not None:
        fill(leaving, None, size)
        stand_ins |= last[1].before_cut(model, last[0], leaving)
    if noise:
        arguments = interface.obscure(arguments)
    if flow is not None:
        for name in interface.content:
            flow.mark(arguments[name])
    with swapped(model, stand_ins):
        output = run(arguments)
    return output if last is None else came_out(leaving, last[0])
