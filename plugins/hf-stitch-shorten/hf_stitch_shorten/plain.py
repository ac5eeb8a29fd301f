"""The shortened network as an ordinary one: built from its config with fewer blocks, or copied without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.adapters.rewriting import network_of

Removed = Mapping[str, Sequence[int]]
"""Name of a list of modules -> places of the blocks that are removed from it."""

SENTENCES = "sentence_transformers"


class CannotBeRebuiltError(ValueError):
    """No config makes the network with fewer blocks."""


def renamed(removed: Removed) -> Callable[[str], str | None]:
    """Return the function from the name of a module or weight to that without the blocks; ``None`` if it is gone."""

    def rename(name: str) -> str | None:
        for stack, places in removed.items():
            if name.startswith(stack + "."):
                place, _, rest = name[len(stack) + 1 :].partition(".")
                if place.isdecimal():
                    if int(place) in places:
                        return None
                    kept = int(place) - sum(gone < int(place) for gone in places)
                    name = f"{stack}.{kept}" + (f".{rest}" if rest else "")
        return name

    return rename


def without(network: Adapter, removed: Removed) -> Adapter:
    """Return a copy of a network without some blocks, of the same class, and with its processor.

    Networks of transformers and timm are built anew, so that every block knows its place (which a cache needs), and
    are saved and loaded as any other. Modules of your own are copied, and blocks are taken out of the copy.

    Args:
        network: The network.
        removed: What to remove.

    Returns:
        The shorter network, on the same device and in the same dtype.

    Raises:
        CannotBeRebuiltError: If no config makes a network of transformers or timm with these weights.
    """
    if network.library == SENTENCES:
        return _sentence_encoder(network, removed)
    if network.library == "torch":
        model = copy.deepcopy(network.model)
        for stack, places in removed.items():
            _take_out(model, stack, places)
    else:
        model = _rebuilt(network, removed)
    processor = network.processor
    if network.library == "torch" or processor is None:
        return hf_stitch.load(model.eval(), example_inputs=network.example, processor=processor)
    return hf_stitch.load(model.eval(), processor=processor)


def _take_out(model: nn.Module, stack: str, places: Sequence[int]) -> None:
    """Remove modules of a list."""
    blocks: Any = model.get_submodule(stack)
    kept = [block for place, block in enumerate(blocks) if place not in places]
    model.set_submodule(stack, nn.ModuleList(kept) if isinstance(blocks, nn.ModuleList) else nn.Sequential(*kept))


def _sentence_encoder(network: Adapter, removed: Removed) -> Adapter:
    """Return a ``SentenceTransformer`` with a shorter transformer."""
    from sentence_transformers import SentenceTransformer

    encoder: Any = network.model
    first, *others = (encoder.get_submodule(name) for name in encoder.steps)
    whole = first.auto_model
    prefix = next(f"{name}." for name, module in encoder.named_modules() if module is whole)
    inner = hf_stitch.load(whole, processor=network.processor)
    short = without(inner, {stack.removeprefix(prefix): places for stack, places in removed.items()})
    head = copy.deepcopy(first, {id(whole): short.model})
    made = SentenceTransformer(modules=[head, *map(copy.deepcopy, others)])
    return hf_stitch.load(made.eval())


def _rebuilt(network: Adapter, removed: Removed) -> nn.Module:
    """Build a network with fewer blocks from its config, with the weights of the blocks that stay."""
    model, rename = network.model, renamed(removed)
    weights = {new: value for name, value in model.state_dict().items() if (new := rename(name)) is not None}
    shapes = {name: value.shape for name, value in weights.items()}
    record = network.blueprint()
    for stack, places in removed.items():
        length = sum(1 for _ in model.get_submodule(stack).children())
        record = _shallower(record, model, stack, length, tuple(places))
    built = network_of(record)
    if {name: value.shape for name, value in built.state_dict().items()} != shapes:
        raise CannotBeRebuiltError(_WHY.format(type(model).__name__, ", ".join(removed)))
    reference = next(model.parameters())
    built.to(reference.device, reference.dtype).load_state_dict(weights)
    if hasattr(model, "generation_config"):
        built.generation_config = copy.deepcopy(model.generation_config)
    return built.eval()


_WHY = "no setting of the config of {} makes {} shorter: its depth is fixed, or its blocks differ in more than weights"


def _shallower(
    record: dict[str, Any], model: nn.Module, stack: str, length: int, places: tuple[int, ...]
) -> dict[str, Any]:  # fmt: skip
    """Return a blueprint with fewer blocks in a stack: the first change of a number or a list that makes it."""
    for changed in _changes(record, model, stack, length, places):
        try:
            with torch.device("meta"):
                built = network_of(changed)
            blocks = sum(1 for _ in built.get_submodule(stack).children())
        except Exception:  # a number that is no depth
            continue
        if blocks == length - len(places) and _others(built, stack) == _others(model, stack):
            return changed
    raise CannotBeRebuiltError(_WHY.format(type(model).__name__, stack))


def _others(model: nn.Module, stack: str) -> set[str]:
    """Return the names of all weights outside of a stack."""
    return {name for name, _ in model.named_parameters() if not name.startswith(stack + ".")}


def _changes(
    record: dict[str, Any], model: nn.Module, stack: str, length: int, places: tuple[int, ...]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield blueprints in which one number may be the depth of the stack, likely ones first."""
    count = length - len(places)
    part = "config" if "config" in record else "arguments"
    for path, key in sorted(_depths(record[part], length), key=lambda each: "layer" not in each[1]):
        changed = copy.deepcopy(record)
        holder = changed[part]
        for name in path:
            holder = holder[name]
        holder[key] = count
        for name, value in holder.items():
            if isinstance(value, list) and len(value) == length:  # a setting for each block
                holder[name] = [each for place, each in enumerate(value) if place not in places]
        yield changed
    stages, place = _stages(model, stack)
    lists = [*_lists(record[part], stages)]
    if part == "arguments":  # of timm, which are given only where they are not those of the architecture
        lists += [((), "depths"), ((), "layers")]
        yield {**record, part: {**record[part], "depth": count}}
    for path, key in lists if place is not None else ():
        changed = copy.deepcopy(record)
        holder = changed[part]
        for name in path:
            holder = holder[name]
        holder[key] = [count if stage == place else size for stage, size in enumerate(stages)]
        yield changed


def _depths(
    config: Mapping[str, Any], length: int, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the places of numbers that may be the depth."""
    for key, value in config.items():
        if type(value) is int and value == length:
            yield path, key
        elif isinstance(value, dict):
            yield from _depths(value, length, (*path, key))


def _lists(
    config: Mapping[str, Any], stages: Sequence[int], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:  # fmt: skip
    """Yield the places of lists that may be the depths of stages."""
    for key, value in config.items():
        if isinstance(value, list) and value == list(stages):
            yield path, key
        elif isinstance(value, dict):
            yield from _lists(value, stages, (*path, key))


def _stages(model: nn.Module, stack: str) -> tuple[list[int], int | None]:
    """Return the numbers of blocks of all stages, if the stack is a stage, and which stage it is."""
    numbers = [(at, each) for at, each in enumerate(stack) if each.isdecimal()]
    if not numbers:
        return [], None
    at, digit = numbers[-1]
    found, first = [], int(digit)
    names = dict(model.named_modules())
    while first and f"{stack[:at]}{first - 1}{stack[at + 1 :]}" in names:
        first -= 1
    for number in range(first, 100):
        if (name := f"{stack[:at]}{number}{stack[at + 1 :]}") not in names:
            break
        found.append(sum(1 for _ in names[name].children()))
    return found, int(digit) - first
