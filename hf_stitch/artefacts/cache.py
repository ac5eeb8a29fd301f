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
"""Names of a cache, as argument and in outputs: since transformers 5.24; before it; before it, of state-space models.

Code from the Hub keeps the name for which it was written.
"""

(NAME,) = CausalLMOutputWithPast.__dataclass_fields__.keys() & set(NAMES)
"""The name in the installed transformers."""

STATES = {"linear_attention", "conv", "mamba"}
"""Types of layers, as in ``config.layer_types``, that keep a state instead of tokens."""

WITHOUT_WINDOW = {
    "sliding_attention": "full_attention",
    "chunked_attention": "full_attention",
    "hybrid_sliding": "hybrid",
}
"""Type of a layer with a window of tokens -> the type that keeps all of them."""

KINDS = {"full_attention", "attention", "indexed_attention", "hybrid", "moe", "mlp", *STATES, *WITHOUT_WINDOW}
"""Types of layers that a cache of two networks can contain."""


class UncachedError(ValueError):
    """Raised for a network that cannot run with a cache; the message is the reason."""


def takes(model: Any, argument: str) -> bool:
    """Return whether the forward method of a model takes an argument of this name."""
    return argument in arguments_of(model, "input_ids")


def cache_argument(model: Any) -> str | None:
    """Return the name by which the forward method of a model takes a cache; ``None`` if it takes none."""
    return next((name for name in arguments_of(model, "input_ids") if name in NAMES), None)


