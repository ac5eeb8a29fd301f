"""Name the cause of a difference: settings with which the first network equals the second.

A network in another runtime has no modules to compare. Instead, the first network is changed as its port may differ
(another RoPE base, no sliding window, GELU by tanh, …), until its outputs equal the recorded outputs of the port.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch import Adapter, load
from hf_stitch_versions.recording import Event, Key, Values
from hf_stitch_versions.sources import Facts, Feed, Source

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu")
"""Activations that ports exchange."""

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
"""Defaults of libraries for the epsilon of a norm."""

BASES = (10000.0, 1000000.0, 500000.0)
"""Defaults of libraries for the RoPE base."""

NEUTRAL = {
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "logit_scale": 1.0,
    "attention_multiplier": None, "query_pre_attn_scalar": None,
}  # fmt: skip
"""Config key of a scale -> its value without effect; ``None``: from the size of the heads."""

KEPT = {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "tie_word_embeddings", "torchscript"}
"""Config keys of truth values that do not change the operation of a layer."""

MOST = 4
"""Maximum number of changes that are combined."""

BETTER = 0.9
"""A change is kept if it moves the first difference on, or reduces it to this share."""

Settings = dict[str, Any]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Change:
    """Change of the first network.

    Attributes:
        kind: Kind of fault of the port, such as ``"RoPE base"``.
        text: What the port has, such as ``"rope_theta 10000.0 instead of 500000.0"``.
        settings: Changes the config in place.
        weights: Changes the weights in place.
        modules: Changes the network in place.
    """

    kind: str
    text: str
    settings: Callable[[Any], None] | None = None
    weights: Callable[[State], None] | None = None
    modules: Callable[[nn.Module], None] | None = None


@dataclass
class Replay:
    """Values of a network that were computed once."""

    source: Source
    calls: Collection[Key]
    dtype: torch.dtype = field(init=False)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    inferred: ClassVar[bool] = True
    facts: Facts = Facts()
    quantized: str = ""

    def __post_init__(self) -> None:
        self.dtype = self.source.dtype
        self._events = dict[tuple[Any, ...], list[Event]]()

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Report the events of a batch again."""
        if feed.ids not in self._events:
            events = self._events[feed.ids] = []
            self.source.watch(feed, lambda event: events.append(event) if event.key in self.calls else None)
        for event in self._events[feed.ids]:
            see(event)


