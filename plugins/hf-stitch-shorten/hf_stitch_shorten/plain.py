"""Ordinary networks with fewer blocks: rebuilt from a config, or copied without the blocks."""

from __future__ import annotations

import copy
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.adapters.attributes import MOST_NAMED, changed_by_hand
from hf_stitch.adapters.rewriting import network_of, recorded
from hf_stitch.adapters.untrusted import weightless

Removed = Mapping[str, Sequence[int]]
"""Name of a list of modules -> indices of the blocks removed from it."""

SENTENCES = "sentence_transformers"

OUTPUTS = ("out_features", "out_indices", "_out_features", "_out_indices")
"""Fields with the blocks that a backbone outputs; without them, it outputs the last block."""

LABELS = ("id2label", "label2id")
"""Fields with class ids, which are never blocks."""

DEPTH = ("depth", "layer", "block", "stage")
"""Parts of most names of fields and arguments for the depth."""


class CannotBeRebuiltError(ValueError):
    """Error for networks that cannot be rebuilt with fewer blocks from a config."""


def renamed(removed: Removed) -> Callable[[str], str | None]:
    """Return a function that maps names of modules and weights to new names; ``None`` for removed ones."""

    def rename(name: str) -> str | None:
        for stack, places in removed.items():
            if name.startswith(stack + "."):
                place, _, rest = name[len(stack) + 1 :].partition(".")
                if place.isdecimal():
                    if int(place) in places:
                        return None
                    index = int(place) - sum(gone < int(place) for gone in places)
                    name = f"{stack}.{index}" + (f".{rest}" if rest else "")
        return name

    return rename


def without(network: Adapter, stack: str, places: Sequence[int]) -> Iterator[Adapter]:
    """Yield copies of a network without some blocks, of the same class and with its processor.

    Networks of transformers and timm are rebuilt, so that every block has its new index, as caches require, and the
    result can be saved and loaded as usual. Several configs may fit the weights but change the blocks, for example
    their windows: only the outputs show which config is right. The most likely config comes first. Custom modules are
    copied, and blocks are removed from the copy.

    Args:
        network: The network.
        stack: Name of the list of blocks.
        places: Indices of the blocks to remove.

    Yields:
        Shorter networks, on the same device and in the same dtype; usually one.

    Raises:
        CannotBeRebuiltError: If none of the configs gives a network of transformers or timm with these weights.
    """
    if network.library == SENTENCES:
        yield from _sentence_encoders(network, stack, places)
    elif network.library == "torch":
        model = copy.deepcopy(network.model)
        _remove(model, stack, places)
        yield adapter_like(network, model)
    else:
        for model in _rebuilt(network, stack, places):
            try:
                adapter = adapter_like(network, model)
            except Exception:  # networks with an inconsistent config can raise anything
                continue
            yield adapter


def rebuild_error(network: Adapter, condition: str) -> CannotBeRebuiltError:
    """Return the error for a network that, rebuilt with fewer blocks, has different outputs.

    Args:
        network: The network.
        condition: Condition under which the outputs differ, such as the removed blocks.
    """
    sides = changed_by_hand(network.model, lambda: recorded(network.blueprint(), network.model))
    names = [] if sides is None else sorted({name for side in sides for name in (*side.chosen, *side.defaults)})
    reason = "its blocks depend on their position, like alternating windows, or on the depth"
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        reason = (
            f"{', '.join(names[:MOST_NAMED])}{more} {'differs' if len(names) == 1 else 'differ'} from the config, "
            "without being stored in weight files (buffers that are not saved, forwards, hooks): shorten the network "
            "as its library loads it, and change the shorter network"
        )
    return CannotBeRebuiltError(f"{type(network.model).__name__} cannot be rebuilt {condition}: {reason}")


def adapter_like(network: Adapter, model: nn.Module) -> Adapter:
    """Return the adapter of a model with the same inputs as a network."""
    if network.library == SENTENCES:
        return hf_stitch.load(sentence_transformer(model))
    return hf_stitch.load(model.eval(), example_inputs=network.example, processor=network.processor)


def copied(network: Adapter) -> Adapter:
    """Return a copy of a network."""
    return adapter_like(network, copy.deepcopy(network.model))


def dropped(short: Adapter, network: Adapter, removed: Removed) -> Adapter:
    """Return a copy of a shorter network with the unchanged weights of the whole network."""
    shorter = copied(short)
    shorter.model.load_state_dict(weights_for(shorter.model, network.model, removed) or {})
    return shorter


def _remove(model: nn.Module, stack: str, places: Sequence[int]) -> None:
    """Remove modules from a list."""
    blocks: Any = model.get_submodule(stack)
    remaining = [block for index, block in enumerate(blocks) if index not in places]
    model.set_submodule(
        stack, nn.ModuleList(remaining) if isinstance(blocks, nn.ModuleList) else nn.Sequential(*remaining)
    )


