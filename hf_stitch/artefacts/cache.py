"""The shared key-value cache of the two halves of a stitched decoder, and the argument names of caches.

The cache contains the cached layers of the front half, followed by the cached layers of the back half. Each half keeps
the layer numbers of its whole network, because some architectures compute with them, and receives a view of the cache
in this numbering. In the view, layers outside the half refer to its first layer: within a half, all layers have the
same past length, but the two halves may differ by the new tokens.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.examples import arguments_of
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.tasks.tokens import EXCLUDED

NAMES = ("cache", "past_key_values", "cache_params")
"""Names of a cache in arguments and outputs: since transformers 5.24; earlier; earlier, for state-space models.

Code from the Hub keeps the name of its version of transformers.
"""

(NAME,) = CausalLMOutputWithPast.__dataclass_fields__.keys() & set(NAMES)
"""The name in the installed transformers."""

STATES = {"linear_attention", "conv", "mamba"}
"""Layer types, as in ``config.layer_types``, that cache a state instead of tokens."""

WITHOUT_WINDOW = {
    "sliding_attention": "full_attention",
    "chunked_attention": "full_attention",
    "hybrid_sliding": "hybrid",
}
"""Layer type with a window of tokens -> layer type that keeps all tokens."""

KINDS = {"full_attention", "attention", "indexed_attention", "hybrid", "moe", "mlp", *STATES, *WITHOUT_WINDOW}
"""Layer types that a cache of two networks can contain."""


class UncachedError(ValueError):
    """Raised for a network that cannot run with a cache; the message is the reason."""


def accepts_argument(model: Any, argument: str) -> bool:
    """Return whether the forward method of a model accepts an argument of this name."""
    return argument in arguments_of(model, "input_ids")


def cache_argument(model: Any) -> str | None:
    """Return the name of the cache argument of a model's forward method, or ``None``."""
    return next((name for name in arguments_of(model, "input_ids") if name in NAMES), None)


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache in arguments, under any of its names, or ``None``."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def rename_cache(arguments: Mapping[str, Any], new_name: str, callers: int) -> dict[str, Any]:
    """Rename a cache in arguments.

    As in transformers, names older than the installed name are accepted with a ``FutureWarning``, which points to the
    caller that many calls above.
    """
    caches = {name: arguments[name] for name in NAMES if arguments.get(name) is not None}
    if len(caches) > 1:
        raise ValueError(f"{' and '.join(caches)} are names of the same argument: pass only {NAME}")
    for name in caches:
        if NAMES.index(name) > NAMES.index(NAME):
            message = f"`{name}` is deprecated, use `{NAME}`"
            warnings.warn(message, FutureWarning, stacklevel=callers + 1)
    renamed = {name: argument for name, argument in arguments.items() if name not in NAMES}
    for cache in caches.values():
        renamed[new_name] = cache
    return renamed


def accepts_any_cache_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method accept its argument ``cache`` under each of its names; the signature has the installed name."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **rename_cache(kwargs, "cache", callers=5))

    parameters = [p.replace(name=NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


def decoder_layers(model: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of a half that have a past."""
    if cache_argument(model) is None:
        raise UncachedError(f"{type(model).__name__} does not accept a cache")
    if hasattr(model, "number_layers"):  # a stitched model, with one cache for both halves
        new_numbers: tuple[int, ...] = model.number_layers()
        return new_numbers
    modules = {n: module for n, module in model.named_modules() if isinstance(getattr(module, "layer_idx", None), int)}
    blocks = {name for name in modules if any(inner.startswith(f"{name}.") for inner in modules)}
    layers = [module for n, module in modules.items() if n not in blocks and any(True for _ in module.parameters())]
    return tuple(sorted({layer.layer_idx for layer in layers}))


def layer_types(model: Any, layers: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return the cache type and window of the given layers of a decoder."""
    config = model.config.get_text_config(decoder=True)
    declared, cached = getattr(config, "layer_types", None), DynamicCache(config=config).layers
    if layers and layers[-1] >= len(cached):
        raise UncachedError(
            f"{type(model).__name__} has a layer {layers[-1]}, but a cache of its config has {len(cached)} layers"
        )
    types: list[tuple[str, int | None]] = []
    for layer in layers:
        window = getattr(cached[layer], "sliding_window", None) if getattr(cached[layer], "is_sliding", False) else None
        kind = declared[layer] if declared is not None else "full_attention" if window is None else "sliding_attention"
        previous = getattr(cached[layer], "has_previous_state", None)
        num_states = len(previous) if isinstance(previous, dict) else 1
        if kind not in KINDS or num_states > 1:
            raise UncachedError(
                f"layer {layer} of {type(model).__name__} is of the type {kind}"
                + (f" with {num_states} states" if num_states > 1 else "")
                + ", which a cache of two networks cannot contain"
            )
        types.append(("sliding_attention" if kind == "chunked_attention" else kind, window))
    return types


class HalfCache(Cache):
    """View of a cache for one half, with the past length also for layers that cache states instead of tokens."""

    def __init__(self, layers: list[Any], past: int | None) -> None:
        super().__init__(layers=layers)
        self.past = past if has_no_attention(layers) else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of past tokens."""
        return super().get_seq_length(layer_idx) if self.past is None else self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of past and present tokens, and the offset of the first token."""
        if self.past is None:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.past + query_length, 0


def half_view(cache: Cache, first: int, layers: tuple[int, ...], past: int | None = None) -> HalfCache | None:
    """Return a view of the cache for one half, in the layer numbering of this half."""
    if not layers:
        return None
    layer_of = {layer: cache.layers[first + index] for index, layer in enumerate(layers)}
    return HalfCache([layer_of.get(layer, layer_of[layers[0]]) for layer in range(layers[-1] + 1)], past)


def has_no_attention(layers: Iterable[Any]) -> bool:
    """Return whether all layers of a cache store a state instead of tokens."""
    return not any(hasattr(layer, "get_seq_length") for layer in layers)


def past_of(cache: Cache) -> int | None:
    """Return the number of past tokens; ``None`` if all layers store a state instead of tokens."""
    return None if has_no_attention(cache.layers) else cache.get_seq_length()


def select_tokens(cache: Cache | None, positions: Tensor) -> None:
    """Select tokens in each layer of a cache, in the given order, and drop the rest."""
    assert cache is not None
    for layer in {id(layer): layer for layer in cache.layers}.values():
        index = positions[:, None, :, None]
        for name in ("keys", "values"):
            states = getattr(layer, name)
            setattr(layer, name, states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])))


