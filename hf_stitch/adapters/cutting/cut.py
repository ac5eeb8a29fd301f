"""A cut: a layer of a network, its representation, and the plan to run each part separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.flow import Flow
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.surgery import Entry, Exit, Gone, Outline, Slot, Stub, swapped
from hf_stitch.options import Fraction, Natural
from hf_stitch.printing import see
from hf_stitch.records import Dtype, Record
from hf_stitch.representation import Representation, RepresentationSpec

Padding = Literal["masked", "behind", "absent", "unknown"]
"""Positions at a cut that are padding.

* ``masked``: the tokens that the attention mask excludes; the mask starts after the prefix tokens;
* ``behind``: the masked tokens, and all positions that the network appended after the tokens;
* ``absent``: none (images, latents, one vector per sample);
* ``unknown``: cannot be determined (the network merged tokens before the cut).
"""


class NotACutError(ValueError):
    """Raised if the network cannot be cut at a layer; the message gives the reason."""

    def __str__(self) -> str:
        return super().__str__() + see("not-a-cut")


@dataclass(frozen=True)
class Cut(Record):
    """An exact cut of a network at a layer.

    :meth:`hf_stitch.Adapter.cut` returns the cut at a layer together with its plan.

    Attributes:
        layer: Name of the module that outputs the representation.
        path: Keys and indices of the representation in the output of the module; empty if the output is a tensor.
        spec: Layout, width, grid and prefix tokens of the representation.
        dtype: dtype of the representation, for example ``"float32"``.
        cost: Share of the network's floating-point operations up to the cut, between 0 and 1.
        axes: Permutation from the axes of the module's output to the layout: (1, 0, 2) if tokens come before
            samples, (0, 2, 1) if channels come before positions. Empty if the axes are already in order.
        padding: Positions of padding: ``masked``, ``behind``, ``absent`` or ``unknown``.
        fold: Number of positions in each row of the first axis if a sample has several rows (tiles of an image): 0 if
            a row is one position, -1 if one row holds all samples; ``None`` (default) if a sample has one row.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import hf_stitch
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(network, example_inputs=torch.randn(2, 4))
        >>> cut, plan = adapter.cut("1")
        >>> str(cut.spec), cut.dtype
        ('bd 8', 'float32')
        >>> Cut.from_dict(cut.to_dict()) == cut
        True
    """

    layer: str
    path: tree.Path
    spec: RepresentationSpec
    dtype: Dtype
    cost: Fraction
    axes: tuple[Natural, ...] = ()
    padding: Padding = "masked"
    fold: int | None = None

    @property
    def around(self) -> tuple[str, ...]:
        """Names of the modules that contain the layer, from the innermost to the model itself (an empty name)."""
        parts = self.layer.split(".")
        return tuple(".".join(parts[:depth]) for depth in reversed(range(len(parts))))

    def restore(self, values: Tensor) -> Tensor:
        """Permute the axes of a representation to their order in the network."""
        if self.fold is not None:
            rows = {-1: (1, -1), 0: (-1,)}.get(self.fold, (-1, self.fold))
            return values.reshape(*rows, values.shape[-1])
        return values.permute([self.axes.index(axis) for axis in range(len(self.axes))]) if self.axes else values

    def accept(self, representation: Representation, interface: Interface) -> Representation:
        """Return a representation unchanged; raise an error if it cannot enter the network at this cut."""
        tokens = interface.modality == "text" and self.spec.layout == "bnd"
        if tokens and self.padding != "masked" and not representation.context:
            raise ValueError(
                f"the representation lacks a context, and none can be created at {self.layer!r} because its positions "
                "are not the tokens of the text: set a context of this network, representation.replace(context=…)"
            )
        return representation

    def represent(self, values: Tensor, inputs: Mapping[str, Any], interface: Interface) -> Representation:
        """Wrap values captured at this cut in a representation with its mask and context."""
        if self.fold is not None:
            values = values.reshape(size_of_inputs(inputs, interface)[0], -1, values.shape[-1])
        values = values.permute(self.axes) if self.axes else values
        mask, padding_unknown = self._mask_of_positions(values, inputs, interface)
        return Representation(
            values,
            self.spec.layout,
            mask=mask,
            prefix_tokens=self.spec.prefix_tokens,
            grid=self.spec.grid if self.spec.layout == "bnd" else None,
            context=interface.erase(inputs),
            padding_unknown=padding_unknown,
        )

    def _mask_of_positions(
        self, values: Tensor, inputs: Mapping[str, Any], interface: Interface
    ) -> tuple[Tensor | None, bool]:
        """Return the mask of the positions (or ``None``), and whether unknown positions may be padding."""
        mask = inputs.get(interface.mask)
        if mask is not None and mask.dim() != 2:  # a mask of queries by keys, not of real tokens
            mask = None
        if self.padding in ("absent", "unknown"):
            return None, self.padding == "unknown" and mask is not None
        batch, tokens = inputs[interface.text or interface.content[0]].shape[:2]
        prefix, appended = self.spec.prefix_tokens, values.shape[1] - self.spec.prefix_tokens - tokens
        if appended < 0 or (appended and self.padding == "masked"):  # unlike in the traced forwards
            return None, mask is not None or appended > 0
        if mask is None and not appended:
            return None, False
        true = values.new_ones(1, dtype=torch.bool)
        # with a cache, the mask covers past tokens too
        real = true.expand(batch, tokens) if mask is None else mask.bool()[:, -tokens:].to(values.device)
        if prefix or appended:
            real = torch.cat([true.expand(batch, prefix), real, ~true.expand(batch, appended)], 1)
        return real, False


def in_context(representation: Representation, interface: Interface) -> Representation:
    """Return a representation with its context; a blank one is added if it lacks one."""
    if representation.context:
        missing = [name for name in interface.content if name not in representation.context]
        if missing:
            raise ValueError(
                f"the representation comes from another network (its context lacks {', '.join(missing)}): drop the "
                "context, representation.replace(context={}), or connect the networks with hf_stitch.stitch"
            )
        return representation
    if not set(interface.given) <= interface.prompt.keys():
        raise ValueError(
            f"the representation lacks a context, and none can be created because this network also requires "
            f"{', '.join(interface.given)}: set a context of this network, representation.replace(context=…), or load "
            "it with one, hf_stitch.load(…, context=…)"
        )
    values, mask = representation.values, representation.mask
    if mask is None and interface.modality == "text":
        mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    if mask is not None:
        mask = mask[:, representation.prefix_tokens :]
    return representation.replace(context=interface.blank(representation.batch, mask, values.device))


def size_of(representation: Representation, interface: Interface) -> tuple[int, int]:
    """Return the batch size and the number of tokens of a representation."""
    if interface.text is None:
        return representation.batch, 0
    ids = representation.context.get(interface.text)
    return representation.batch, ids.shape[1] if ids is not None else representation.values.shape[1]


@dataclass(frozen=True)
class CutPlan(Record):
    """Modules to replace so that each part of a network runs separately.

    :meth:`hf_stitch.Adapter.cut` returns the verified plan of a cut.

    Attributes:
        kind: ``stubs`` replaces everything before the cut that depends on the input; ``full`` replaces only the modules
            that read the content, and the rest computes on empty tensors (for models that do not run otherwise).
        stubs: Module name -> outline of its output, for each replaced module before the cut.
        entry: Outline of the output of the layer; ``None`` if the layer must run because its output also contains
            tensors that do not depend on the input.
        materialise: Whether stubs and erased content allocate their full memory, for code that writes into them.
        after: Module name -> outline of its output, for the modules after the cut that the front half replaces;
            ``None`` for a module that never runs.
        records: Whether transformers collects hidden states with hooks, which the halves also require.

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
        """Return the arguments of the forward of the part after the cut."""
        context = representation.context
        if not self.materialise:
            return context
        return {name: value.clone() if name in interface.content else value for name, value in context.items()}

    def before_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """Return replacement modules by name that let a model run up to the cut; the model does not change."""
        stand_ins = {
            name: Gone(name)
            if rule is None
            else Stub(name, model.get_submodule(name), rule, slot, self.materialise, after=True)
            for name, rule in self.after.items()
        }
        return {**stand_ins, cut.layer: Exit(cut.layer, model.get_submodule(cut.layer), cut.path, slot)}

    def after_cut(self, model: nn.Module, cut: Cut, slot: Slot) -> dict[str, nn.Module]:
        """Return replacement modules by name that let a model run from the cut on; the model does not change."""
        stand_ins: dict[str, nn.Module] = {
            name: Stub(name, model.get_submodule(name), rule, slot, self.materialise)
            for name, rule in self.stubs.items()
        }
        stand_ins[cut.layer] = Entry(cut.layer, model.get_submodule(cut.layer), self.entry, cut.path, slot)
        return stand_ins


