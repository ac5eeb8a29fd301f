"""Possible causes of a difference: what ports get wrong, as changes of a model of transformers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu", "relu2", "quick_gelu")
"""Activations that ports exchange."""

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
"""Defaults of libraries for the epsilon of a norm."""

BASES = (10000.0, 1000000.0, 500000.0)
"""Defaults of libraries for the RoPE base."""

NEUTRAL = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
"""Config keys of scales that are 1 without effect."""

OF_HEADS = {"attention_multiplier": -0.5, "query_pre_attn_scalar": 1}
"""Config keys of scales -> power of the size of a head."""

KEPT = {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder"}
"""Config keys of truth values that do not change the operation of a layer."""

KINDS = {
    r".*(eps|epsilon)": "norm epsilon", r".*(hidden_act|activation).*": "activation", r".*softcap.*": "soft cap",
    r".*(sliding|window).*": "window", "rope_theta": "RoPE base", ".*bias": "dropped bias",
    "tie_word_embeddings": "tied head",
    r".*(multiplier|scal).*": "scale", r".*(norm_first|norm_before).*": "norm order",
}  # fmt: skip
"""Pattern of a config key -> kind of fault."""

OF_LENGTHS = {"window", "RoPE base", "RoPE scaling", "positions", "setting"}
"""Kinds of faults that may show on long texts only."""

ACTIVATION, EPSILON = r".*(hidden_act|hidden_activation|activation_function|activation)", r".*(eps|epsilon)"

State = dict[str, Tensor]


@dataclass(frozen=True)
class Change:
    """Change of a model of transformers.

    Attributes:
        kind: Kind of fault of the port, such as ``"RoPE base"``.
        text: What the port has, such as ``"rope_theta 10000.0 instead of 500000.0"``.
        config: Changes the config of the text model in place.
        weights: Changes the weights in place.
        modules: Changes the modules in place.
        left_out: Last names of modules whose own outputs differ by the change, but not in the port.
    """

    kind: str
    text: str
    config: Callable[[Any], object] | None = None
    weights: Callable[[State], object] | None = None
    modules: Callable[[nn.Module], object] | None = None
    left_out: tuple[str, ...] = ()


def proposals(model: nn.Module, port: Mapping[str, Any], *, only_settings: bool = False) -> Iterator[Change]:
    """Yield possible causes, those that the config values of the port suggest first.

    Args:
        model: The first network; nothing is proposed unless it is a model of transformers.
        port: Config values that the second network was built with, if known.
        only_settings: Whether only these values are proposed.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    values = config.get_text_config().to_dict()
    yield from _of_port(values, port)
    if not only_settings:
        yield from _rotary(values, port)
        yield from _settings(values)
        yield from _weights(model, values)
        yield from _parts(model)
        yield from _operations(model, values)


def _set(key: str, value: Any) -> Callable[[Any], object]:
    """Return an edit of a config; a number gets the type of its old value, which configs can insist on."""

    def edit(config: Any) -> None:
        kind = type(getattr(config, key))
        setattr(
            config,
            key,
            kind(value) if kind in (int, float) and isinstance(value, (int, float)) and kind(value) == value else value,
        )

    return edit