def given_cache(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache among arguments, by whatever name; ``None`` if there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def by_one_name(arguments: Mapping[str, Any], wanted: str, callers: int) -> dict[str, Any]:
    """Return arguments in which a cache has this name, whichever it had.

    As in transformers, a name that is older than the one there is accepted with a ``FutureWarning``, which points to
    the caller that many calls above.
    """
    given = {name: arguments[name] for name in NAMES if arguments.get(name) is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are names of the same argument: give one of them, {NAME}")
    for name in given:
        if NAMES.index(name) > NAMES.index(NAME):
            said = f"`{name}` is deprecated, an older name of `{NAME}`: use `{NAME}`"
            warnings.warn(said, FutureWarning, stacklevel=callers + 1)
    found = {name: value for name, value in arguments.items() if name not in NAMES}
    for cache in given.values():
        found[wanted] = cache
    return found


def under_any_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take its argument ``cache`` by each of the names; the signature shows that of transformers."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **by_one_name(kwargs, "cache", callers=5))

    shown = [p.replace(name=NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return renamed


def decoder_layers(model: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of one half that have a past."""
    if cache_argument(model) is None:
        raise UncachedError(f"{type(model).__name__} takes no cache")
    if hasattr(model, "number_layers"):  # a stitched model, which has one cache for its own halves
        numbered_anew: tuple[int, ...] = model.number_layers()
        return numbered_anew
    numbered = {name: each for name, each in model.named_modules() if isinstance(getattr(each, "layer_idx", None), int)}
    blocks = {name for name in numbered if any(other.startswith(f"{name}.") for other in numbered)}
    layers = [each for name, each in numbered.items() if name not in blocks and any(True for _ in each.parameters())]
    return tuple(sorted({layer.layer_idx for layer in layers}))


def layer_types(model: Any, layers: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Return what a cache keeps of the given layers of a decoder."""
    config = model.config.get_text_config(decoder=True)
    named, own = getattr(config, "layer_types", None), DynamicCache(config=config).layers
    if layers and layers[-1] >= len(own):
        raise UncachedError(
            f"{type(model).__name__} has a layer {layers[-1]}, but a cache of its config {len(own)} layers"
        )
    found: list[tuple[str, int | None]] = []
    for layer in layers:
        window = getattr(own[layer], "sliding_window", None) if getattr(own[layer], "is_sliding", False) else None
        kind = named[layer] if named is not None else "full_attention" if window is None else "sliding_attention"
        states = len(known) if isinstance(known := getattr(own[layer], "has_previous_state", None), dict) else 1
        if kind not in KINDS or states > 1:
            raise UncachedError(
                f"layer {layer} of {type(model).__name__} is of the type {kind}"
                + (f" with {states} states" if states > 1 else "")
                + ", which a cache of two networks cannot contain"
            )
        found.append(("sliding_attention" if kind == "chunked_attention" else kind, window))
    return found


class HalfCache(Cache):
    """A view of a cache for one half, with the length of the past also where its own layers keep states instead."""

    def __init__(self, layers: list[Any], past: int | None) -> None:
        super().__init__(layers=layers)
        self.past = past if has_no_attention(layers) else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of the past."""
        return super().get_seq_length(layer_idx) if self.past is None else self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of tokens of the past and the present, and the offset of the first."""
        if self.past is None:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.past + query_length, 0


def shown(cache: Cache, first: int, layers: tuple[int, ...], past: int | None = None) -> HalfCache | None:
    """Return a view of the cache for one half, in the layer numbering of this half."""
    if not layers:
        return None
    place = {layer: cache.layers[first + index] for index, layer in enumerate(layers)}
    return HalfCache([place.get(layer, place[layers[0]]) for layer in range(layers[-1] + 1)], past)


def has_no_attention(layers: Iterable[Any]) -> bool:
    """Return whether all layers of a cache keep a state instead of tokens."""
    return not any(hasattr(layer, "get_seq_length") for layer in layers)


def past_of(cache: Cache) -> int | None:
    """Return the number of tokens of the past; ``None`` if all layers keep a state instead of tokens."""
    return None if has_no_attention(cache.layers) else cache.get_seq_length()


def keep(cache: Cache | None, places: Tensor) -> None:
    """Keep in each layer of a cache only some tokens, in the given order."""
    assert cache is not None
    for layer in {id(layer): layer for layer in cache.layers}.values():
        index = places[:, None, :, None]
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.gather(2, index.expand(-1, held.shape[1], -1, held.shape[3])))


Shape: TypeAlias = tuple[int, int]
"""Number of heads of a layer of a cache, and number of features of each."""


def shapes_of(cache: Cache) -> list[Shape | None]:
    """Return the shape of each layer; ``None`` for a layer that keeps no tokens, or none yet."""
    kept = [getattr(layer, "keys", None) for layer in cache.layers]
    return [None if keys is None or keys.dim() != 4 else (keys.shape[1], keys.shape[3]) for keys in kept]


def check_shapes(cache: Cache, own: list[Shape | None]) -> None:
    """Refuse a cache whose layers were made with other shapes than those of a model, before it runs."""
    for number, (found, wanted) in enumerate(zip(shapes_of(cache), own, strict=True)):
        if found is not None and wanted is not None and found != wanted:
            heads, features = ([0 if each is None else each[place] for each in own] for place in (0, 1))
            raise ValueError(
                f"layer {number} of the cache was made for {found[0]} heads of {found[1]} features, but that of this "
                f"model has {wanted[0]} of {wanted[1]}: pass the cache of an earlier output of this model, "
                f"an empty one, or one initialised with those of each layer (num_heads={heads}, head_dim={features})"
            )


TOKENS, AT_ONCE = 6, 4
"""Length of the texts with which a cache is checked, and how many of these tokens run in the first step."""

TOLERANCE = {True: 1e-3, False: 5e-2}
"""Largest difference between logits with and without a cache, relative to the largest logit, in float32 and above, and
in half precision. Rounding makes 1e-6 in float32, and 1e-2 in bfloat16; a past that is lost makes .1 to 1."""


@torch.no_grad()
def check_cache(model: Any) -> list[Shape | None]:
    """Check that a stitched language model computes the same with its cache as without, also beside left padding.

    Names and numbers in a network do not show for sure where it keeps its past: this runs it, and returns the shape of
    each layer of its cache.
    """
    source, (device, _) = model.source, place_of(model)
    sizes = [model.config.vocab_size]
    if source.takes is source.interface:  # it takes the same tokens as the target
        sizes.append(source.model.config.get_text_config().vocab_size)
    most = min(size for size in sizes if size is not None)
    ordinary = torch.tensor([token for token in range(most) if token not in source.takes.special_ids])
    drawn = torch.randint(len(ordinary), (2, TOKENS), generator=torch.Generator().manual_seed(0))
    ids, mask = ordinary[drawn].to(device), torch.ones(2, TOKENS, dtype=torch.long, device=device)
    _compare_runs(model, ids[:1], {})
    mask[1, : AT_ONCE // 2] = 0
    beside = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return shapes_of(_compare_runs(model, ids, beside))


def _compare_runs(model: Any, ids: Tensor, beside: Mapping[str, Tensor]) -> Cache:
    """Compare the logits of one run over all tokens with those of several runs with a cache, which is returned."""

    def run(past: int, until: int, **options: Any) -> Any:
        given = {**{name: value[:, :until] for name, value in beside.items()}, **options}
        return model.forward(
            **model.prepare_inputs_for_generation(ids[:, :until], next_sequence_length=until - past, **given)
        )

    try:
        whole = run(0, TOKENS, use_cache=False).logits
        cache = HalfCache(DynamicCache(config=model.config).layers, None)
        logits = [run(0, AT_ONCE, use_cache=True, **{NAME: cache}).logits]
        logits += [run(past, past + 1, use_cache=True, **{NAME: cache}).logits for past in range(AT_ONCE, TOKENS)]
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # libraries raise any exception
        cause = error.__cause__ if isinstance(error, HalfError) and error.__cause__ else error
        raise UncachedError(f"a run with a cache raises {type(cause).__name__}: {cause}") from error
    found, real = torch.cat(logits, 1), beside.get("attention_mask", torch.ones_like(ids)).bool()
    allowed = whole.abs() < EXCLUDED  # the others are tokens that a network never predicts
    largest = whole.where(allowed, 0).abs().max()
    differs = float(((found - whole).where(allowed, 0).abs().amax(-1)[real] / largest).max())
    exact = all(weight.dtype.itemsize >= 4 for weight in model.parameters() if weight.is_floating_point())
    if not (differs < TOLERANCE[exact] and torch.equal(found[real].abs() < EXCLUDED, allowed[real])):
        raise UncachedError(
            f"with a cache, the logits differ by {differs:.1e} of the largest: a network attends to later tokens, or "
            "keeps its past elsewhere"
        )
    return cache
