"""One cache of past tokens for the two halves of a stitched decoder, and the names by which networks take a cache.

The layers of the cache are the layers with a past of the front half, followed by those of the back half. Each half
keeps the layer numbers of its whole network, because some architectures compute with them, and receives a view of the
cache in its own numbering. In this view, layers that are not part of the half refer to its first layer: all layers of a
half have the same length of the past, while the other half may be ahead by the new tokens.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

NAMES = ("cache", "past_key_values", "cache_params")
"""Names of a cache, as argument and in outputs: since transformers 5.24; before it; before it, of state-space models.

Code from the Hub keeps the name for which it was written.
"""

(NAME,) = CausalLMOutputWithPast.__dataclass_fields__.keys() & set(NAMES)
"""The name in the installed transformers."""

WITHOUT_WINDOW = {
    "full_attention": "full_attention",
    "sliding_attention": "full_attention",
    "chunked_attention": "full_attention",
    "indexed_attention": "indexed_attention",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid",
    "linear_attention": "linear_attention",
    "conv": "conv",
    "moe": "moe",
    "mlp": "mlp",
}
"""Type of a layer in ``config.layer_types`` that a joint cache can contain -> the type that keeps the whole past."""


STATES = ("linear_attention", "conv")
"""Types of layers that keep a state instead of tokens."""


class UncachedError(ValueError):
    """Raised for a network that cannot run with a cache; the message is the reason."""


def takes(model: Any, argument: str) -> bool:
    """Return whether the forward method of a model has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


def cache_argument(model: Any) -> str | None:
    """Return the name by which the forward method of a model takes a cache; ``None`` if it takes none."""
    return next((name for name in NAMES if takes(model, name)), None)


def given_cache(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache among arguments, by whatever name; ``None`` if there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def by_one_name(arguments: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    """Return arguments in which a cache has this name, whichever it had.

    As in transformers, a name that is older than the one there is accepted with a ``FutureWarning``.

    Raises:
        ValueError: If there are several caches.
    """
    given = {name: arguments[name] for name in NAMES if arguments.get(name) is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are names of the same argument: give one of them, {NAME}")
    for name in given:
        if NAMES.index(name) > NAMES.index(NAME):
            warnings.warn(f"{name} is an older name of {NAME}: use {NAME}", FutureWarning, stacklevel=4)
    found = {name: value for name, value in arguments.items() if name not in NAMES}
    for cache in given.values():
        found[wanted] = cache
    return found


def under_any_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take its argument ``cache`` by each of the names; the signature shows that of transformers."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **by_one_name(kwargs, "cache"))

    shown = [p.replace(name=NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return renamed


def decoder_layers(model: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of one half that have a past.

    Args:
        model: The network of the half.

    Returns:
        The numbers in ascending order, as in the whole network.

    Raises:
        UncachedError: If it is not a decoder with a cache.
    """
    if cache_argument(model) is None:
        raise UncachedError(f"{type(model).__name__} takes no cache")
    if hasattr(model, "number_layers"):  # a stitched model, which has one cache for its own halves
        numbered_anew: tuple[int, ...] = model.number_layers()
        return numbered_anew
    numbered = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    layers = [module for module in numbered if any(True for _ in module.parameters())]  # removed layers have none
    generates = getattr(model, "can_generate", lambda: False)()
    if not all(getattr(layer, "is_causal", generates) for layer in layers):
        raise UncachedError(f"{type(model).__name__} attends to the whole text")
    return tuple(sorted({layer.layer_idx for layer in layers}))


def layer_types(model: Any, layers: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return what a cache keeps of the given layers of a decoder.

    Args:
        model: The decoder.
        layers: Numbers of layers.

    Returns:
        The type of each layer in the terms of transformers, and its window in tokens; ``None`` for the whole past.

    Raises:
        UncachedError: If a cache of both halves cannot contain such a layer.
    """
    config = model.config.get_text_config(decoder=True)
    named, own = getattr(config, "layer_types", None), DynamicCache(config=config).layers
    found: list[tuple[str, int | None]] = []
    for layer in layers:
        window = getattr(own[layer], "sliding_window", None) if getattr(own[layer], "is_sliding", False) else None
        kind = named[layer] if named is not None else "full_attention" if window is None else "sliding_attention"
        states = len(getattr(own[layer], "has_previous_state", (None,)))
        if kind not in WITHOUT_WINDOW or states > 1:
            raise UncachedError(
                f"layer {layer} of {type(model).__name__} is of the type {kind}"
                + (f" with {states} states" if states > 1 else "")
                + ", which a cache of two networks cannot contain"
            )
        found.append(("sliding_attention" if kind == "chunked_attention" else kind, window))
    return found


def shown(cache: Cache, first: int, layers: tuple[int, ...]) -> Cache | None:
    """Return a view of the cache for one half, in the layer numbering of this half.

    Args:
        cache: The cache of both halves.
        first: Index in the cache of the half's first layer.
        layers: Numbers of the half's layers in its whole network.

    Returns:
        A cache that shares its layers with ``cache``; ``None`` for a half without a past.
    """
    if not layers:
        return None
    place = {layer: cache.layers[first + index] for index, layer in enumerate(layers)}
    return Cache(layers=[place.get(layer, place[layers[0]]) for layer in range(layers[-1] + 1)])


def has_no_attention(cache: Cache) -> bool:
    """Return whether all layers keep a state instead of tokens: their network takes the mask of the new tokens."""
    return all(hasattr(layer, "has_previous_state") and not hasattr(layer, "get_seq_length") for layer in cache.layers)


def keep(cache: Cache | None, places: Tensor) -> None:
    """Keep in each layer of a cache only some tokens, in the given order.

    Args:
        cache: The cache of one half, as returned by :func:`shown`.
        places: (batch, length) int64, the places of the tokens in the cache.
    """
    assert cache is not None
    for layer in {id(layer): layer for layer in cache.layers}.values():
        index = places[:, None, :, None]
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3])))
