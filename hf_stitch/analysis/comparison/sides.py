"""Sides of a comparison: a network, several networks as one side, or saved activations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.adapters import Adapter, load_on, unwrap
from hf_stitch.adapters.base import LayerCallback
from hf_stitch.adapters.checks import check_comparable
from hf_stitch.adapters.loading import NetworkLike
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.asking import POOLINGS, Asked
from hf_stitch.data import Id, Samples, check_same_order
from hf_stitch.reference import weights_hash
from hf_stitch.representation import Representation
from hf_stitch.running import Run

Span = tuple[int, int]
"""Character span of a token: index of the first character, and index after the last one."""
Tokenized = tuple[dict[str, Any], "_Segments"]
"""Inputs of a network, and the segments of their tokens."""
LEFT_OUT = -1  # segment of a token that is not compared
Comparable = NetworkLike | Activations


class Side(Protocol):
    """Interface of one side of a comparison: activations of ordered samples, layer by layer."""

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""

    @property
    def layers(self) -> Sequence[str]:
        """The layers that are compared by default."""

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Call ``callback`` once per layer with the activations of the samples from ``start`` to ``stop``."""

    def describe(self) -> dict[str, Any]:
        """Return a record that identifies this side, as JSON values."""


class Reader:
    """Reader of raw samples. A batch that both sides request is read once."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.read = lru_cache(maxsize=1)(self._read)

    def _read(self, start: int, stop: int) -> list[Any]:
        (batch,) = self.samples.select(range(start, stop)).batches(stop - start)
        return batch.samples


class Network:
    """Network with its samples as one side of a comparison."""

    def __init__(self, adapter: Adapter, reader: Reader) -> None:
        self.adapter, self.reader = adapter, reader

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""
        return self.reader.samples.ids

    @property
    def layers(self) -> Sequence[str]:
        """The default layers of the network."""
        return self.adapter.candidates

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run the network once on the samples from ``start`` to ``stop``."""
        self.adapter.run_with_callback(self.adapter.preprocess(self.reader.read(start, stop)), layers, callback)

    def describe(self) -> dict[str, Any]:
        """Return the reference with the hash of the weights, the class, and the fingerprint of the samples."""
        return {
            "reference": self.adapter.pinned.to_dict(),
            "class": type(self.adapter.model).__name__,
            "data": self.reader.samples.fingerprint,
        }


@dataclass(frozen=True)
class WeightSide:
    """Network for a comparison of weights."""

    model: nn.Module  # the network
    description: Mapping[str, Any]  # record that identifies it, as JSON values


class Networks:
    """Several networks or saved activations as a single side, compared with itself.

    The layers are named ``network/layer``. Each network runs once per batch.
    """

    def __init__(self, sides: Mapping[str, Side], layers: Mapping[str, Sequence[str]] | None = None) -> None:
        self.sides = sides
        self._layers = {name: tuple((layers or {}).get(name) or side.layers) for name, side in sides.items()}

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""
        return next(iter(self.sides.values())).ids

    @property
    def layers(self) -> Sequence[str]:
        """The layers of all networks."""
        return [f"{name}/{layer}" for name, layers in self._layers.items() for layer in layers]

    @property
    def by_network(self) -> dict[str, tuple[str, ...]]:
        """The layers of each network."""
        return self._layers

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run each network once on the samples from ``start`` to ``stop``."""
        requested = set(layers)
        for name, side in self.sides.items():
            layers_of_side = [layer for layer in self._layers[name] if f"{name}/{layer}" in requested]

            def renamed(layer: str, representation: Representation, name: str = name) -> None:
                callback(f"{name}/{layer}", representation)

            if layers_of_side:
                side.run_with_callback(start, stop, layers_of_side, renamed)

    def describe(self) -> dict[str, Any]:
        """Return the records of all networks."""
        return {"networks": {name: side.describe() for name, side in self.sides.items()}}


def networks_of(side: Side) -> dict[str, nn.Module]:
    """Return the networks that run for a side, by the prefix of their layers' names; empty for saved activations."""
    if isinstance(side, Networks):
        by_name = {name: networks_of(part) for name, part in side.sides.items()}
        return {f"{name}/{inner}": network for name, networks in by_name.items() for inner, network in networks.items()}
    return {"": side.adapter.model} if isinstance(side, Network) else {}


def shares_of(side: Side) -> dict[str, float]:
    """Return each module's share of the parameters of its network."""
    shares = {}
    for start, network in networks_of(side).items():
        whole = max(sum(weight.numel() for weight in network.parameters()), 1)
        for name, module in network.named_modules():
            shares[start + name] = sum(weight.numel() for weight in module.parameters()) / whole
    return shares


