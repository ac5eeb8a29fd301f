"""Check that cuts are exact, independently of the verification in the adapter.

The model is called directly, inputs are drawn in sizes that the adapter does not try, and separate code compares the
outputs bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.discovery.trace import Operations

TOKENS = 64
"""Number of tokens in long texts and in texts for measuring cost."""


class InexactError(AssertionError):
    """Raised if a listed cut is not exact. The message names the inputs."""


def fresh(adapter: Adapter) -> Iterator[dict[str, Any]]:
    """Yield inputs in sizes that the adapter does not use for verification.

    Texts are also ragged, padded on the left or right, and long.
    """
    example = adapter.example
    if adapter.interface.modality != "text":
        for seed, samples in ((11, 5), (12, 3)):
            yield {name: _drawn(value, samples, seed) for name, value in example.items()}
        return
    tokens = example[adapter.interface.content[0]].shape[1]
    for seed, (samples, longer, side) in enumerate(((2, 5, ""), (4, 7, "right"), (4, 7, "left")), 21):
        yield _texts(adapter, samples, tokens + longer, side, seed)
    yield batch(adapter, 2)


def batch(adapter: Adapter, samples: int) -> dict[str, Any]:
    """Draw inputs for ``n`` samples. Texts have :data:`TOKENS` tokens, or the maximum of the model if it is lower."""
    if adapter.interface.modality != "text":
        return {name: _drawn(value, samples, 31) for name, value in adapter.example.items()}
    return _texts(adapter, samples, min(TOKENS, adapter.interface.max_tokens or TOKENS), "right", 31)


def _drawn(value: Any, batch: int, seed: int) -> Any:
    """Draw a new floating-point tensor for another batch size, or repeat the samples of an integer tensor."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    generator = torch.Generator().manual_seed(seed)
    if value.is_floating_point():
        return torch.randn(batch, *value.shape[1:], generator=generator).to(value.dtype)
    return value[torch.arange(batch) % value.shape[0]]


def _texts(adapter: Adapter, batch: int, tokens: int, side: str, seed: int) -> dict[str, Any]:
    config: Any = adapter.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generator = torch.Generator().manual_seed(seed)
    special, end = adapter.interface.special_ids, getattr(text, "eos_token_id", None)
    content = adapter.interface.content[0]
    example = adapter.example[content]
    words = torch.tensor([i for i in range(getattr(text, "vocab_size", 200)) if i not in special])
    ids = words[torch.randint(len(words), (batch, tokens), generator=generator)]
    lengths = torch.randint(2, tokens + 1, (batch, 1), generator=generator)
    lengths[0 if side else slice(None)] = tokens
    real = torch.arange(tokens) < lengths
    real = real.flip(1) if side == "left" else real
    inputs: dict[str, Any] = {}
    for name, value in adapter.example.items():
        if name == adapter.interface.mask:
            inputs[name] = real.long()
        elif name == content:
            inputs[name] = torch.where(real, ids, adapter.interface.pad_id or 0)
            if isinstance(end, int):  # as tokenizers do: some heads search for the end-of-text token
                last = (real * torch.arange(1, tokens + 1)).argmax(1)
                inputs[name][torch.arange(batch), last] = end
        elif isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == example.shape[1]:
            inputs[name] = value[:, :1].repeat(batch, tokens)[:batch, :tokens]
        elif isinstance(value, Tensor) and value.dim():
            inputs[name] = value[torch.arange(batch) % value.shape[0]]
        else:
            inputs[name] = value
    return inputs


def bits(output: Any) -> list[Tensor]:
    """Return the tensors of an output in order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def agree(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-identical, treating NaN as equal to NaN."""
    return len(a) == len(b) > 0 and all(
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.equal(x.isnan(), y.isnan())
        and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(a, b, strict=True)
    )


@torch.no_grad()
def check(adapter: Adapter, layers: tuple[str, ...]) -> None:
    """Check that ``decode(encode(x)[l], l)`` equals ``model(x)`` at the given layers.

    Args:
        adapter: The network.
        layers: The cuts to check.

    Raises:
        InexactError: If a layer is not exact, or the context contains the content.
        ValueError: If the model does not return finite numbers, or returns the same output for different inputs. The
            check would then be meaningless.
    """
    outputs = []
    for number, inputs in enumerate(fresh(adapter)):
        expected = [t.clone() for t in bits(_output(adapter, inputs))]
        outputs.append(expected)
        for layer, representation in adapter.encode(inputs, layers).items():
            _check_context(adapter, representation.context, inputs, layer)
            if not agree(bits(adapter.decode(representation, layer)), expected):
                raise InexactError(f"{layer!r}: decode(encode(x)) differs from model(x) on inputs {number}")
    if not any(bool(t.isfinite().any()) for t in outputs[-1] if t.is_floating_point()):
        raise ValueError("the model does not return finite numbers")
    _check_that_inputs_matter(adapter)


def _output(adapter: Adapter, inputs: dict[str, Any]) -> Any:
    """Return the output of the plain network, reduced to the outputs that the adapter uses.

    Where texts of one length run together, the plain network computes different values for padded texts.
    """
    if not adapter.interface.sides:
        return adapter.forward(inputs)
    return adapter.interface.kept(adapter.model(**{**adapter.interface.options, **inputs}))


def _check_context(adapter: Adapter, context: Any, inputs: Any, layer: str) -> None:
    for name in adapter.interface.content:
        content, erased = inputs[name], context[name]
        if content.is_floating_point():
            leaked = bool(erased.any())
        else:
            allowed = torch.tensor([*adapter.interface.special_ids, adapter.interface.filler_id])
            leaked = not bool(torch.isin(erased, allowed).all())
        if leaked:
            raise InexactError(f"{layer!r}: the context contains {name}")


def _check_that_inputs_matter(adapter: Adapter) -> None:
    inputs = next(iter(fresh(adapter)))
    name = adapter.interface.content[0]
    flipped = {**inputs, name: inputs[name].flip(0)}
    if agree(bits(_output(adapter, inputs)), bits(_output(adapter, flipped))):
        raise ValueError("the model returns the same output for different inputs")


@torch.no_grad()
def cost(adapter: Adapter, layer: str, inputs: dict[str, Any]) -> float | None:
    """Return the floating-point operations of encode and decode at a layer, relative to one forward pass.

    Returns:
        The ratio, or ``None`` if the forward pass does not contain operations that are counted.
    """
    counts = []
    for run in (lambda: adapter.forward(inputs), lambda: adapter.decode(adapter.encode(inputs, layer)[layer], layer)):
        with Operations() as counter:
            run()
        counts.append(counter.count)
    return counts[1] / counts[0] if counts[0] else None
