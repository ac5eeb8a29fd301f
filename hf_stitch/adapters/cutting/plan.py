"""The plan by which either part of a network runs without the other, and running by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_stitch.adapters.cutting.cut import Cut, size_of
from hf_stitch.adapters.cutting.flow import Flow
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.surgery import Entry, Exit, Gone, Outline, Slot, Stub, swapped
from hf_stitch.representation import Representation


@dataclass(frozen=True)
class CutPlan:
    """How either part of a network runs without the other.

    Attributes:
        kind: ``stubs`` everything before the cut that depends on the input is left out; ``full`` only its sources are,
            and the rest runs on nothing (where the model's own code would not have it otherwise).
        stubs: Outline of each module that is left out, by name.
        entry: Outline of the cut's output, or ``None`` where the cut also computes something from positions alone.
        materialise: Whether stubs and erased content take real memory (where code writes into it).
        after: Outline of each module that runs after the cut only, by name, which the front half has no need of;
            ``None`` for one that never runs.
        records: Whether transformers collects hidden states by hooks, which a half must have too.
    """

    kind: str
    stubs: Mapping[str, Outline]
    entry: Outline | None
    materialise: bool = False
    after: Mapping[str, Outline | None] = field(default_factory=dict)
    records: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> CutPlan:
        """Read :meth:`to_dict`."""
        return cls(**config)

    def context(self, representation: Representation, interface: Interface) -> Mapping[str, Any]:
        """What the part after the cut gets beside a representation."""
        context = representation.context
        if not self.materialise:
            return context
        return {name: value.clone() if name in interface.content else value for name, value in context.items()}

    def before_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """The stand-ins with which a model runs up to the cut."""
        stand_ins = {
            name: Gone(name)
            if rule is None
            else Stub(name, model.get_submodule(name), rule, slot, self.materialise, after=True)
            for name, rule in self.after.items()
        }
        return {**stand_ins, cut.layer: Exit(cut.layer, model.get_submodule(cut.layer), cut.path, slot)}

    def after_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """The stand-ins with which a model runs from the cut on."""
        stand_ins: dict[str, nn.Module] = {
            name: Stub(name, model.get_submodule(name), rule, slot, self.materialise)
            for name, rule in self.stubs.items()
        }
        stand_ins[cut.layer] = Entry(cut.layer, model.get_submodule(cut.layer), self.entry, cut.path, slot)
        return stand_ins


def fill(slot: Slot, values: Tensor | None, size: tuple[int, int]) -> None:
    """Make a representation ready to enter, or room for one to come out."""
    slot.values, (slot.batch, slot.tokens), slot.passed = values, size, False


def run_before(
    model: nn.Module,
    run: Callable[[Mapping[str, Any]], Any],
    cut: Cut,
    plan: CutPlan,
    interface: Interface,
    inputs: Mapping[str, Any],
) -> Representation:
    """Run what precedes the cut, as the front half will; the model is as it was afterwards."""
    slot = Slot()
    fill(slot, None, size_of_inputs(inputs, interface))
    with swapped(model, plan.before_cut(model, cut, slot)):
        run(inputs)
    return cut.represent(came_out(slot, cut), inputs, interface)


def came_out(slot: Slot, cut: Cut) -> Tensor:
    if slot.values is None:
        raise RuntimeError(f"the forward ended without passing layer {cut.layer!r}")
    return slot.values


def run_after(
    model: nn.Module,
    run: Callable[[Mapping[str, Any]], Any],
    cut: Cut,
    plan: CutPlan,
    interface: Interface,
    representation: Representation,
    flow: Flow | None = None,
    noise: bool = False,
) -> Any:
    """Run what follows the cut on a representation.

    Nothing before it is computed, and the model is as it was afterwards. ``flow`` follows what stands in for the rest;
    with ``noise`` that is noise.
    """
    slot = Slot()
    slot.flow, slot.noise = flow, noise
    fill(slot, cut.restore(representation.values), size_of(representation, interface))
    with swapped(model, plan.after_cut(model, cut, slot)):
        context = plan.context(representation, interface)
        return run(interface.obscure(context) if noise else context)
