"""The inputs on which two networks are compared: samples or random ones, and what each side makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch import Adapter, Samples
from hf_stitch.data import PairedSamples
from hf_stitch.running import Run
from hf_stitch_versions.sources import Feed

MOST = 8
"""Number of random samples in the larger batches."""

LENGTHS = (12, 5, 9, 12, 3, 7, 12, 10)
"""Numbers of tokens of random texts."""


def feeds(a: Adapter, b: Adapter | None, samples: Samples | None, run: Run) -> Iterator[Feed]:
    """Yield the batches of this process: its part of the samples, or random ones, which all processes run."""
    if samples is None:
        yield from random_feeds(a, run.seed)
        return
    for _, batch, _ in PairedSamples(samples, samples).batches(run, "comparing"):
        arguments = a.preprocess(batch.samples)
        own = None if b is None or not _reads(b, batch.samples) else b.preprocess(batch.samples)
        mask = arguments.get(a.interface.mask)
        yield Feed(tuple(batch.ids), arguments, own, mask.bool() if isinstance(mask, Tensor) else None)


def _reads(adapter: Adapter, samples: Any) -> bool:
    """Return whether a network can make inputs of raw samples: tensors are inputs already."""
    return adapter.processor is not None or all(isinstance(each, Tensor) for each in samples)


def random_feeds(adapter: Adapter, seed: int = 0) -> Iterator[Feed]:
    """Yield random inputs within the bounds of a network: batches of 8 and 1, texts padded on each side.

    Token ids are drawn from all that are not special, numbers from a normal distribution with the mean and the
    deviation of the example with which the network was loaded.
    """
    generator = torch.Generator().manual_seed(seed)
    example, interface = adapter.example, adapter.interface
    texts = interface.modality == "text"
    masked = texts and interface.pad_id is not None and interface.mask in example
    limit = min(max(LENGTHS), interface.max_tokens or max(LENGTHS))
    lengths = [min(length, limit) for length in LENGTHS]
    for number, (count, left) in enumerate(((MOST, False), (MOST, True), (1, False))):
        if left and not masked:
            continue
        tokens = lengths[:count] if masked else [limit] * count
        arguments = {
            name: _drawn(name, value, adapter, count, limit if texts else None, generator)
            for name, value in example.items() if isinstance(value, Tensor)
        }  # fmt: skip
        mask = None
        if masked:
            place = torch.arange(limit)
            rows = [place >= limit - length if left else place < length for length in tokens]
            mask = torch.stack(rows)
            arguments[interface.mask] = mask.to(example[interface.mask].dtype)
            for name in interface.content:
                arguments[name] = arguments[name].masked_fill(~mask, int(interface.pad_id or 0))
        yield Feed(tuple(f"random {number}.{i}" for i in range(count)), arguments, None, mask)


def _drawn(
    name: str, value: Tensor, adapter: Adapter, count: int, length: int | None, generator: torch.Generator
) -> Tensor:
    """Return random values like those of an argument, for another number of samples and, of texts, of tokens."""
    shape = [count, *value.shape[1:]]
    if length is not None and value.dim() == 2:
        shape[1] = length
    if value.is_floating_point():
        wide = value.detach().cpu().double()
        spread = float(wide.std()) or 1.0
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * spread + float(wide.mean())
        return drawn.to(value.dtype)
    if name not in (*adapter.interface.content, *adapter.interface.given):
        return value[:1, :1].expand(shape).clone().cpu()  # masks and token types
    special = set(adapter.interface.special_ids)
    known = torch.tensor([id_ for id_ in range(_vocabulary(adapter, value)) if id_ not in special])
    return known[torch.randint(len(known), shape, generator=generator)].to(value.dtype)


def _vocabulary(adapter: Adapter, ids: Tensor) -> int:
    """Return the number of token ids that a network knows: the size of the first embedding that looks them up."""
    sizes: list[int] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args: sizes.append(module.num_embeddings) if args and args[0].shape == ids.shape else None
        )
        for module in adapter.model.modules() if isinstance(module, nn.Embedding)
    ]  # fmt: skip
    try:
        with torch.no_grad():
            adapter.forward(adapter.example)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes[0] if sizes else int(ids.max()) + 1


def for_second(arguments: Mapping[str, Any], a: Adapter, b: Adapter) -> dict[str, Any]:
    """Return arguments of the first network under the names of the second; those that it does not take are left out."""
    names = dict(zip(a.interface.content, b.interface.content, strict=False)) | {a.interface.mask: b.interface.mask}
    takes = {*b.interface.content, *b.interface.given, *b.interface.arguments, *b.example}
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    return {name: value for name, value in renamed.items() if name in takes}


def differences(feed: Feed, a: Adapter, b: Adapter) -> list[str]:
    """Tell how the inputs that the networks make of the same samples differ, before any network runs."""
    if feed.own is None:
        return []
    found = []
    for name, one in for_second(feed.arguments, a, b).items():
        two = feed.own.get(name)
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            continue
        if one.shape != two.shape:
            found.append(f"{name} has the shape {tuple(one.shape)} against {tuple(two.shape)}")
        elif one.is_floating_point():
            gap = float((one.double() - two.double()).abs().max())
            eps = max(1e-6, torch.finfo(one.dtype).eps, torch.finfo(two.dtype).eps)
            if gap > eps * float(one.double().abs().max()):
                found.append(f"{name} differs by up to {gap:.2g}")
        elif not torch.equal(one, two):
            row, *place = (one != two).nonzero()[0].tolist()
            at = f" at {place[0]}" if place else ""
            values = one[(row, *place)].item(), two[(row, *place)].item()
            found.append(f"{name} differs in sample {feed.ids[row]!r}{at}: {values[0]} against {values[1]}")
    return ["padding is on the other side", *found] if _padded_elsewhere(feed.mask, feed.own, b) else found


def _padded_elsewhere(mask: Tensor | None, own: Mapping[str, Any], b: Adapter) -> bool:
    """Return whether the second network pads the same texts on the other side."""
    other = own.get(b.interface.mask)
    if mask is None or not isinstance(other, Tensor) or other.shape != mask.shape or torch.equal(mask, other.bool()):
        return False
    return torch.equal(mask.sum(1), other.sum(1))
