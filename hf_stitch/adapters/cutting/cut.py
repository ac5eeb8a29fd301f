"""A cut: the place in a network, and the form of the representation there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.representation import Representation, RepresentationSpec

Padding = Literal["masked", "behind", "absent", "unknown"]
"""Which positions at a cut are padding.

Those of the tokens that the mask says, after the prefix; these and all ``behind`` the tokens, which the network added;
none (of an image, of latents, one vector); or nobody knows (tokens merged on the way).
"""


class NotACutError(ValueError):
    """A layer at which the network cannot be cut; the message says why."""


@dataclass(frozen=True)
class Cut:
    """A place where a network can be cut exactly.

    Attributes:
        layer: Name of the module whose output is the representation.
        path: Where in its output the representation is.
        spec: Layout, width, grid and prefix tokens there.
        dtype: dtype of the representation.
        cost: Share of the network's floating-point operations up to here.
        axes: Which axes of the tensor there are those of the form's layout, in its order: (1, 0, 2) for tokens before
            samples, (0, 2, 1) for channels before positions. Empty: they are in order.
        padding: What is known of padding among the positions.
    """

    layer: str
    path: tree.Path
    spec: RepresentationSpec
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
        return cls(**{**config, **lists, "spec": RepresentationSpec(**config["spec"])})

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
        tokens = interface.modality == "text" and self.spec.layout == "bnd"
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
        mask, padding_unknown = self._real(values, inputs, interface)
        return Representation(
            values,
            self.spec.layout,
            mask=mask,
            prefix_tokens=self.spec.prefix_tokens,
            grid=self.spec.grid if self.spec.layout == "bnd" else None,
            context=interface.erase(inputs),
            padding_unknown=padding_unknown,
        )

    def _real(self, values: Tensor, inputs: Mapping[str, Any], interface: Interface) -> tuple[Tensor | None, bool]:
        """The mask of the positions, and whether padding is among them in places that nobody knows."""
        mask = inputs.get(interface.mask)
        if mask is not None and mask.dim() != 2:  # says who attends to whom, not what is real
            mask = None
        if self.padding in ("absent", "unknown"):
            return None, self.padding == "unknown" and mask is not None
        batch, tokens = inputs[interface.content[0]].shape[:2]
        before, behind = self.spec.prefix_tokens, values.shape[1] - self.spec.prefix_tokens - tokens
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