def _sentence_encoders(network: Adapter, stack: str, places: Sequence[int]) -> Iterator[Adapter]:
    """Yield ``SentenceTransformer`` networks with a shorter transformer."""
    encoder: Any = network.model
    whole = encoder.transformer.auto_model
    prefix = next(f"{name}." for name, module in encoder.named_modules() if module is whole)
    for short in without(hf_stitch.load(whole, processor=network.processor), stack.removeprefix(prefix), places):
        yield hf_stitch.load(sentence_transformer(copy.deepcopy(encoder, {id(whole): short.model})))


def sentence_transformer(encoder: Any) -> Any:
    """Return the ``SentenceTransformer`` of the modules of an encoder, on its device."""
    from sentence_transformers import SentenceTransformer

    modules: Any = OrderedDict((name, encoder.get_submodule(name)) for name in encoder.steps)
    transformer = SentenceTransformer(modules=modules, device=str(next(encoder.parameters()).device), **encoder.chosen)
    transformer.module_kwargs = encoder.module_kwargs
    return transformer.eval()


# -- weights ----------------------------------------------------------------------------------------------------------
def weights_for(short: nn.Module, model: nn.Module, removed: Removed) -> dict[str, Tensor] | None:
    """Return the weights of a model for a shorter model without some of its blocks.

    Args:
        short: The shorter model; its weights may be on the meta device.
        model: The model.
        removed: The removed blocks.

    Returns:
        The weights of the remaining blocks, by their new names, and their parts of tensors over all blocks; or ``None``
        if these are not the tensors of the shorter model.
    """
    rename, expected = renamed(removed), short.state_dict()
    weights = {new: value for name, value in model.state_dict().items() if (new := rename(name)) is not None}
    if weights.keys() != expected.keys():
        return None
    for stack, places in removed.items():
        length = depth_of(model, stack)
        weights = {name: _parts(value, expected[name].shape, length, places) for name, value in weights.items()}
    return weights if all(value.shape == expected[name].shape for name, value in weights.items()) else None


def _parts(value: Tensor, shape: Sequence[int], length: int, places: Sequence[int]) -> Tensor:
    """Return a tensor without the parts of some blocks, if one of its axes is divided into blocks."""
    remaining = [index for index in range(length) if index not in places]
    if value.dim() == len(shape):
        for axis, (size, short) in enumerate(zip(value.shape, shape, strict=True)):
            if size != short and size * len(remaining) == short * length:
                return torch.stack(
                    [value.unflatten(axis, (length, -1)).select(axis, index) for index in remaining], axis
                ).flatten(axis, axis + 1)
    return value


def depth_of(model: nn.Module, stack: str) -> int:
    """Return the number of blocks in a list."""
    return sum(1 for _ in model.get_submodule(stack).children())


# -- configs ----------------------------------------------------------------------------------------------------------
def _rebuilt(network: Adapter, stack: str, places: Sequence[int]) -> Iterator[nn.Module]:
    """Yield networks from configs with fewer blocks, with the weights of the remaining blocks."""
    model, any_built = network.model, False
    reference = next(model.parameters())
    for record in _records(network.blueprint(), model, stack, places):
        try:
            with weightless():
                skeleton = network_of(record)
        except Exception:  # a number that is not a depth
            continue
        weights = weights_for(skeleton, model, {stack: places})
        if weights is not None and depth_of(skeleton, stack) == depth_of(model, stack) - len(places):
            shorter, any_built = network_of(record).to(reference.device), True
            _cast(shorter, model, {stack: places})
            shorter.load_state_dict(weights)
            _keep_config(shorter, model)
            yield shorter
    if not any_built:
        raise CannotBeRebuiltError(
            f"{stack} cannot be shortened by the config of {type(model).__name__}: its depth is fixed, or its blocks "
            "differ in more than weights"
        )


@torch.no_grad()
def _cast(shorter: nn.Module, model: nn.Module, removed: Removed) -> None:
    """Convert each tensor of a shorter network to its dtype in the model, which may have several dtypes."""
    rename = renamed(removed)
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    dtypes = {new: value.dtype for name, value in tensors.items() if (new := rename(name)) is not None}
    for name, value in [*shorter.named_parameters(), *shorter.named_buffers()]:
        value.data = value.data.to(dtypes.get(name, value.dtype))


def _keep_config(shorter: Any, model: Any) -> None:
    """Keep the config class of a transformers network, which determines the names of its weights in files."""
    if hasattr(model, "generation_config"):
        shorter.generation_config = copy.deepcopy(model.generation_config)
    if hasattr(model, "config") and type(shorter.config) is not type(model.config):
        shorter.config = type(model.config).from_dict(shorter.config.to_dict())