def changed(adapter: Adapter, changes: Collection[Change]) -> Adapter | None:
    """Return a copy of a network with changes; ``None`` if its class does not support them."""
    model: Any = adapter.model
    config = copy.deepcopy(model.config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        for change in changes:
            if change.settings is not None:
                change.settings(config)
            if change.weights is not None:
                change.weights(state)
        with torch.random.fork_rng(devices=[]):
            built = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
        built.to(next(model.parameters()).dtype)
        if built.load_state_dict(state, strict=False).missing_keys:
            return None
        for change in changes:
            if change.modules is not None:
                change.modules(built)
        return load(built.to(adapter.device).eval(), processor=adapter.processor, example_inputs=dict(adapter.example))
    except Exception:  # a class can refuse a setting with any error
        return None


def proposals(model: nn.Module, port: Mapping[str, Any], *, only_settings: bool = False) -> Iterator[Change]:
    """Yield possible causes, those that the config values of the port suggest first.

    Args:
        model: The first network, a model of transformers.
        port: Config values that the second network was built with, if known.
        only_settings: Whether only its config values are proposed.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    text = config.get_text_config()
    values = text.to_dict()
    yield from _of_port(values, port)
    if only_settings:
        return
    yield from _rotary(values, port)
    yield from _settings(values)
    yield from _weights(model, values)
    yield from _modules(model)


def _set(key: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        setattr(config.get_text_config(), key, value)

    return change


def _of_port(values: Settings, port: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the differing config values of the port."""
    for key, value in values.items():
        if key in port and port[key] != value and key not in KEPT and isinstance(value, (bool, int, float, str)):
            if value is not None and (port[key] is None or isinstance(port[key], (bool, int, float, str))):
                yield Change(_kind(key), f"{key} {port[key]!r} instead of {value!r}", _set(key, port[key]))


def _kind(key: str) -> str:
    """Return the kind of fault of a config key."""
    kinds = {
        r".*(eps|epsilon)": "norm epsilon", r".*(hidden_act|activation).*": "activation", r".*softcap.*": "soft cap",
        r".*(sliding|window).*": "window", r"rope_theta": "RoPE base", r".*bias": "dropped bias",
        r".*(multiplier|scal).*": "scale", r".*(norm_(first|before)|layer_norm_before).*": "norm order",
    }  # fmt: skip
    return next((kind for pattern, kind in kinds.items() if re.fullmatch(pattern, key)), "setting")


def _rotary(values: Settings, port: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other RoPE bases, and no scaling."""
    rope = values.get("rope_parameters") or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, Mapping) and "rope_theta" in table]
    if not tables:
        return

    def with_tables(edit: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
        def change(config: Any) -> None:
            text = config.get_text_config()
            parameters = copy.deepcopy(dict(text.rope_parameters))
            for table in (parameters, *parameters.values()):
                if isinstance(table, dict) and "rope_theta" in table:
                    edit(table)
            text.rope_parameters = parameters

        return change

    def base(value: float) -> Callable[[dict[str, Any]], None]:
        return lambda table: table.update(rope_theta=value)

    def unscaled(table: dict[str, Any]) -> None:
        kept = {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}
        table.clear()
        table.update(kept, rope_type="default")

    thetas = sorted({float(table["rope_theta"]) for table in tables})
    own = port.get("rope_theta")
    for value in dict.fromkeys([*([float(own)] if isinstance(own, (int, float)) else []), *BASES]):
        if thetas != [value]:
            yield Change(
                "RoPE base", f"rope_theta {value:g} instead of {', '.join(f'{theta:g}' for theta in thetas)}",
                with_tables(base(value)),
            )  # fmt: skip
    kinds = sorted({str(table.get("rope_type")) for table in tables} - {"default", "None"})
    if kinds:
        yield Change("RoPE scaling", f"no scaling instead of {', '.join(kinds)}", with_tables(unscaled))
        for value in BASES:
            if thetas != [value]:
                yield Change(
                    "RoPE base", f"rope_theta {value:g} instead of {thetas[-1]:g}, without {kinds[0]} scaling",
                    with_tables(lambda table, value=value: (unscaled(table), table.update(rope_theta=value))),  # type: ignore[misc]
                )  # fmt: skip
    factors = {table.get("partial_rotary_factor") for table in tables} - {None}
    for factor in factors:
        for value in (1.0, 0.5, 0.25):
            if value != factor:
                yield Change(
                    "RoPE share of the head", f"partial_rotary_factor {value} instead of {factor}",
                    with_tables(lambda table, value=value: table.update(partial_rotary_factor=value)),  # type: ignore[misc]
                )  # fmt: skip


def _settings(values: Settings) -> Iterator[Change]:
    """Yield other values of config keys."""
    if values.get("sliding_window"):

        def without(config: Any) -> None:
            text = config.get_text_config()
            text.sliding_window = None if "layer_types" not in values else 1 << 30
            if values.get("layer_types"):
                text.layer_types = ["full_attention" for _ in text.layer_types]

        yield Change("window", f"no sliding window instead of {values['sliding_window']}", without)
        if "sliding_window" in values and values.get("layer_types"):
            yield Change("window", "a sliding window in all layers", lambda config: setattr(
                config.get_text_config(), "layer_types", ["sliding_attention" for _ in values["layer_types"]]
            ))  # fmt: skip
    for key, value in values.items():
        if re.fullmatch(r".*(hidden_act|hidden_activation|activation_function|activation)", key) and isinstance(value, str):
            yield from (
                Change("activation", f"{key} {other} instead of {value}", _set(key, other))
                for other in ACTIVATIONS if other != value
            )  # fmt: skip
        elif re.fullmatch(r".*(eps|epsilon)", key) and isinstance(value, float):
            yield from (
                Change("norm epsilon", f"{key} {other:g} instead of {value:g}", _set(key, other))
                for other in EPSILONS if other != value
            )  # fmt: skip
        elif "softcap" in key and value:
            yield Change("soft cap", f"no {key} instead of {value:g}", _set(key, None))
        elif key in NEUTRAL and value:
            heads = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
            own = {"attention_multiplier": heads**-0.5, "query_pre_attn_scalar": heads}.get(key, NEUTRAL[key])
            if own != value:
                yield Change("scale", f"{key} {own:g} instead of {value:g}", _set(key, own))
        elif isinstance(value, bool) and key not in KEPT:
            yield Change(_kind(key), f"{key} {not value} instead of {value}", _set(key, not value))


def _weights(model: nn.Module, values: Settings) -> Iterator[Change]:
    """Yield other weights: without biases, with heads in another order, rounded, moved positions, other offsets."""
    names = list(model.state_dict())
    groups = {"attention": r".*(attn|attention).*\.bias", "the output": r"(lm_head|.*decoder|.*output)\.bias", "all": r".*\.bias"}
    linear = {f"{name}.bias" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for group, pattern in groups.items():
        if any(name in linear and re.fullmatch(pattern, name) for name in names):
            yield Change("dropped bias", f"no biases of linear layers ({group})", None, lambda state, pattern=pattern: [
                value.zero_() for name, value in state.items() if name in linear and re.fullmatch(pattern, name)
            ])  # type: ignore[misc]  # fmt: skip
    heads = values.get("head_dim") or (
        values["hidden_size"] // values["num_attention_heads"] if "num_attention_heads" in values else None
    )
    queries = [name for name in names if re.fullmatch(r".*\b(q_proj|k_proj|query|key)\.(weight|bias)", name)]
    if heads and heads % 2 == 0 and queries:
        for text, shape in (("interleaved instead of in halves", (2, heads // 2)), ("in halves instead of interleaved", (heads // 2, 2))):

            def permuted(state: State, shape: tuple[int, int] = shape) -> None:
                for name in queries:
                    value = state[name]
                    state[name] = value.unflatten(0, (-1, *shape)).transpose(1, 2).reshape(value.shape)

            yield Change("order of queries and keys", f"the rows of each head {text}", None, permuted)
    for dtype in (torch.float16, torch.bfloat16):
        yield Change("half precision", f"weights rounded to {str(dtype).removeprefix('torch.')}", None, lambda state, dtype=dtype: state.update(
            {name: value.to(dtype).to(value.dtype) for name, value in state.items() if value.is_floating_point()}
        ))  # type: ignore[misc]  # fmt: skip
    tables = [name for name in names if re.fullmatch(r".*(position_embeddings|wpe|embed_positions|pos_embed\w*)\.weight", name)]
    if tables:
        for step in (1, -1, 2, -2):
            yield Change("positions", f"positions moved by {step}", None, lambda state, step=step: state.update(
                {name: state[name].roll(step, 0) for name in tables}
            ))  # type: ignore[misc]  # fmt: skip
    norms = [name for name in names if re.fullmatch(r".*norm\w*\.weight", name)]
    if norms:
        for offset in (1.0, -1.0):
            yield Change("norm weight", f"{offset:+g} added to the weights of norms", None, lambda state, offset=offset: state.update(
                {name: state[name] + offset for name in norms}
            ))  # type: ignore[misc]  # fmt: skip


def _modules(model: nn.Module) -> Iterator[Change]:
    """Yield networks without one kind of norm, or with another scale of attention."""
    norms = dict.fromkeys(
        name.rpartition(".")[2] for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not list(module.children())
    )  # fmt: skip
    for leaf in norms:

        def removed(network: nn.Module, leaf: str = leaf) -> None:
            for name, _ in list(network.named_modules()):
                if name.rpartition(".")[2] == leaf:
                    network.set_submodule(name, nn.Identity())

        yield Change("missing norm", f"no {leaf}", None, None, removed)
    scales = {module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), float)}
    for scale in scales:
        for other, text in ((1.0, "1"), (scale**2, "squared"), (scale * 2**0.5, "√2 times"), (scale / 2**0.5, "1/√2 times")):
            if not math.isclose(other, scale):

                def rescaled(network: nn.Module, other: float = other, scale: float = scale) -> None:
                    for module in network.modules():
                        if getattr(module, "scaling", None) == scale:
                            module.scaling = other  # type: ignore[assignment]

                yield Change("scale", f"the scale of attention {text}: {other:.3g} instead of {scale:.3g}", None, None, rescaled)


@dataclass(frozen=True, order=True)
class Score:
    """How far two networks agree: the place of the first different call, then its difference, negated."""

    place: float  # infinite if all calls agree
    closeness: float

    def is_better(self, other: Score) -> bool:
        """Return whether the first difference comes later, or is clearly smaller."""
        return self.place > other.place or (self.place == other.place and -self.closeness < -BETTER * other.closeness)


def search(
    adapter: Adapter, changes: Collection[Change], score: Callable[[Adapter, bool], Score]
) -> tuple[list[Change], bool]:  # fmt: skip
    """Find changes with which a network equals a second network.

    Args:
        adapter: The network.
        changes: Possible changes.
        score: Returns how far a network agrees with the second network, on all samples or on a few.

    Returns:
        The changes, and whether the networks are the same with all of them. Without that, only changes that moved the
        first difference to a later call are returned.
    """
    unchanged = changed(adapter, [])
    if unchanged is None:
        return [], False
    best, found, moved = score(unchanged, False), list[Change](), 0
    while math.isfinite(best.place) and len(found) < MOST:
        candidates = list[tuple[Score, int, Change]]()
        for number, change in enumerate(changes):
            network = None if change in found else changed(adapter, [*found, change])
            if network is not None:
                candidates.append((score(network, False), -number, change))
                if math.isinf(candidates[-1][0].place):
                    break
        better = max((candidate for candidate in candidates if candidate[0].is_better(best)), default=None, key=_rank)
        if better is None:
            break
        found.append(better[2])
        moved = len(found) if better[0].place > best.place else moved
        best = better[0]

    def is_same(changes: Collection[Change]) -> bool:
        network = changed(adapter, changes)
        return network is not None and math.isinf(score(network, True).place)

    if found and is_same(found):
        for change in list(found) if len(found) > 1 else []:
            rest = [kept for kept in found if kept is not change]
            found = rest if is_same(rest) else found
        return found, True
    return found[:moved], False


def _rank(candidate: tuple[Score, int, Change]) -> tuple[Score, int]:
    return candidate[:2]
