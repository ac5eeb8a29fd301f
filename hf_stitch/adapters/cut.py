"""A cut: the place in a network, the form of the representation there, and the plan by which the rest runs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_stitch.adapters import _tree
from hf_stitch.adapters.flow import Flow
from hf_stitch.adapters.surgery import Entry, Exit, Gone, Outline, Slot, Stub, exchange, noise, swapped
from hf_stitch.representation import Form, Representation

MASK = "attention_mask"

Padding = Literal["masked", "behind", "absent", "unknown"]
"""Which positions at a cut are padding.

Those of the tokens that the mask says, after the prefix; these and all ``behind`` the tokens, which the network added;
none (of an image, of latents, one vector); or nobody knows (tokens merged on the way).
"""


DECODER = "decoder_"
"""How the names of the arguments begin that are for the decoder of an encoder-decoder."""


CHECKPOINTS = ("grad_checkpointing", "gradient_checkpointing")
"""Flags of modules by which timm and transformers checkpoint what is inside."""


def mask_of(name: str) -> str:
    """Name of the argument that tells real tokens of an argument of token ids from padding."""
    return DECODER + MASK if name.startswith(DECODER) else MASK


class NotACutError(ValueError):
    """A layer at which the network cannot be cut; the message says why."""


@dataclass(frozen=True)
class Interface:
    """How a model takes its input.

    Attributes:
        content: Names of the arguments that carry the content: pixels or token ids.
        modality: ``image``, ``text`` or ``tensor``.
        shapes: Shape of one sample of each content argument that is not token ids, at the model's native size.
        dtypes: dtype of each of these.
        options: Arguments that every forward gets (``use_cache=False``).
        special_ids: Token ids that a head may look for (padding, end of text); all others are erased from the context.
        filler_id: The id that stands for an erased one.
        pad_id: The id of padding.
        arguments: What else a tokenizer may give that the model accepts (mask, token types).
        max_tokens: Longest text that the model takes; ``None``: no limit.
        given: Arguments beside the content that every input must hold: what the other stack of an encoder-decoder
            reads. They belong to the context.
        start_id: The id with which the text of an encoder-decoder's decoder begins.
    """

    content: tuple[str, ...]
    modality: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    filler_id: int = 0
    pad_id: int | None = None
    arguments: tuple[str, ...] = ()
    max_tokens: int | None = None
    given: tuple[str, ...] = ()
    start_id: int | None = None

    @property
    def mask(self) -> str:
        """Name of the argument that tells real tokens of the content from padding."""
        return mask_of(self.content[0])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Interface:
        """Read :meth:`to_dict`."""
        lists = {key: tuple(config.get(key, ())) for key in ("content", "special_ids", "arguments", "given")}
        return cls(**{**config, **lists, "shapes": {name: tuple(shape) for name, shape in config["shapes"].items()}})

    def erase(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The context of an input: its arguments with the content erased.

        Values become zeros of the same shape that take no memory; token ids become one filler id, but for the special
        ones.
        """
        context = dict(inputs)
        for name in self.content:
            value = inputs[name]
            if value.is_floating_point():
                context[name] = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
            else:
                special = torch.isin(value, torch.tensor(self.special_ids, dtype=value.dtype, device=value.device))
                context[name] = torch.where(special, value, self.filler_id)
        return context

    def obscure(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """A context with noise in place of values that were erased."""
        erased = {n: context[n] for n in self.content if context[n].is_floating_point()}
        return {**context, **{n: noise(value.shape, value.dtype, value.device) for n, value in erased.items()}}

    def blank(self, batch: int, mask: Tensor | None, device: torch.device) -> dict[str, Any]:
        """A context for representations that come from elsewhere.

        Of ``batch`` samples, for text with this (batch, tokens) mask.
        """
        if self.modality == "text":
            assert mask is not None
            ids = torch.full(mask.shape, self.filler_id, device=device)
            if self.pad_id is not None:
                ids = torch.where(mask, ids, self.pad_id)
            return {**dict.fromkeys(self.content, ids), self.mask: mask.long()}
        return {
            name: torch.zeros((), dtype=getattr(torch, self.dtypes[name]), device=device).expand(
                batch, *self.shapes[name]
            )
            for name in self.content
        }


@dataclass(frozen=True)
class Plan:
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
    def from_dict(cls, config: Mapping[str, Any]) -> Plan:
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


@dataclass(frozen=True)
class Cut:
    """A place where a network can be cut exactly.

    Attributes:
        layer: Name of the module whose output is the representation.
        path: Where in its output the representation is.
        form: Layout, width, grid and prefix tokens there.
        dtype: dtype of the representation.
        cost: Share of the network's floating-point operations up to here.
        axes: Which axes of the tensor there are those of the form's layout, in its order: (1, 0, 2) for tokens before
            samples, (0, 2, 1) for channels before positions. Empty: they are in order.
        padding: What is known of padding among the positions.
    """

    layer: str
    path: _tree.Path
    form: Form
    dtype: str
    cost: float
    axes: tuple[int, ...] = ()
    padding: Padding = "masked"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Cut:
        """Read :meth:`to_dict`."""
        lists = {"path": tuple(config["path"]), "axes": tuple(config.get("axes", ()))}
        return cls(**{**config, **lists, "form": Form(**config["form"])})

    @property
    def around(self) -> tuple[str, ...]:
        """Names of the modules that the layer is inside of, the model itself (an empty name) last."""
        parts = self.layer.split(".")
        return tuple(".".join(parts[:depth]) for depth in reversed(range(len(parts))))

    def restore(self, values: Tensor) -> Tensor:
        """The values of a representation with their axes as the network has them at this cut."""
        return values.permute([self.axes.index(axis) for axis in range(len(self.axes))]) if self.axes else values

    def accept(self, representation: Representation, interface: Interface) -> Representation:
        """The representation, if it can enter here.

        Raises:
            ValueError: If it comes from another network, without a context, and this place has no tokens to tell the
                length of the text by.
        """
        tokens = interface.modality == "text" and self.form.layout == "bnd"
        if tokens and self.padding != "masked" and not representation.context:
            raise ValueError(
                f"at {self.layer!r} this network has no tokens, so that no blank context can be made for a "
                "representation of another one: give it a context of this network's own, "
                "representation.replace(context=…)"
            )
        return representation

    def represent(self, values: Tensor, inputs: Mapping[str, Any], interface: Interface) -> Representation:
        """The values captured at this cut as a representation, with its mask and context."""
        values = values.permute(self.axes) if self.axes else values
        mask, blurred = self._real(values, inputs, interface)
        return Representation(
            values,
            self.form.layout,
            mask=mask,
            prefix_tokens=self.form.prefix_tokens,
            grid=self.form.grid if self.form.layout == "bnd" else None,
            context=interface.erase(inputs),
            blurred=blurred,
        )

    def _real(self, values: Tensor, inputs: Mapping[str, Any], interface: Interface) -> tuple[Tensor | None, bool]:
        """The mask of the positions, and whether padding is among them in places that nobody knows."""
        mask = inputs.get(interface.mask)
        if mask is not None and mask.dim() != 2:  # says who attends to whom, not what is real
            mask = None
        if self.padding in ("absent", "unknown"):
            return None, self.padding == "unknown" and mask is not None
        batch, tokens = inputs[interface.content[0]].shape[:2]
        before, behind = self.form.prefix_tokens, values.shape[1] - self.form.prefix_tokens - tokens
        if behind < 0 or (behind and self.padding == "masked"):  # the network did what it did not when it was watched
            return None, mask is not None or behind > 0
        if mask is None and not behind:
            return None, False
        one = values.new_ones(1, dtype=torch.bool)
        # with a cache, the mask covers the past too
        real = one.expand(batch, tokens) if mask is None else mask.bool()[:, -tokens:]
        if before or behind:
            real = torch.cat([one.expand(batch, before), real, ~one.expand(batch, behind)], 1)
        return real, False


def in_context(representation: Representation, interface: Interface) -> Representation:
    """The representation with a context: its own, or a blank one where it comes from another network."""
    if representation.context:
        missing = [name for name in interface.content if name not in representation.context]
        if missing:
            raise ValueError(
                f"this representation was made by another network (its context lacks {', '.join(missing)}): drop the "
                "context, "
                "representation.replace(context={}), or join the networks with hf_stitch.stitch"
            )
        return representation
    if interface.given:
        raise ValueError(
            f"this network also reads {', '.join(interface.given)}, so that no blank context can be made for a "
            "representation of another one: give it a context of this network's own, "
            "representation.replace(context=…)"
        )
    values, mask = representation.values, representation.mask
    if mask is None and interface.modality == "text":
        mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    if mask is not None:
        mask = mask[:, representation.prefix_tokens :]
    return representation.replace(context=interface.blank(representation.batch, mask, values.device))


def size_of(representation: Representation, interface: Interface) -> tuple[int, int]:
    """Batch size and, for text, number of tokens of a representation."""
    if interface.modality != "text":
        return representation.batch, 0
    ids = representation.context.get(interface.content[0])
    return representation.batch, ids.shape[1] if ids is not None else representation.values.shape[1]


def size_of_inputs(inputs: Mapping[str, Any], interface: Interface) -> tuple[int, int]:
    """Batch size and, for text, number of tokens of inputs."""
    content = inputs[interface.content[0]]
    return content.shape[0], content.shape[1] if interface.modality == "text" else 0


def fill(slot: Slot, values: Tensor | None, size: tuple[int, int]) -> None:
    """Make a representation ready to enter, or room for one to come out."""
    slot.values, (slot.batch, slot.tokens), slot.passed = values, size, False


def run_before(
    model: nn.Module,
    run: Callable[[Mapping[str, Any]], Any],
    cut: Cut,
    plan: Plan,
    interface: Interface,
    inputs: Mapping[str, Any],
) -> Representation:
    """Run what precedes the cut, as the front half will; the model is as it was afterwards."""
    slot = Slot()
    fill(slot, None, size_of_inputs(inputs, interface))
    with swapped(model, plan.before_cut(model, cut, slot)):
        run(inputs)
    return cut.represent(_came_out(slot, cut), inputs, interface)


def _came_out(slot: Slot, cut: Cut) -> Tensor:
    if slot.values is None:
        raise RuntimeError(f"the forward ended without passing layer {cut.layer!r}")
    return slot.values


def run_after(
    model: nn.Module,
    run: Callable[[Mapping[str, Any]], Any],
    cut: Cut,
    plan: Plan,
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


class Front(nn.Module):
    """The part of a network up to a cut, as a module of its own: only what runs, no hook.

    Args:
        model: The network; taken over and changed: pass a copy.
        cut: Where it ends.
        plan: What it does without.
        interface: How the network takes its input.
    """

    def __init__(self, model: nn.Module, cut: Cut, plan: Plan, interface: Interface) -> None:
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
            return self.cut.represent(_came_out(self._slot, self.cut), inputs, self.interface)
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

    def __init__(self, model: nn.Module, cut: Cut, plan: Plan, interface: Interface) -> None:
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


def _prepare(model: nn.Module, cut: Cut, plan: Plan) -> None:
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
