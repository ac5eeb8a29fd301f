"""Hidden states and attentions of both halves of a stitched model, as networks of transformers return them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from hf_stitch.adapters.cutting.halves import Back, Front, Observed
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.representation import Representation

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel

KEPT = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Argument -> entry of the output."""


class Depth(NamedTuple):
    """The layer at which a half is cut, and the number of layers of its network."""

    layer: int
    layers: int


def depth_of(half: Front | Back) -> Depth | None:
    """Return where a half is cut, if its network is a list of layers, whose outputs are its hidden states."""
    parent, _, last = half.cut.layer.rpartition(".")
    if not parent or not last.isdecimal() or isinstance(half, PrefixFront) or not hasattr(half.model, "config"):
        return None
    layers = half.model.get_submodule(parent)
    return Depth(int(last), len(layers)) if isinstance(layers, nn.ModuleList) else None


def number_of_layers(source: Front, target: Back) -> int | None:
    """Return the number of hidden states - 1: the layers of both halves that run, and the stitch between them."""
    first, last = depth_of(source), depth_of(target)
    return None if first is None or last is None else first.layer + 1 + last.layers - last.layer


def asked_of(model: StitchedModel, inputs: MutableMapping[str, Any]) -> dict[str, Any]:
    """Take the arguments that ask for hidden states and attentions from inputs, or else from the config.

    Hidden states may be asked for by their numbers. A half that is not cut at one of a list of layers gives none, which
    is an error before anything runs.
    """
    given = {name: inputs.pop(name, None) for name in KEPT}
    wanted = {name: getattr(model.config, name, None) if value is None else value for name, value in given.items()}
    asked = {name: value for name, value in wanted.items() if value is not None and value is not False}
    for half in (model.source, model.target) if asked else ():
        if depth_of(half) is None:
            raise _gives_none(half, next(iter(asked)))
    return asked


def flags(half: Front | Back, asked: Iterable[str]) -> dict[str, bool]:
    """Return the arguments that ask the network of a half, without those that it does not take."""
    known = inspect.signature(half.model.forward).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
    return {name: True for name in asked if anything or name in known}


def joined(
    model: StitchedModel, asked: Mapping[str, Any], seen: Observed, entering: Representation, output: Any
) -> Mapping[str, tuple[Any, ...]]:
    """Join what both halves computed.

    Hidden states are those of the source up to its cut, the mapped ones, and those of the target after its cut, each in
    the layout of its network. Attentions are those of all layers that run, in each half whose network has attentions.
    """
    found: dict[str, tuple[Any, ...]] = {}
    source, target = model.source, model.target
    first, last = depth_of(source), depth_of(target)
    assert first is not None and last is not None  # checked when they were asked for
    left = last.layers - 1 - last.layer
    for name, wanted in asked.items():
        before, after = (getattr(each, KEPT[name], None) for each in (seen.output, output))
        hidden = name == "output_hidden_states"
        for half, values in ((source, before), (target, after)):
            if values is None and (hidden or before is after):
                raise _gives_none(half, name)
        head = tuple(before or ())[: first.layer + 1]  # with hidden states, those of the embeddings and before the cut
        tail = tuple(after or ())[len(after or ()) - left :] if left else ()
        mapped = target.cut.restore(target.cut.accept(entering, target.interface).values)
        every = (*head, seen.values, mapped, *tail) if hidden else (*head, *tail)
        if hidden and wanted is not True:
            numbers = [wanted] if isinstance(wanted, int) else [*wanted]
            if beyond := [number for number in numbers if not -len(every) <= number < len(every)]:
                raise ValueError(
                    f"output_hidden_states names {beyond}, but there are {len(every)} hidden states, from 0"
                )
            kept = {number % len(every) for number in numbers}
            every = tuple(value if number in kept else None for number, value in enumerate(every))
        found[KEPT[name]] = every
    return found


def _gives_none(half: Front | Back, name: str) -> ValueError:
    return ValueError(
        f"{type(half.model).__name__}, cut at {half.cut.layer!r}, gives no {KEPT[name]} ({name}): representations at "
        "any layer of a network are returned by hf_stitch.load(network).encode"
    )


def seen_in(output: Any) -> dict[str, Any]:
    """Return the hidden states and attentions of an output, by name."""
    found = {name: getattr(output, name, None) for name in KEPT.values()}
    return {name: value for name, value in found.items() if value is not None}