Shape: TypeAlias = tuple[int, int]
"""Number of heads of a cache layer, and number of features per head."""


def shapes_of(cache: Cache) -> list[Shape | None]:
    """Return the shape of each layer; ``None`` for a layer without tokens."""
    keys_of_layers = [getattr(layer, "keys", None) for layer in cache.layers]
    return [None if keys is None or keys.dim() != 4 else (keys.shape[1], keys.shape[3]) for keys in keys_of_layers]


def check_shapes(cache: Cache, expected_shapes: list[Shape | None]) -> None:
    """Raise an error if the layers of a cache have other shapes than the layers of a model."""
    for number, (actual, expected) in enumerate(zip(shapes_of(cache), expected_shapes, strict=True)):
        if actual is not None and expected is not None and actual != expected:
            heads, features = ([0 if shape is None else shape[axis] for shape in expected_shapes] for axis in (0, 1))
            raise ValueError(
                f"layer {number} of the cache has {actual[0]} heads of {actual[1]} features, but this model requires "
                f"{expected[0]} of {expected[1]}: pass the cache of an earlier output of this model, an empty cache, "
                f"or one initialised with the sizes of each layer (num_heads={heads}, head_dim={features})"
            )


TOKENS, AT_ONCE = 6, 4
"""Length of the texts in the check of a cache, and the number of tokens in its first step."""

TOLERANCE = {True: 1e-3, False: 5e-2}
"""Whether all weights have 32 bits or more -> largest difference between logits with and without a cache, relative to
the largest logit. Rounding error is 1e-6 in float32, and 1e-2 in bfloat16; the error of a lost past is .1 to 1."""


@torch.no_grad()
def check_cache(model: Any) -> list[Shape | None]:
    """Raise an error unless a stitched language model computes the same with and without its cache.

    The names and numbers of layers do not show reliably where a network stores its past. This function therefore runs
    it, also with left padding, and returns the shape of each layer of its cache.
    """
    source, (device, _) = model.source, place_of(model)
    sizes = [model.config.vocab_size]
    if source.takes is source.interface:  # source and target receive the same tokens
        sizes.append(source.model.config.get_text_config().vocab_size)
    vocabulary = min(size for size in sizes if size is not None)
    ordinary_tokens = torch.tensor([token for token in range(vocabulary) if token not in source.takes.special_ids])
    indices = torch.randint(len(ordinary_tokens), (2, TOKENS), generator=torch.Generator().manual_seed(0))
    ids, mask = ordinary_tokens[indices].to(device), torch.ones(2, TOKENS, dtype=torch.long, device=device)
    _compare_runs(model, ids[:1], {})  # without padding
    mask[1, : AT_ONCE // 2] = 0
    padding = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return shapes_of(_compare_runs(model, ids, padding))


def _compare_runs(model: Any, ids: Tensor, padding: Mapping[str, Tensor]) -> Cache:
    """Raise an error if runs with a cache return other logits than a run over all tokens; return the cache."""

    def run(past: int, until: int, **options: Any) -> Any:
        arguments = {**{name: tensor[:, :until] for name, tensor in padding.items()}, **options}
        return model.forward(
            **model.prepare_inputs_for_generation(ids[:, :until], next_sequence_length=until - past, **arguments)
        )

    try:
        uncached = run(0, TOKENS, use_cache=False).logits
        cache = HalfCache(DynamicCache(config=model.config).layers, None)
        logits = [run(0, AT_ONCE, use_cache=True, **{NAME: cache}).logits]
        logits += [run(past, past + 1, use_cache=True, **{NAME: cache}).logits for past in range(AT_ONCE, TOKENS)]
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # libraries raise any exception
        cause = error.__cause__ if isinstance(error, HalfError) and error.__cause__ else error
        raise UncachedError(f"a run with a cache raises {type(cause).__name__}: {cause}") from error
    stepwise, real = torch.cat(logits, 1), padding.get("attention_mask", torch.ones_like(ids)).bool()
    allowed = uncached.abs() < EXCLUDED  # excluded tokens are never predicted by the network
    largest = uncached.where(allowed, 0).abs().max()
    difference = float(((stepwise - uncached).where(allowed, 0).abs().amax(-1)[real] / largest).max())
    full_precision = all(weight.dtype.itemsize >= 4 for weight in model.parameters() if weight.is_floating_point())
    if not (difference < TOLERANCE[full_precision] and torch.equal(stepwise[real].abs() < EXCLUDED, allowed[real])):
        raise UncachedError(
            f"with a cache, the logits differ by {difference:.1e} of the largest: a network attends to later tokens, "
            "or stores its past elsewhere"
        )
    return cache