def align(text: str, a: Sequence[Span], b: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Assign the tokens of two tokenizations of a text to shared segments.

    The text is split at the boundaries that both tokenizations share: this is the finest segmentation that both refine.
    White space is ignored, so that a token with a leading space begins at its first letter. Tokens that share a
    character (the bytes of an emoji) belong to one segment.

    Segments that only one side covers are left out: a character that one tokenizer drops, and text before the first or
    after the last token of one side, which may have been truncated at the maximum length of a model.

    Returns the index of the segment of each token of both sides, from 0 in the order of the text. -1 for tokens in
    segments that only one side covers, white space, and special tokens.
    """
    sides = [[_visible(text, span) for span in spans] for spans in (a, b)]
    segments: list[Span] = []
    for start, end in sorted(span for side in sides for span in side if span):
        if segments and start < segments[-1][1]:
            start, end = segments[-1][0], max(segments.pop()[1], end)
        segments.append((start, end))
    starts = [start for start, _ in segments]
    segment_of_token = [[bisect_right(starts, span[0]) - 1 if span else LEFT_OUT for span in side] for side in sides]
    covered = [(min(s[0] for s in side if s), max(s[1] for s in side if s)) for side in sides if any(side)]
    first, last = max((start for start, _ in covered), default=0), min((end for _, end in covered), default=0)
    in_both = sorted(set(segment_of_token[0]) & set(segment_of_token[1]) - {LEFT_OUT})
    shared = [segment for segment in in_both if first <= segments[segment][0] and segments[segment][1] <= last]
    numbers = {segment: number for number, segment in enumerate(shared)}
    of_a, of_b = ([numbers.get(segment, LEFT_OUT) for segment in side] for side in segment_of_token)
    return of_a, of_b


def _visible(text: str, span: Span) -> Span | None:
    """Strip white space from a span; ``None`` if nothing is left."""
    piece = text[slice(*span)]
    stripped = piece.strip()
    start = span[0] + len(piece) - len(piece.lstrip())
    return (start, start + len(stripped)) if stripped else None


def aligned(sides: Sequence[Side]) -> tuple[Side, ...]:
    """Wrap sides with the same texts so that their rows are shared text segments instead of tokens."""
    networks = [side for side in sides if isinstance(side, Network)]
    if len(networks) < len(sides):
        raise ValueError("align='offsets' requires networks on both sides, because saved activations lack offsets")
    if networks[0].reader is not networks[-1].reader:
        raise ValueError("align='offsets' requires the same texts on both sides; leave paired_data out")
    tokenize = lru_cache(maxsize=1)(partial(_tokenized, networks))  # a batch that both sides request is tokenized once
    return tuple(_Aligned(network, tokenize, index) for index, network in enumerate(networks))


class _Aligned(Network):
    """Network with one vector per text segment: the mean of the activations of its tokens."""

    def __init__(self, network: Network, tokenize: Callable[[int, int], list[Tokenized]], index: int) -> None:
        super().__init__(network.adapter, network.reader)
        self._batch, self._place = tokenize, index

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run the network once and average its activations over the tokens of each segment."""
        inputs, segments = self._batch(start, stop)[self._place]

        def averaged(name: str, activations: Representation) -> None:
            callback(name, segments.mean(name, activations))

        self.adapter.run_with_callback(inputs, layers, averaged)


def _tokenized(networks: Sequence[Network], start: int, stop: int) -> list[Tokenized]:
    """Return the inputs of each network for a batch of texts, with the segments of their tokens."""
    reader = networks[0].reader
    texts, ids = reader.read(start, stop), reader.samples.ids[start:stop]
    for text, id_ in zip(texts, ids, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"align='offsets' requires texts, but sample {id_!r} is of type {type(text).__name__}")
    inputs = [network.adapter.preprocess(texts, offsets=True) for network in networks]
    spans = [encoding.pop(OFFSETS).tolist() for encoding in inputs]
    segments = [align(*sample) for sample in zip(texts, spans[0], spans[-1], strict=True)]
    return [(encoding, _Segments.of([pair[side] for pair in segments], ids)) for side, encoding in enumerate(inputs)]


@dataclass(frozen=True)
class _Segments:
    """Tokens of each segment of a batch."""

    shape: tuple[int, int]  # shape of the batch, (samples, tokens)
    tokens: Tensor  # (assigned tokens,) flat indices in the batch of the tokens with a segment, sorted by segment
    starts: Tensor  # (segments,) index in tokens of the first token of each segment
    mask: Tensor  # (samples, greatest number of segments) bool, true where there is a segment

    @classmethod
    def of(cls, segments: Sequence[Sequence[int]], ids: Sequence[Id]) -> _Segments:
        """Build from the segment index of each token of each sample, as returned by :func:`align`."""
        numbers = torch.tensor(segments)
        counts = numbers.amax(1) + 1
        if bool((counts == 0).any()):
            sample = ids[int((counts == 0).nonzero()[0])]
            raise ValueError(f"sample {sample!r} lacks text that both tokenizers cover; leave it out with select")
        mask = torch.arange(int(counts.amax())) < counts[:, None]
        first_segments = counts.cumsum(0) - counts
        order = torch.where(numbers == LEFT_OUT, LEFT_OUT, numbers + first_segments[:, None]).flatten()
        tokens = order.argsort(stable=True)[int((order == LEFT_OUT).sum()) :]
        _, sizes = order[tokens].unique_consecutive(return_counts=True)
        return cls((numbers.shape[0], numbers.shape[1]), tokens, sizes.cumsum(0) - sizes, mask)

    def mean(self, name: str, activations: Representation) -> Representation:
        """Average the activations of a layer over the tokens of each segment; keep vectors of whole texts."""
        values = activations.values
        if activations.layout == "bd":
            return activations
        if values.shape[:2] != self.shape:
            raise ValueError(
                f"align='offsets' requires one vector per token, but layer {name!r} outputs {values.shape[1]} vectors "
                f"for {self.shape[1]} tokens; leave it out"
            )
        tokens, starts, mask = (tensor.to(values.device) for tensor in (self.tokens, self.starts, self.mask))
        means = values.new_zeros(*mask.shape, values.shape[2])
        means[mask] = functional.embedding_bag(tokens, values.flatten(0, 1), starts, mode="mean")
        return Representation(means, "bnd", mask=mask)


class Sides:
    """Networks and saved activations by name. Each network is loaded once."""

    def __init__(self, networks: Mapping[str, Comparable], run: Run) -> None:
        self._networks, self._device = networks, run.processes.device
        self._loaded: dict[object, Adapter] = {}

    def _load(self, network: str | nn.Module | Adapter) -> Adapter:
        key = network if isinstance(network, str) else id(network)
        if key not in self._loaded:
            self._loaded[key] = load_on(network, self._device)
        return self._loaded[key]

    def weights(self) -> dict[str, WeightSide]:
        """Return the networks for a comparison of weights. Modules do not require example inputs."""
        sides = {}
        for name, network in self._networks.items():
            if isinstance(network, Activations):
                raise TypeError(f"{name} must be a network to compare weights, got saved activations; pass the network")
            if isinstance(network, nn.Module):
                module: nn.Module = unwrap(network)
                description: dict[str, Any] = {"class": type(module).__name__, "weights": weights_hash(module)}
            else:
                adapter = self._load(network)
                module = adapter.model
                description = {"reference": adapter.pinned.to_dict(), "class": type(module).__name__}
            sides[name] = WeightSide(module, description)
        return sides

    def reading(self, asked: Asked, data: Any, paired_data: Any = None) -> dict[str, Side]:
        """Return all sides and check that they meet; the last side reads the paired data."""
        data_arguments = {"data": data, "paired_data": paired_data}
        data_by_argument = {argument: samples for argument, samples in data_arguments.items() if samples is not None}
        argument_of_network = dict.fromkeys(self._networks, "data")
        if paired_data is not None:
            argument_of_network[[*argument_of_network][-1]] = "paired_data"
        for argument in data_by_argument:
            names = [name for name, source in argument_of_network.items() if source == argument]
            if all(isinstance(self._networks[name], Activations) for name in names):
                are = "are" if len(names) > 1 else "is"
                raise ValueError(f"{' and '.join(names)} {are} saved activations; leave {argument} out")
        readers = {argument: Reader(Samples.of(samples)) for argument, samples in data_by_argument.items()}
        sides = {name: self._side(name, readers.get(argument), asked) for name, argument in argument_of_network.items()}
        first, *others = sides.values()
        for side in others:
            check_same_order(*(s.reader.samples if isinstance(s, Network) else s.ids for s in (first, side)))
            if isinstance(first, Network) and isinstance(side, Network):
                # With aligned offsets the tokenizers may differ, so the check is the same as for pooled rows.
                check_comparable(
                    first.adapter, side.adapter, "mean" if asked.align == "offsets" else POOLINGS[asked.rows]
                )
        return sides

    def _side(self, name: str, reader: Reader | None, asked: Asked) -> Side:
        network = self._networks[name]
        if isinstance(network, Activations):
            if network.pooling not in (None, POOLINGS[asked.rows]):
                raise ValueError(
                    f"rows={asked.rows!r} requires activations with pooling={POOLINGS[asked.rows]!r}, but {name} was "
                    f"recorded with pooling={network.pooling!r}"
                )
            if asked.rows == "tokens" and network.pooling == "none":
                raise ValueError(
                    f"rows='tokens' requires prefix tokens, which activations {name} lack; use rows='positions'"
                )
            return network
        if reader is None:
            raise ValueError(f"{name} is a network and requires samples; pass data")
        return Network(self._load(network), reader)

    def pair(self, asked: Asked, data: Any, paired_data: Any) -> tuple[Side, ...]:
        """Return both sides, or a single side if they are the same network or activations on the same samples."""
        a, b = self.reading(asked, data, paired_data).values()
        is_same = a is b
        if isinstance(a, Network) and isinstance(b, Network) and a.reader is b.reader:
            is_same = a.adapter.model is b.adapter.model and a.adapter.processor is b.adapter.processor
        sides = (a,) if is_same else (a, b)
        return aligned(sides) if asked.align == "offsets" else sides
