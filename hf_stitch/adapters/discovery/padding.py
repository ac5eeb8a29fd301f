"""Trial runs to find the padding that leaves the activations of a network unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.interface import MASK, POSITIONS, Interface, Side, positions_of
from hf_stitch.adapters.discovery.verify import Run, unchanged
from hf_stitch.adapters.preprocess import decoder_inputs
from hf_stitch.printing import warn

PADDED, LARGEST, INTEGERS = 2, 1e30, 0.1
"""Number of padding tokens in a trial, threshold of outputs that mark excluded tokens, and tolerance for integers."""


@torch.no_grad()
def probe_padding(model: nn.Module, run: Run, interface: Interface, text: Tensor | None, pad: int | None) -> Interface:
    """Return the interface of a network of texts, with the sides where padding leaves activations unchanged.

    Texts run without padding, then padded on each side, with position ids if the network accepts them. If no side
    remains, texts are grouped by length; if padding is unknown or tokens are merged, a warning is issued instead.
    ``pad`` is the padding token of the tokenizer, ``None`` without a tokenizer.
    """
    sides, by_length = interface.sides, pad == interface.pad_id
    if interface.mask not in interface.arguments:
        sides = sides if pad is None else ()  # padding would count as text
    elif text is not None:
        text = text[:2, : max((interface.max_tokens or text.shape[1] + PADDED) - PADDED, 0)]
        fill, ones = interface.pad_id or 0 if pad is None else pad, torch.ones_like(text)
        with unchanged(model), suppress(Exception):  # forwards on the user's inputs raise it again
            unpadded = _activations(model, run, interface, {"input_ids": text, MASK: ones})
            padded = {"input_ids": _padded_right_and_left(text, fill), MASK: _padded_right_and_left(ones, 0)}
            padded[POSITIONS] = positions_of(padded[MASK])
            padded_outputs = _activations(model, run, interface, padded)
            tolerance = INTEGERS if _has_integers(model) else 0.0
            sides = tuple(
                side for side in get_args(Side) if _is_unchanged(unpadded, padded_outputs, side, text, tolerance)
            )
            lengthened = {padded_outputs[key].shape[1] - v.shape[1] for key, v in unpadded.items() if v.dim() == 3}
            by_length = lengthened <= {0, PADDED}
    if "right" not in sides and POSITIONS in interface.arguments:  # the network computes other positions
        arguments = tuple(name for name in interface.arguments if name != POSITIONS)
        sides, interface = (), replace(interface, arguments=arguments)
    if sides or (by_length and not interface.given):
        return replace(interface, sides=sides)
    warn(
        f"the activations of {type(model).__name__} depend on the batch because any padding changes them and texts "
        "cannot be grouped by length: set batch_size=1"
    )
    return replace(interface, sides=("right",))  # a decoder does not attend to it


def _padded_right_and_left(values: Tensor, fill: int) -> Tensor:
    """Return texts padded on the right, and then on the left."""
    padding = values.new_full((len(values), PADDED), fill)
    return torch.cat([torch.cat([values, padding], 1), torch.cat([padding, values], 1)])


def _activations(model: nn.Module, run: Run, interface: Interface, inputs: Mapping[str, Tensor]) -> dict[Any, Tensor]:
    """Run a network on the inputs that it accepts, and return the outputs of its blocks and its final output."""
    outputs: dict[Any, Tensor] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.update({(module, path): v.clone() for path, v in tree.tensors(output).items() if v.dim() > 1})

    if interface.given:
        inputs = {**inputs, **decoder_inputs(inputs, interface)}
    names = {*interface.content, *interface.given, *interface.arguments}
    stacks = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    with ExitStack() as hooks:
        for module in {model, *(block for stack in stacks for block in stack.children())}:
            hooks.callback(module.register_forward_hook(record).remove)
        run({name: value for name, value in inputs.items() if name in names})
    return outputs


def _has_integers(model: nn.Module) -> bool:
    """Return whether layers multiply integers, with scales that depend on all tokens of a batch."""
    weights = model.state_dict().values()  # packed weights are tuples
    return any(isinstance(v, tuple) or (isinstance(v, Tensor) and v.element_size() == 1) for v in weights)


def _is_unchanged(
    unpadded: Mapping[Any, Tensor], padded: Mapping[Any, Tensor], side: Side, text: Tensor, tolerance: float
) -> bool:
    """Return whether padding on a side leaves the activations of real tokens unchanged, up to rounding."""
    for key, expected in unpadded.items():
        rows, first = (padded[key][: len(text)], 0) if side == "right" else (padded[key][len(text) :], PADDED)
        values = rows[:, first : first + text.shape[1]] if rows.shape[1] == text.shape[1] + PADDED else rows
        if expected.shape == values.shape and expected.is_floating_point():
            sizes = expected.abs().where(expected.abs() < LARGEST, 0)
            size = sizes.amax(-1, keepdim=True) if sizes.dim() > 2 else sizes.max()  # of each token
            allowed = max(max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps) ** 0.6, tolerance)
            if not bool(((values - expected).abs().where(values != expected, 0) <= allowed * size).all()):
                return False
    return True