def _records(
    record: dict[str, Any], model: nn.Module, stack: str, places: Sequence[int]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield blueprints with one number, the possible depth of the stack, reduced; likely ones first."""
    length = depth_of(model, stack)
    part = "config" if "config" in record else "arguments"
    settings = record[part] if part == "config" else _arguments(model, record)
    paths = sorted(_depths(settings, length), key=lambda path: _unlike(settings, path, length))
    tried: list[Any] = []
    for variants_of in (_placed, _variants):
        for *path, key in paths:
            for holder in variants_of(_at(settings, path), length, places):
                holder[key] -= len(places)
                changed = _exchanged(settings, path, holder)
                if changed not in tried:
                    tried.append(changed)
                    new = {name: value for name, value in changed.items() if value != settings[name]}
                    yield {**record, part: changed if part == "config" else {**record[part], **new}}


def _arguments(model: nn.Module, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that timm passes to the class of a model, if they are JSON values."""
    model_class, arguments = type(model), dict[str, Any]()
    constructor = model_class.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(constructor).bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments.update(bound.arguments)
        constructor(self, *args, **kwargs)

    model_class.__init__ = recording  # type: ignore[method-assign]
    try:
        with weightless():
            network_of(record)
    finally:
        model_class.__init__ = constructor  # type: ignore[method-assign]
    for value in [*arguments.values()]:  # keyword arguments, and the fields of a timm config
        arguments |= value if isinstance(value, dict) else vars(value) if is_dataclass(value) else {}
    values = {}
    for name, value in arguments.items():
        with suppress(TypeError):
            values[name] = json.loads(json.dumps(value))
    return values


def _depths(settings: Any, length: int, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of numbers that may be the depth."""
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        setting_path = (*path, key)
        if type(value) is int and (value == length or (value > 1 and _named(setting_path))):
            yield setting_path
        elif isinstance(value, dict | list):
            yield from _depths(value, length, setting_path)


def _named(path: Sequence[Any]) -> bool:
    """Return whether the name of a setting indicates a depth."""
    return any(name in str(part) for part in path for name in DEPTH)


def _unlike(settings: Any, path: Sequence[Any], length: int) -> int:
    """Return a rank of a number as a candidate for the depth, 0 for the most likely."""
    return (not _named(path)) + 2 * (_at(settings, path) != length)


def _at(settings: Any, path: Sequence[Any]) -> Any:
    """Return the setting at a path."""
    return reduce(lambda value, key: value[key], path, settings)


def _exchanged(settings: Any, path: Sequence[Any], value: Any) -> Any:
    """Return settings with a new value at a path."""
    if not path:
        return value
    changed = copy.copy(settings)
    changed[path[0]] = _exchanged(settings[path[0]], path[1:], value)
    return changed


# -- settings of single blocks ----------------------------------------------------------------------------------------
def _placed(holder: Any, length: int, places: Sequence[int]) -> Iterator[Any]:
    """Yield the settings next to a depth, with blocks removed from all settings per block."""
    if isinstance(holder, list):
        yield [*holder]
        return
    shorter_settings = {
        name: _without_places(value, length, places)
        for name, value in holder.items()
        if name not in (*OUTPUTS, *LABELS)
    }
    yield holder | {name: value for name, value in shorter_settings.items() if value is not None}


def _variants(holder: Any, length: int, places: Sequence[int]) -> Iterator[Any]:
    """Yield variants: one setting, or all, are not per block, or a number counts the first blocks."""
    for shorter_settings in _placed(holder, length, places) if isinstance(holder, dict) else ():
        for name in shorter_settings:
            if shorter_settings[name] != holder[name]:
                yield {**shorter_settings, name: holder[name]}
        yield {**holder}
        for name, value in shorter_settings.items():
            if type(value) is int and 0 < value < length:
                yield {**shorter_settings, name: value - sum(place < value for place in places)}


def _without_places(value: Any, length: int, places: Sequence[int]) -> Any:
    """Return a setting (list, pattern or block indices) without some blocks; ``None`` for settings of other kinds."""

    def new_index(index: int) -> int:
        return index - sum(removed < index for removed in places)

    if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
        return {str(new_index(int(key))): setting for key, setting in value.items() if int(key) not in places}
    if not isinstance(value, list) or not value:
        return None
    if len(value) == length or (len(value) < length and all(isinstance(setting, str) for setting in value)):
        return [value[index % len(value)] for index in range(length) if index not in places]
    if all(type(setting) is int for setting in value) and sorted({*value}) == value and 0 <= value[0] < length:
        return [new_index(index) for index in value if index not in places]
    return None