def _of_port(values: Mapping[str, Any], port: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the different config values of the port."""
    plain = (bool, int, float, str)
    own, theirs = (dict(each.get("rope_parameters") or {}) for each in (values, port))
    if unequal := [key for key in {**own, **theirs} if own.get(key) != theirs.get(key)] if own and theirs else []:
        text = ", ".join(f"{key} {theirs.get(key)} instead of {own.get(key)}" for key in unequal)
        kind = "RoPE base" if unequal == ["rope_theta"] else "RoPE scaling"
        yield Change(kind, text, _set("rope_parameters", theirs))
    for key, value in values.items():
        other = port.get(key, value)
        if (
            key not in KEPT
            and isinstance(value, plain)
            and (other is None or isinstance(other, plain))
            and other != value
        ):
            kind = next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, key)), "setting")
            yield Change(kind, f"{key} {other!r} instead of {value!r}", _set(key, other))


def _rotary(values: Mapping[str, Any], port: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other RoPE bases, no scaling, and other shares of the head."""

    def tables(rope: Any) -> list[dict[str, Any]]:
        return [table for table in (rope, *rope.values()) if isinstance(table, dict) and "rope_theta" in table]

    def edit(config: Any, base: float | None, scaled: bool, share: float | None = None) -> None:
        config.rope_parameters = copy.deepcopy(dict(config.rope_parameters))
        for table in tables(config.rope_parameters):
            if not scaled:
                for key in set(table) - {"rope_theta", "partial_rotary_factor"}:
                    del table[key]
                table["rope_type"] = "default"
            table |= {} if base is None else {"rope_theta": base}
            table |= {} if share is None else {"partial_rotary_factor": share}

    own = tables(copy.deepcopy(dict(values.get("rope_parameters") or {})))
    bases = sorted({float(table["rope_theta"]) for table in own})
    scalings = sorted({str(table.get("rope_type")) for table in own} - {"default", "None"})
    theirs = [float(port["rope_theta"])] if isinstance(port.get("rope_theta"), (int, float)) else []
    others = [base for base in dict.fromkeys([*theirs, *BASES]) if bases and bases != [base]]
    here = ", ".join(f"{base:g}" for base in bases)
    for base in others:
        yield Change("RoPE base", f"rope_theta {base:g} instead of {here}", partial(edit, base=base, scaled=True))
    if scalings:
        text = f"no RoPE scaling instead of {', '.join(scalings)}"
        yield Change("RoPE scaling", text, partial(edit, base=None, scaled=False))
        for base in others:
            yield Change(
                "RoPE base", f"rope_theta {base:g} instead of {here} and {text}", partial(edit, base=base, scaled=False)
            )
    for share in {table.get("partial_rotary_factor") for table in own} - {None}:
        shares, kept = sorted({1.0, 0.5, 0.25} - {share}), (True, False) if scalings else (True,)
        for other, new, scaled in product(shares, (None, *others), kept):
            text = f"partial_rotary_factor {other} instead of {share}"
            text += "" if new is None else f" and rope_theta {new:g} instead of {here}"
            text += "" if scaled else f" and no RoPE scaling instead of {', '.join(scalings)}"
            yield Change("RoPE share of the head", text, partial(edit, base=new, scaled=scaled, share=other))


def _settings(values: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other values of config keys."""
    if window := values.get("sliding_window"):

        def kind_of_all(config: Any, kind: str) -> None:
            if getattr(config, "layer_types", None):
                config.layer_types = [kind for _ in config.layer_types]
            elif kind == "full_attention":
                config.sliding_window = None

        yield Change("window", f"no sliding window instead of {window}", partial(kind_of_all, kind="full_attention"))
        if values.get("layer_types"):
            yield Change("window", "a sliding window in all layers", partial(kind_of_all, kind="sliding_attention"))
    size = values.get("head_dim") or (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    for key, value in values.items():
        others: Iterable[Any] = ()
        kind = next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, key)), "setting")
        if re.fullmatch(ACTIVATION, key) and isinstance(value, str):
            others = ACTIVATIONS
        elif re.fullmatch(EPSILON, key) and isinstance(value, float):
            others = EPSILONS
        elif "softcap" in key and value:
            others = (None,)
        elif key in NEUTRAL and value:
            others = (1.0,)
        elif key in OF_HEADS and value:
            others = (size ** OF_HEADS[key],)
        elif isinstance(value, bool) and key not in KEPT:
            others = (not value,)
        for other in others:
            if other != value:
                yield Change(kind, f"{key} {other} instead of {value}", _set(key, other))


def _weights(model: nn.Module, values: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other weights: without biases, with rows in another order, rounded, with moved positions or an offset."""
    size = values.get("head_dim") or (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    queries, norms = r".*\b(q_proj|k_proj|query|key)\.(weight|bias)", r".*norm\w*\.weight"
    tables = r".*(position_embeddings|wpe|embed_positions|pos_embed\w*)\.weight"
    found: list[tuple[str, str, str, Callable[[Tensor], Tensor]]] = [
        ("dropped bias", "no biases in attention", r"(?!.*norm).*(attn|attention).*bias", torch.zeros_like),
        ("dropped bias", "no biases in all layers", r"(?!.*norm).*bias", torch.zeros_like),
        ("half precision", "weights rounded to float16", ".*", partial(_rounded, dtype=torch.float16)),
        ("half precision", "weights rounded to bfloat16", ".*", partial(_rounded, dtype=torch.bfloat16)),
        ("missing embedding", "no embeddings of token types", r".*token_type_embeddings\.weight", torch.zeros_like),
        *(("positions", f"positions moved by {n}", tables, partial(torch.roll, shifts=n, dims=0)) for n in (1, -1)),
        *(("norm weight", f"{n:+} added to the weights of norms", norms, partial(torch.add, other=n)) for n in (1, -1)),
    ]  # fmt: skip
    if size and size % 2 == 0:
        for text, shape in {"interleaved": (-1, 2, size // 2), "in halves": (-1, size // 2, 2)}.items():
            permuted = partial(_permuted, shape=shape)
            found.append(("order of queries and keys", f"the rows of queries and keys {text}", queries, permuted))
    if gates := [name for name in model.state_dict() if re.fullmatch(r".*\bgate_proj\.(weight|bias)", name)]:
        text = "the weights of gate_proj and up_proj exchanged"
        yield Change("weights", text, weights=partial(_exchange, names=gates), left_out=("gate_proj", "up_proj"))
    for kind, text, pattern, new in found:
        if chosen := [name for name in model.state_dict() if re.fullmatch(pattern, name)]:
            yield Change(kind, text, weights=partial(_replace, names=chosen, new=new))


def transposed(model: nn.Module, names: Iterable[str]) -> Iterator[Change]:
    """Yield a transposed weight for each module with a square one."""
    for name in names:
        weight = getattr(model.get_submodule(name), "weight", None)
        if weight is not None and weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
            new = partial(_replace, names=[f"{name}.weight"], new=_transpose)
            yield Change("weights", f"the weight of {name} transposed", weights=new)


def _transpose(value: Tensor) -> Tensor:
    return value.T.contiguous()


def _replace(state: State, names: Iterable[str], new: Callable[[Tensor], Tensor]) -> None:
    state.update({name: new(state[name]) for name in names})


def _exchange(state: State, names: Iterable[str]) -> None:
    for name in names:
        other = name.replace("gate_proj", "up_proj")
        state[name], state[other] = state[other], state[name]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


def _permuted(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Exchange the two inner axes of the rows."""
    return value.unflatten(0, shape).transpose(1, 2).reshape(value.shape)


def _parts(model: nn.Module) -> Iterator[Change]:
    """Yield networks without one kind of norm, with another scale of attention, and with parts in half precision."""
    leaves = [
        (name.rpartition(".")[2], module) for name, module in model.named_modules() if not list(module.children())
    ]
    for leaf in dict.fromkeys(leaf for leaf, module in leaves if "norm" in type(module).__name__.lower()):
        yield Change(
            "missing norm", f"no {leaf}", modules=partial(_on, leaf=leaf, after=lambda module, args, output: args[0])
        )
        for name in ("variance_epsilon", "eps"):
            for own in {getattr(module, name, None) for here, module in leaves if here == leaf} - {None}:
                for other in dict.fromkeys((*EPSILONS, cast(float, own))):  # its own, after a change of the config
                    text = f"the epsilon {other:g}{f' instead of {own:g}' * (other != own)} in {leaf}"
                    yield Change("norm epsilon", text, modules=partial(_assign, leaf=leaf, name=name, value=other))
    scales = {module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), float)}
    for scale in cast("set[float]", scales):
        for other in (1.0, scale**2, scale * 2**0.5, scale / 2**0.5):
            if not math.isclose(other, scale):
                text = f"the scale {other:.3g} instead of {scale:.3g} in attention"
                yield Change("scale", text, modules=partial(_rescale, scale=scale, other=other))
    if any(isinstance(getattr(module, "embed_scale", None), Tensor) for module in model.modules()):
        text = "the scale of embeddings rounded to bfloat16"
        yield Change("half precision", text, modules=_round_scales, left_out=("embed_tokens",))
    for dtype in (torch.float16, torch.bfloat16):
        for leaf in dict.fromkeys(leaf for leaf, _ in leaves):
            text = f"{leaf} rounded to {str(dtype).removeprefix('torch.')}"
            after = partial(_on, leaf=leaf, after=lambda *call, dtype=dtype: _rounded(call[-1], dtype))
            yield Change("half precision", text, modules=after)
            yield Change(
                "half precision", f"{text}, with its inputs", modules=partial(_in_half, leaf=leaf, dtype=dtype)
            )


def _operations(model: nn.Module, values: Mapping[str, Any]) -> Iterator[Change]:
    """Yield networks without a causal mask, with moved queries, with heads in another order, and without residuals."""
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if any(getattr(module, "is_causal", False) for module in model.modules()):
        yield Change("mask", "no causal mask", modules=lambda network: network.register_forward_pre_hook(
            _without_mask, with_kwargs=True
        ))  # fmt: skip
    frequencies: Any = next(
        (m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None
    )
    queries = next((leaf for leaf in ("q_norm", "q_proj") if leaf in leaves), None)
    if queries and frequencies is not None:
        for step in (1, -1):
            turned = partial(_rotated, frequencies=frequencies, step=step)
            moved = partial(_on, leaf=queries, after=lambda *call, turned=turned: turned(call[-1]))
            yield Change("positions", f"queries moved by {step}", modules=moved, left_out=(queries,))
    for leaf in sorted(leaves & {"o_proj", "out_proj", "dense"}):
        for shape in ((values.get("num_attention_heads") or 1, -1), (-1, values.get("num_attention_heads") or 1)):
            yield Change("order of heads", f"heads and features exchanged before {leaf}", modules=partial(
                _on, leaf=leaf, before=lambda module, args, shape=shape: (
                    args[0].unflatten(-1, shape).transpose(-1, -2).flatten(-2), *args[1:]
                )
            ))  # fmt: skip
    blocks = next((name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)), None)
    if blocks is not None:
        for last, _ in cast("nn.ModuleList", model.get_submodule(blocks))[0].named_children():
            yield Change("missing residual", f"the output of {last} as the output of its block",
                         modules=partial(_without_residual, blocks=blocks, last=last))  # fmt: skip


def _on(network: nn.Module, leaf: str, after: Any = None, before: Any = None) -> None:
    """Register hooks on all modules of a name."""
    for name, module in network.named_modules():
        if name.rpartition(".")[2] == leaf:
            if after is not None:
                module.register_forward_hook(after)
            if before is not None:
                module.register_forward_pre_hook(before)


def _assign(network: nn.Module, leaf: str, name: str, value: float) -> None:
    """Set an attribute of all modules of a name."""
    for path, module in network.named_modules():
        if path.rpartition(".")[2] == leaf:
            setattr(module, name, value)


def _in_half(network: nn.Module, leaf: str, dtype: torch.dtype) -> None:
    """Round the inputs and outputs of all modules of a name."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _rounded(args[0], dtype), *args[1:]

    _on(network, leaf, lambda *call: _rounded(call[-1], dtype), before)


def _round_scales(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(scale := getattr(module, "embed_scale", None), Tensor):
            module.embed_scale = _rounded(scale, torch.bfloat16)


def _rescale(network: nn.Module, scale: float, other: float) -> None:
    for module in network.modules():
        if getattr(module, "scaling", None) == scale:
            module.scaling = other  # type: ignore[assignment]


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let every token of a text without padding see all tokens."""
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    mask = torch.zeros(
        len(ids), 1, ids.shape[1], ids.shape[1], dtype=next(module.parameters()).dtype, device=ids.device
    )
    return args, kwargs | {"attention_mask": mask}


def _rotated(values: Tensor, frequencies: Tensor, step: int) -> Tensor:
    """Rotate queries, (…, heads × size) or (…, heads, size), by a number of positions."""
    cos, sin = (function(step * frequencies.to(values)) for function in (torch.cos, torch.sin))
    x, y = values.unflatten(-1, (-1, 2, len(frequencies))).unbind(-2)
    return torch.stack([x * cos - y * sin, y * cos + x * sin], -2).flatten(-3)


def _without_residual(network: nn.Module, blocks: str, last: str) -> None:
    """Let each block return the output of one of its modules."""
    for block in cast("nn.ModuleList", network.get_submodule(blocks)):
        kept: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any, kept: list[Any] = kept) -> None:
            kept[:] = [output[0] if isinstance(output, tuple) else output]

        def end(module: nn.Module, args: Any, output: Any, kept: list[Any] = kept) -> Any:
            return (kept[0], *output[1:]) if isinstance(output, tuple) else kept[0]

        block.get_submodule(last).register_forward_hook(keep)
        block.register_forward_hook(end)
