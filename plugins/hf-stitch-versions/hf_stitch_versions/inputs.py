"""Inputs for the comparison of two networks: preprocessed samples, or random inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters.discovery.verify import unchanged
from hf_stitch.data import PairedSamples
from hf_stitch.running import Run
from hf_stitch_versions.recording import Event
from hf_stitch_versions.sources import Feed, Source

MOST = 8
"""Number of random samples in the larger batches."""

LENGTHS = (12, 5, 9, 12, 3, 7, 12, 10)
"""Numbers of tokens of random texts."""

MOST_VALUES = 2**28
"""Maximum number of values in the outputs of all modules for a longer input: 2 GiB in float64."""

OTHER_SIDE = "padding is on the opposite side"
"""Description of inputs that differ only in the side of padding."""

NAMED = {
    r"(\w+_)?window(_size|_len)?|local_attention|local_radius|original_max_position_embeddings": 1,
    r"(\w+_)?max_(bucket_)?distance|(\w+_)?max_relative_positions?|index_topk|clamp_len": 1,
    r"(\w+_)?chunk_(size|length)|local_transformer_stride": 2,
    r"(\w+_)?(num|position)_buckets": 4,
}
"""Names of lengths in configs and modules -> multiple of the length that a text must exceed to show an effect.

Attention within chunks also reads the previous chunk, and the buckets of relative positions grow with the distance.
"""


def feeds(a: Adapter, b: Adapter | None, samples: Samples | None, run: Run) -> Iterator[Feed]:
    """Yield the batches of this process: its share of the samples, or random inputs, equal in all processes."""
    if samples is None:
        yield from random_feeds(a, run.seed, b)
        return
    for _, batch, _ in PairedSamples(samples, samples).batches(run, "comparing"):
        arguments = a.preprocess(batch.samples)
        arguments_b = None if b is None or not _reads(b, batch.samples) else b.preprocess(batch.samples)
        mask = arguments.get(a.interface.mask)
        yield Feed(tuple(batch.ids), arguments, arguments_b, mask.bool() if isinstance(mask, Tensor) else None)


def unpadded(feed: Feed) -> Iterator[Feed]:
    """Yield the samples of a batch one by one, without padding."""
    for row, id_ in enumerate(feed.ids):
        arguments = dict[str, Any]()
        for name, value in feed.arguments.items():
            arguments[name] = (
                value[row : row + 1] if isinstance(value, Tensor) and len(value) == len(feed.ids) else value
            )
            if feed.mask is not None and isinstance(value, Tensor) and value.shape[:2] == feed.mask.shape:
                arguments[name] = arguments[name][:, feed.mask[row].to(value.device)]
        yield Feed((id_,), arguments)


def _reads(adapter: Adapter, samples: Any) -> bool:
    """Return whether a network can preprocess raw samples; tensors are ready inputs."""
    return adapter.processor is not None or all(isinstance(sample, Tensor) for sample in samples)


def random_feeds(adapter: Adapter, seed: int = 0, second: Adapter | None = None) -> Iterator[Feed]:
    """Yield random inputs within the bounds of a network: batches of 8 and 1, with texts padded on both sides.

    Token ids are drawn from all common tokens of both networks that are not special. Numbers are drawn from a normal
    distribution with the mean and the standard deviation of the network's example inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = min(max(LENGTHS), adapter.interface.max_tokens or max(LENGTHS))
    lengths = [min(length, limit) for length in LENGTHS]
    for number, (count, left) in enumerate(((MOST, False), (MOST, True), (1, False))):
        if not left or _is_masked(adapter):
            yield _feed(adapter, f"random {number}", lengths[:count], left, generator, second=second)


