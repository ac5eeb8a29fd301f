"""The two halves of a network as modules of their own, with the weights that run and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_stitch.adapters.cutting.cut import Cut, in_context, size_of
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.plan import CutPlan, came_out, fill
from hf_stitch.adapters.cutting.surgery import Slot, exchange
from hf_stitch.representation import Representation

CHECKPOINTS = ("grad_checkpointing", "gradient_checkpointing")
"""Flags of modules by which timm and transformers checkpoint what is inside."""


class Front(nn.Module):
    """The part of a network up to a cut, as a module of its own: only what runs, no hook.

    Args:
        model: The network; taken over and changed: pass a copy.
        cut: Where it ends.
        plan: What it does without.
        interface: How the network takes its input.
    """

    def __init__(self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface) -> None:
        """Cut off what follows."""
        super().__init__()
        self._slot = Slot()
        _prepare(model, cut, plan)
        exchange(model, plan.before_cut(model, cut, self._slot))
        _persist_buffers(model)
        self.model = model
        self.cut, self.plan, self.interface = cut, plan, interface

    def forward(self, **inputs: Any) -> Representation:
        """The representation at the cut of the network's inputs.

        Raises:
            ValueError: For images or sequences of another size than the cut was verified with.
        """
        _check_size(inputs, self.interface, self.cut)
        fill(self._slot, None, size_of_inputs(inputs, self.interface))
        try:
            self.model(**{**self.interface.options, **inputs})
            return self.cut.represent(came_out(self._slot, self.cut), inputs, self.interface)
        finally:
            self._slot.values = None


class Back(nn.Module):
    """The part of a network after a cut, as a module of its own: only what runs, no hook.

    Like :class:`Front`, it runs in one thread at a time.

    Args:
        model: The network; taken over and changed: pass a copy.
        cut: Where it begins.
        plan: How it runs without what precedes.
        interface: How the network takes its input.
    """

    def __init__(self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface) -> None:
        """Cut off what precedes."""
        super().__init__()
        self._slot = Slot()
        _prepare(model, cut, plan)
        exchange(model, plan.after_cut(model, cut, self._slot))
        _persist_buffers(model)
        self.model = model
        self.cut, self.plan, self.interface = cut, plan, interface

    def forward(self, representation: Representation, **options: Any) -> Any:
        """The network's own output for a representation in the form of the cut.

        Args:
            representation: What enters; without a context of its own a blank one is made.
            **options: Further arguments of the network (a cache).

        Raises:
            ValueError: For a representation of images or sequences of another size than the cut was verified with.
        """
        _check_size(representation.context, self.interface, self.cut)
        representation = in_context(self.cut.accept(representation, self.interface), self.interface)
        fill(self._slot, self.cut.restore(representation.values), size_of(representation, self.interface))
        try:
            context = self.plan.context(representation, self.interface)
            return self.model(**{**self.interface.options, **context, **options})
        finally:
            self._slot.values = None


def _check_size(inputs: Mapping[str, Any], interface: Interface, cut: Cut) -> None:
    """Refuse images and sequences of another size: what a half does without may have told its size to the rest."""
    for name in interface.shapes:
        if name in inputs and tuple(inputs[name].shape[1:]) != interface.shapes[name]:
            raise ValueError(
                f"the network was cut at {cut.layer!r} for {name} of the shape {interface.shapes[name]}, got "
                f"{tuple(inputs[name].shape[1:])}: resize or pad them, or cut it anew, loaded with "
                "example_inputs of that size"
            )


def _prepare(model: nn.Module, cut: Cut, plan: CutPlan) -> None:
    """What must be done before modules are exchanged for good.

    Transformers installs its hooks while every module is there, so that stand-ins have them too; and what is around the
    cut is not checkpointed: in a backward pass it would run again, when the representation is gone.
    """
    for module in map(model.get_submodule, cut.around):
        for flag in CHECKPOINTS:
            if vars(module).get(flag) is True:
                setattr(module, flag, False)
    if plan.records:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        maybe_install_capturing_hooks(model)  # type: ignore[arg-type]


def _persist_buffers(model: nn.Module) -> None:
    """Let every buffer be saved: what a constructor computed on the meta device would come back as garbage."""
    for module in model.modules():
        module._non_persistent_buffers_set.clear()