def fill(slot: Slot, values: Tensor | None, size: tuple[int, int]) -> None:
    """Reset a slot before a forward."""
    slot.values, (slot.batch, slot.tokens), slot.passed = values, size, False


def captured_values(slot: Slot, cut: Cut) -> Tensor:
    """Return the values that a forward captured at the cut."""
    if slot.values is None:
        raise RuntimeError(f"the forward ended without running layer {cut.layer!r}: no representation was captured")
    return slot.values


def run_part(
    model: nn.Module, run: Callable[[Mapping[str, Any]], Any], interface: Interface,
    start: Representation | Mapping[str, Any], first: tuple[Cut, CutPlan] | None = None,
    last: tuple[Cut, CutPlan] | None = None, flow: Flow | None = None, noise: bool = False,
) -> Any:  # fmt: skip
    """Run a network from one cut to another, and restore it afterwards.

    Without a first cut it starts at its inputs, and without a last cut it ends at its output. All other modules are
    replaced as in the halves.
    """
    entry_slot, exit_slot = Slot(), Slot()
    entry_slot.flow, entry_slot.noise = flow, noise
    stand_ins: dict[str, nn.Module] = {}
    if isinstance(start, Representation):
        assert first is not None
        cut, plan = first
        size = size_of(start, interface)
        fill(entry_slot, cut.restore(start.values), size)
        stand_ins |= plan.after_cut(model, cut, entry_slot)
        arguments = plan.context(start, interface)
    else:
        arguments, size = start, size_of_inputs(start, interface)
    if last is not None:
        fill(exit_slot, None, size)
        stand_ins |= last[1].before_cut(model, last[0], exit_slot)
    if noise:
        arguments = interface.obscure(arguments)
    if flow is not None:
        for name in interface.content:
            flow.mark(arguments[name])
    with swapped(model, stand_ins):
        output = run(arguments)
    return output if last is None else captured_values(exit_slot, last[0])


