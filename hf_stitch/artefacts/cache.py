"""One key-value cache for the two halves of a stitched decoder.

The layers of the cache are the attention layers of the front half, followed by those of the back half. Each half keeps
the layer numbers of its whole network, because some architectures compute with them, and receives a view of the cache
in its own numbering. In this view, layers that are not part of the half refer to its first layer: all layers of a half
have the same length of the past, while the other half may be ahead by the new tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import Cache


def decoder_layers(model: Any) -> tuple[int, ...] | None:
    """Return the numbers of the attention layers of one half.

    Args:
        model: The network of the half.

    Returns:
        The numbers in ascending order, as in the whole network; ``None`` if it is not a decoder with a cache.
    """
    if not takes(model, "past_key_values"):
        return None
    if hasattr(model, "number_layers"):  # a stitched model, which has one cache for its own halves
        numbered_anew: tuple[int, ...] | None = model.number_layers()
        return numbered_anew
    numbered = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    layers = [module for module in numbered if any(True for _ in module.parameters())]  # removed layers have none
    generates = getattr(model, "can_generate", lambda: False)()
    if not all(getattr(layer, "is_causal", generates) for layer in layers):
        return None
    return tuple(sorted({layer.layer_idx for layer in layers}))


def takes(model: Any, argument: str) -> bool:
    """Return whether the forward method of a model has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


def layer_types(model: Any, layers: tuple[int, ...]) -> list[str]:
    """Return the types of attention of the given layers of a decoder, in the terms of transformers."""
    named = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    if named is not None:
        return [named[layer] for layer in layers]
    return ["full_attention" if sliding_window(model) is None else "sliding_attention"] * len(layers)


def sliding_window(model: Any) -> int | None:
    """Return the window of a decoder's sliding attention in tokens; ``None`` without sliding attention."""
    window: int | None = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    return window


def shown(cache: Cache, first: int, layers: tuple[int, ...]) -> Cache | None:
    """Return a view of the cache for one half, in the layer numbering of this half.

    Args:
        cache: The cache of both halves. A cache that grows with use is extended to the layers of the half.
        first: Index in the cache of the half's first layer.
        layers: Numbers of the half's layers in its whole network.

    Returns:
        A cache that shares its layers with ``cache``; ``None`` for a half without attention.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < first + len(layers):
            cache.layers.append(cache.layer_class_to_replicate())
    if not layers:
        return None
    place = {layer: cache.layers[first + index] for index, layer in enumerate(layers)}
    return Cache(layers=[place.get(layer, place[layers[0]]) for layer in range(layers[-1] + 1)])


def keep(cache: Cache, places: Tensor) -> None:
    """Keep in each layer of a cache only some tokens, in the given order.

    Args:
        cache: The cache of one half, as returned by :func:`shown`.
        places: (batch, length) int64, the places of the tokens in the cache.
    """
    for layer in {id(layer): layer for layer in cache.layers}.values():
        index = places[:, None, :, None]
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3])))