def longer_feeds(
    a: Adapter, b: Adapter | None, networks: Sequence[Source], seed: int
) -> tuple[list[Feed], str]:  # fmt: skip
    """Return random inputs longer than all lengths that the networks name, and the limit if this is not possible.

    Args:
        a: The first network.
        b: The second network; ``None`` if it is not in memory.
        networks: Sources of both.
        seed: Seed of the inputs.

    Returns:
        A batch of one or two texts past the largest possible length, or of one image of a different size, or nothing.
        Both networks must run on it, with at most :data:`MOST_VALUES` values in the outputs of modules. The second
        element is the limit of the inputs in words; empty without a limit.
    """

    def feed_of(lengths: Sequence[int], size: tuple[int, int] | None = None) -> Feed:
        generator = torch.Generator().manual_seed(seed)
        name = f"longer than {max(LENGTHS)}" if size is None else "resized"
        feed = _feed(a, name, lengths, True, generator, size, b)
        return feed if b is None else replace(feed, own=for_second(feed.arguments, a, b))

    if a.interface.modality == "image":
        height, width = a.interface.shapes[a.interface.content[0]][-2:]
        for feed in (feed_of([1], size) for size in ((height, 2 * width), (2 * height, 2 * width))):
            if _runs(networks[0], feed, MOST_VALUES):
                runs = all(_runs(network, feed, MOST_VALUES) for network in networks[1:])
                bound = f"images of {height}×{width}: the second network does not run on different sizes"
                return ([feed], "") if runs else ([], bound)
    adapters = [a] if b is None else [a, b]
    limit = min((end for network in adapters if (end := _end(network))), default=None)
    named = {
        name: min(tokens, limit or tokens) for network in adapters for name, tokens in _named_lengths(network).items()
    }
    if a.interface.modality != "text":
        is_limited = a.interface.modality == "tensor" and named
        bound = f"inputs of the size of the example, which may be shorter than {', '.join(named)}"
        return [], bound if is_limited else ""
    reached, ids = max(LENGTHS), _vocabulary(a, a.example[a.interface.content[0]])
    longer = sorted({tokens for tokens in named.values() if tokens > reached}, reverse=True)
    longest_feeds = list[Feed]()
    for tokens, count in product(longer, (2, 1)):
        if count * tokens * max(tokens, ids) <= MOST_VALUES:
            feed = feed_of([tokens, tokens // 2][:count])
            if all(_runs(network, feed, MOST_VALUES) for network in networks):
                reached, longest_feeds = tokens, [feed]
                break
    not_exceeded = ", ".join(name for name, tokens in named.items() if tokens > reached)
    bound = f"texts of up to {reached} tokens, which do not exceed {not_exceeded}: pass longer texts as data"
    return longest_feeds, bound if not_exceeded else ""


def _end(adapter: Adapter) -> int | None:
    """Return the maximum number of tokens of a network; ``None`` for rotary positions, which are unlimited."""
    rotary = any("original_max_seq_len" in vars(module) for module in adapter.model.modules())
    return None if rotary else adapter.interface.max_tokens


def _named_lengths(adapter: Adapter) -> dict[str, int]:
    """Return the lengths that a network names -> a number of tokens that exceeds them."""
    config: Any = getattr(adapter.model, "config", None)
    settings: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    blocks = max(2, 5 + 2 * (settings.get("num_random_blocks") or 0), 1 + (settings.get("index_topk_blocks") or 0))
    named = {**NAMED, r"(\w+_)?block_size": blocks}
    exceeding = dict[str, int]()

    def collect(values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            lengths = value if isinstance(value, (list, tuple)) else [value]
            integers = [length for length in lengths if isinstance(length, int) and not isinstance(length, bool)]
            for pattern, multiple in named.items():
                if integers and max(integers) > 0 and re.fullmatch(pattern, str(key)):
                    length = multiple * max(integers)
                    exceeding[f"{key} {max(integers)}"] = length + max(max(LENGTHS), length // 4)

    collect(settings)
    for module in adapter.model.modules():
        collect({key: value for key, value in vars(module).items() if isinstance(value, int)})
        if "dynamic" in str(vars(module).get("rope_type")):
            collect({"original_max_position_embeddings": vars(module).get("original_max_seq_len")})
    return exceeding


def _runs(network: Source, feed: Feed, most: int) -> bool:
    """Return whether a network runs on a batch, with at most ``most`` values in the outputs of its modules."""
    remaining = most

    def count(event: Event) -> None:
        nonlocal remaining
        remaining -= sum(value.numel() for value in event.outputs.values())
        if remaining < 0:
            raise MemoryError

    try:
        network.watch(feed, count)
    except Exception:  # the code of the network can raise anything
        return False
    return True


def _is_masked(adapter: Adapter) -> bool:
    """Return whether random texts of a network are padded: with any token if it has no padding token."""
    return adapter.interface.modality == "text" and adapter.interface.mask in adapter.example


def _feed(
    adapter: Adapter, name: str, lengths: Sequence[int], left: bool, generator: torch.Generator,
    size: tuple[int, int] | None = None, second: Adapter | None = None,
) -> Feed:  # fmt: skip
    """Return random inputs: texts of the given lengths, padded on one side, or as many samples of another modality."""
    interface, example, count, longest = adapter.interface, adapter.example, len(lengths), max(lengths)
    arguments = {
        name: _drawn(
            name, value, adapter, count, longest if interface.modality == "text" else None, size, generator, second
        )
        for name, value in example.items() if isinstance(value, Tensor)
    }  # fmt: skip
    mask = None
    if _is_masked(adapter):
        positions = torch.arange(longest)
        mask = torch.stack([positions >= longest - length if left else positions < length for length in lengths])
        arguments[interface.mask] = mask.to(example[interface.mask].dtype)
        for content in interface.content:
            arguments[content] = arguments[content].masked_fill(~mask, int(interface.pad_id or 0))
    return Feed(tuple(f"{name}.{i}" for i in range(count)), arguments, None, mask)


def _drawn(
    name: str, value: Tensor, adapter: Adapter, count: int, length: int | None, size: tuple[int, int] | None,
    generator: torch.Generator, second: Adapter | None,
) -> Tensor:  # fmt: skip
    """Return random values similar to an argument, for a number of samples and of tokens, or a size of images."""
    shape = [count, *value.shape[1:]]
    if length is not None and value.dim() == 2:
        shape[1] = length
    if size is not None and value.dim() == 4:
        shape[2:] = size
    if value.is_floating_point():
        example = value.detach().cpu().double()
        spread = float(example.std()) or 1.0
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * spread + float(example.mean())
        return values.to(value.dtype)
    if name not in (*adapter.interface.content, *adapter.interface.given):
        return value[:1, :1].expand(shape).clone().cpu()  # masks and token types
    special = set(adapter.interface.special_ids)
    count_of_ids = _vocabulary(adapter, value)
    if second is not None and second.interface.modality == "text":
        count_of_ids = min(count_of_ids, Vocabulary(adapter, second).size)
    allowed = torch.tensor([id_ for id_ in range(count_of_ids) if id_ not in special])
    return allowed[torch.randint(len(allowed), shape, generator=generator)].to(value.dtype)


def _vocabulary(adapter: Adapter, ids: Tensor) -> int:
    """Return the size of the vocabulary: the size of the first embedding that receives token ids."""
    sizes: list[int] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args: sizes.append(module.num_embeddings) if args and _size(args[0]) == ids.shape else None
        )
        for module in adapter.model.modules() if isinstance(module, nn.Embedding)
    ]  # fmt: skip
    try:
        with torch.no_grad(), unchanged(adapter.model):
            adapter.forward(adapter.example)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes[0] if sizes else int(ids.max()) + 1


@dataclass
class Vocabulary:
    """Token ids of the first network's tokenizer that the second network accepts."""

    a: Adapter
    b: Adapter

    @cached_property
    def size(self) -> int:
        """Number of ids."""
        with suppress(NotImplementedError, AttributeError):
            model: Any = self.b.model
            return int(model.get_input_embeddings().num_embeddings)
        return _vocabulary(self.b, self.b.example[self.b.interface.content[0]])

    def check(self, samples: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Raise an error for ids without an embedding in the second network.

        Args:
            samples: Ids of the samples.
            arguments: Inputs of the second network.

        Raises:
            ValueError: If a token id is too large; the message names both tokenizers.
        """
        ids = arguments.get(self.b.interface.content[0])
        if self.b.interface.modality != "text" or not isinstance(ids, Tensor) or ids.is_floating_point():
            return
        if len(unknown := (ids >= self.size).nonzero()):
            index = tuple(unknown[0].tolist())
            first, second = (_tokenizer(adapter) for adapter in (self.a, self.b))
            raise ValueError(
                f"sample {samples[index[0]]!r} has the token id {ids[index].item()} from the first network's tokenizer "
                f"({first}), but the second network (tokenizer: {second}) has embeddings of {self.size} tokens. Omit "
                "samples with tokens of the first network only"
            )


def _tokenizer(adapter: Adapter) -> str:
    """Return the class of a tokenizer and its number of tokens."""
    processor: Any = adapter.processor
    size = f" of {len(processor)} tokens" if hasattr(processor, "__len__") else ""
    return "none" if processor is None else f"{type(processor).__name__}{size}"


def _size(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None  # a table of positions may read a size


def for_second(arguments: Mapping[str, Any], a: Adapter, b: Adapter) -> dict[str, Any]:
    """Return arguments of the first network by the names of the second, without arguments that it does not accept."""
    names = dict(zip(a.interface.content, b.interface.content, strict=False)) | {a.interface.mask: b.interface.mask}
    accepted = {*b.interface.content, *b.interface.given, *b.interface.arguments, *b.example}
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    return {name: value for name, value in renamed.items() if name in accepted}


def differences(feed: Feed, a: Adapter, b: Adapter) -> list[str]:
    """Return how the networks' own inputs for the same samples differ."""
    if feed.own is None:
        return []
    reasons = []
    for name, tensor_a in for_second(feed.arguments, a, b).items():
        tensor_b = feed.own.get(name)
        if not isinstance(tensor_a, Tensor) or not isinstance(tensor_b, Tensor):
            continue
        if tensor_a.shape != tensor_b.shape:
            reasons.append(f"{name} has shape {tuple(tensor_a.shape)} against {tuple(tensor_b.shape)}")
        elif tensor_a.is_floating_point():
            gap = float((tensor_a.double() - tensor_b.double()).abs().max())
            eps = max(1e-6, torch.finfo(tensor_a.dtype).eps, torch.finfo(tensor_b.dtype).eps)
            if gap > eps * float(tensor_a.double().abs().max()):
                reasons.append(f"{name} differs by up to {gap:.2g}")
        elif not torch.equal(tensor_a, tensor_b):
            row, *index = (tensor_a != tensor_b).nonzero()[0].tolist()
            position = f" at {index[0]}" if index else ""
            values = tensor_a[(row, *index)].item(), tensor_b[(row, *index)].item()
            reasons.append(f"{name} differs in sample {feed.ids[row]!r}{position}: {values[0]} against {values[1]}")
    return [OTHER_SIDE, *reasons] if _padded_elsewhere(feed.mask, feed.own, b) else reasons


def _padded_elsewhere(mask: Tensor | None, arguments_b: Mapping[str, Any], b: Adapter) -> bool:
    """Return whether the second network pads the same texts on the opposite side."""
    mask_b = arguments_b.get(b.interface.mask)
    if mask is None or not isinstance(mask_b, Tensor) or mask_b.shape != mask.shape or torch.equal(mask, mask_b.bool()):
        return False
    return torch.equal(mask.sum(1), mask_b.sum(1))