@dataclass(frozen=True)
class CutInfo:
    """Properties of a layer as a cut, returned by :meth:`Adapter.verify_cut` and :meth:`Adapter.cut_info`.

    Attributes:
        layer: Name of the layer.
        status: ``verified``; ``pending``: a candidate that is verified at its first use or by
            :meth:`Adapter.verify_cut`; or ``refused``.
        spec: Layout, width, grid and prefix tokens of the representation; ``None`` if :meth:`Adapter.verify_cut`
            refused the layer.
        cost: Share of the floating-point operations of the network up to the cut, in [0, 1], which decoding saves;
            ``None`` if :meth:`Adapter.verify_cut` refused the layer.
        plan: ``stubs`` if the modules before the cut are skipped, ``full`` if the code of the model requires them;
            ``None`` if the cut is not verified.
        reason: Why :meth:`Adapter.verify_cut` refused the layer; empty otherwise.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> print(CutInfo("blocks.0", "verified", RepresentationSpec("bnd", 192), 0.25, "stubs"))
        blocks.0: verified, bnd 192, 25% of the cost before it, plan stubs
    """

    layer: str
    status: str
    spec: RepresentationSpec | None = None
    cost: float | None = None
    plan: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.status == "refused":
            return self.reason
        plan = f", plan {self.plan}" if self.plan else ""
        status = "pending (verified at its first use)" if self.status == "pending" else self.status
        return f"{self.layer}: {status}, {self.spec}, {self.cost:.0%} of the cost before it{plan}"
