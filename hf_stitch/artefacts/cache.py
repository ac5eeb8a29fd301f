"""One cache of keys and values for the two halves of a stitched decoder.

The layers of the cache are the attention layers that the source still has, then those that the target has. Either half
goes on numbering its layers as the whole network did, so each is shown the cache in its own numbers: nothing in a half
is renumbered (some architectures compute with the number of a layer). Where a half asks for the layers that it lost, it
is told of its first: the length of the past is that of any layer of its own, and never that of the other half's, which
may be ahead by a token.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Cache


def decoder_layers(model: Any) -> tuple[int, ...] | None:
    """The numbers of the attention layers that a half of a network has.

    Returns:
        In order, by the numbering of the whole network; ``None`` if it is no decoder with a cache.
    """
    if not takes(model, "past_key_values"):
        return None
    numbered = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    layers = [module for module in numbered if any(True for _ in module.parameters())]  # stand-ins have none
    generates = getattr(model, "can_generate", lambda: False)()
    if not all(getattr(layer, "is_causal", generates) for layer in layers):
        return None
    return tuple(sorted({layer.layer_idx for layer in layers}))


def takes(model: Any, argument: str) -> bool:
    """Whether the forward of a model names an argument."""
    return argument in inspect.signature(model.forward).parameters


def layer_types(model: Any, layers: tuple[int, ...]) -> list[str]:
    """The kind of attention of some layers of a decoder, in transformers' terms."""
    named = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    if named is not None:
        return [named[layer] for layer in layers]
    return ["full_attention" if sliding_window(model) is None else "sliding_attention"] * len(layers)


def sliding_window(model: Any) -> int | None:
    """How many tokens the sliding attention of a decoder looks back; ``None`` where it has none."""
    window: int | None = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    return window


def shown(cache: Cache, first: int, layers: tuple[int, ...]) -> Cache | None:
    """A cache as one half sees it.

    Args:
        cache: Of both halves; it is made long enough if it grows with its use.
        first: Place of the half's first layer in it.
        layers: The half's layers, by its own numbering.

    Returns:
        A cache that shares its layers; ``None`` for a half without attention.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < first + len(layers):
            cache.layers.append(cache.layer_class_to_replicate())
    if not layers:
        return None
    place = {layer: cache.layers[first + index] for index, layer in enumerate(layers)}
    return Cache(layers=[place.get(layer, place[layers[0]]) for layer in range(layers[-1] + 1)])
