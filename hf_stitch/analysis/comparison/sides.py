"""Whose activations are compared: those of networks, of several networks as one side, or saved ones; loaded once."""

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
from hf_stitch.adapters.checks import check_meet
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
LEFT_OUT = -1
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
    """A network with its samples as one side of a comparison."""

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
    """A network whose weights are compared."""

    model: nn.Module  # the network
    description: Mapping[str, Any]  # what identifies it, as JSON values


class Networks:
    """Several networks or saved activations as a single side, which is compared with itself.

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
        wanted = set(layers)
        for name, side in self.sides.items():
            own = [layer for layer in self._layers[name] if f"{name}/{layer}" in wanted]

            def renamed(layer: str, representation: Representation, name: str = name) -> None:
                callback(f"{name}/{layer}", representation)

            if own:
                side.run_with_callback(start, stop, own, renamed)

    def describe(self) -> dict[str, Any]:
        """Return the records of all networks."""
        return {"networks": {name: side.describe() for name, side in self.sides.items()}}


def networks_of(side: Side) -> dict[str, nn.Module]:
    """Return the networks that run for a side, by what precedes their layers' names; none for saved activations."""
    if isinstance(side, Networks):
        parts = {name: networks_of(own) for name, own in side.sides.items()}
        return {f"{name}/{inner}": network for name, found in parts.items() for inner, network in found.items()}
    return {"": side.adapter.model} if isinstance(side, Network) else {}


def shares_of(side: Side) -> dict[str, float]:
    """Return the share of the parameters of its network that each module contains."""
    shares = {}
    for start, network in networks_of(side).items():
        whole = max(sum(weight.numel() for weight in network.parameters()), 1)
        for name, module in network.named_modules():
            shares[start + name] = sum(weight.numel() for weight in module.parameters()) / whole
    return shares


def align(text: str, a: Sequence[Span], b: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Assign the tokens of two tokenizations of a text to shared segments.

    The text is split wherever no token of either side crosses: this is the finest segmentation that both tokenizations
    refine. White space is ignored, so that a token with a leading space begins at its first letter. Tokens that share a
    character (the bytes of an emoji) belong to one segment.

    Segments that only one side covers are left out: segments in which the other side has no token (a character that it
    drops), and segments that extend before the first or beyond the last character of the other side, where the text may
    have been truncated at the maximum length of a model.

    Returns for each token of both sides, the index of its segment, from 0 in the order of the text. -1 for tokens that
    are left out: tokens in segments that only one side covers, white space, and special tokens.
    """
    sides = [[_visible(text, span) for span in spans] for spans in (a, b)]
    segments: list[Span] = []
    for start, end in sorted(span for side in sides for span in side if span):
        if segments and start < segments[-1][1]:
            start, end = segments[-1][0], max(segments.pop()[1], end)
        segments.append((start, end))
    starts = [start for start, _ in segments]
    places = [[bisect_right(starts, span[0]) - 1 if span else LEFT_OUT for span in side] for side in sides]
    seen = [(min(s[0] for s in side if s), max(s[1] for s in side if s)) for side in sides if any(side)]
    first, last = max((start for start, _ in seen), default=0), min((end for _, end in seen), default=0)
    both = sorted(set(places[0]) & set(places[1]) - {LEFT_OUT})
    shared = [place for place in both if first <= segments[place][0] and segments[place][1] <= last]
    numbers = {place: number for number, place in enumerate(shared)}
    of_a, of_b = ([numbers.get(place, LEFT_OUT) for place in side] for side in places)
    return of_a, of_b


def _visible(text: str, span: Span) -> Span | None:
    """Strip white space from a span; ``None`` if nothing is left."""
    piece = text[slice(*span)]
    kept = piece.strip()
    start = span[0] + len(piece) - len(piece.lstrip())
    return (start, start + len(kept)) if kept else None


def aligned(sides: Sequence[Side]) -> tuple[Side, ...]:
    """Wrap sides that read the same texts so that their rows are shared text segments instead of tokens."""
    networks = [side for side in sides if isinstance(side, Network)]
    if len(networks) < len(sides):
        raise ValueError("align='offsets' needs networks on both sides: saved activations contain no character offsets")
    if networks[0].reader is not networks[-1].reader:
        raise ValueError("align='offsets' needs the same texts on both sides: leave paired_data out")
    batch = lru_cache(maxsize=1)(partial(_tokenized, networks))  # a batch that both sides request is tokenized once
    return tuple(_Aligned(network, batch, place) for place, network in enumerate(networks))


class _Aligned(Network):
    """A network with one vector per text segment: the mean of the activations of its tokens."""

    def __init__(self, network: Network, batch: Callable[[int, int], list[Tokenized]], place: int) -> None:
        super().__init__(network.adapter, network.reader)
        self._batch, self._place = batch, place

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
            raise ValueError(f"align='offsets' takes texts, but sample {id_!r} is of type {type(text).__name__}")
    inputs = [network.adapter.preprocess(texts, offsets=True) for network in networks]
    spans = [each.pop(OFFSETS).tolist() for each in inputs]
    found = [align(*sample) for sample in zip(texts, spans[0], spans[-1], strict=True)]
    return [(each, _Segments.of([pair[side] for pair in found], ids)) for side, each in enumerate(inputs)]


@dataclass(frozen=True)
class _Segments:
    """The tokens of each segment of a batch."""

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
            raise ValueError(f"sample {sample!r} has no text that both tokenizers cover; leave it out with select")
        mask = torch.arange(int(counts.amax())) < counts[:, None]
        before = counts.cumsum(0) - counts
        order = torch.where(numbers == LEFT_OUT, LEFT_OUT, numbers + before[:, None]).flatten()
        tokens = order.argsort(stable=True)[int((order == LEFT_OUT).sum()) :]
        _, sizes = order[tokens].unique_consecutive(return_counts=True)
        return cls((numbers.shape[0], numbers.shape[1]), tokens, sizes.cumsum(0) - sizes, mask)

    def mean(self, name: str, activations: Representation) -> Representation:
        """Average the activations of a layer over the tokens of each segment; vectors of whole texts are unchanged."""
        values = activations.values
        if activations.layout == "bd":
            return activations
        if values.shape[:2] != self.shape:
            raise ValueError(
                f"layer {name!r} outputs {values.shape[1]} vectors for texts of {self.shape[1]} tokens, which cannot "
                "be aligned; leave it out"
            )
        tokens, starts, mask = (part.to(values.device) for part in (self.tokens, self.starts, self.mask))
        means = values.new_zeros(*mask.shape, values.shape[2])
        means[mask] = functional.embedding_bag(tokens, values.flatten(0, 1), starts, mode="mean")
        return Representation(means, "bnd", mask=mask)


class Sides:
    """Networks and saved activations by name. Each network is loaded once, whatever is asked of it."""

    def __init__(self, given: Mapping[str, Comparable], run: Run) -> None:
        self._given, self._device = given, run.processes.device
        self._loaded: dict[object, Adapter] = {}

    def _load(self, network: str | nn.Module | Adapter) -> Adapter:
        key = network if isinstance(network, str) else id(network)
        if key not in self._loaded:
            self._loaded[key] = load_on(network, self._device)
        return self._loaded[key]

    def weights(self) -> dict[str, WeightSide]:
        """Return the networks whose weights are compared. A module needs no example inputs."""
        found = {}
        for name, network in self._given.items():
            if isinstance(network, Activations):
                raise TypeError(f"{name} is saved activations, which contain no weights; pass the network itself")
            if isinstance(network, nn.Module):
                module: nn.Module = unwrap(network)
                described: dict[str, Any] = {"class": type(module).__name__, "weights": weights_hash(module)}
            else:
                adapter = self._load(network)
                module = adapter.model
                described = {"reference": adapter.pinned.to_dict(), "class": type(module).__name__}
            found[name] = WeightSide(module, described)
        return found

    def reading(self, asked: Asked, data: Any, paired_data: Any = None) -> dict[str, Side]:
        """Return all sides, of which the last one reads the paired data; check that they meet."""
        both = {"data": data, "paired_data": paired_data}
        given = {argument: each for argument, each in both.items() if each is not None}
        reads = dict.fromkeys(self._given, "data")
        if paired_data is not None:
            reads[[*reads][-1]] = "paired_data"
        for argument in given:
            own = [name for name, what in reads.items() if what == argument]
            if all(isinstance(self._given[name], Activations) for name in own):
                are = "are" if len(own) > 1 else "is"
                raise ValueError(
                    f"{' and '.join(own)} {are} saved activations, which take no data; leave {argument} out"
                )
        readers = {argument: Reader(Samples.of(each)) for argument, each in given.items()}
        sides = {name: self._side(name, readers.get(argument), asked) for name, argument in reads.items()}
        first, *others = sides.values()
        for side in others:
            check_same_order(*(s.reader.samples if isinstance(s, Network) else s.ids for s in (first, side)))
            if isinstance(first, Network) and isinstance(side, Network):
                # With aligned offsets the tokenizers may differ, so the check is that of a pooled comparison.
                check_meet(first.adapter, side.adapter, "mean" if asked.align == "offsets" else POOLINGS[asked.rows])
        return sides

    def _side(self, name: str, reader: Reader | None, asked: Asked) -> Side:
        given = self._given[name]
        if isinstance(given, Activations):
            if given.pooling not in (None, POOLINGS[asked.rows]):
                raise ValueError(
                    f"the activations of {name} were recorded with pooling={given.pooling!r}, and rows={asked.rows!r} "
                    f"needs pooling={POOLINGS[asked.rows]!r}"
                )
            if asked.rows == "tokens" and given.pooling == "none":
                raise ValueError(
                    f"the activations of {name} have no prefix tokens, which rows='tokens' needs: use rows='positions'"
                )
            return given
        if reader is None:
            raise ValueError(f"{name} is a network and needs samples to run on: pass data")
        return Network(self._load(given), reader)

    def pair(self, asked: Asked, data: Any, paired_data: Any) -> tuple[Side, ...]:
        """Return both sides, or a single one if they are the same network or activations on the same samples."""
        a, b = self.reading(asked, data, paired_data).values()
        one = a is b
        if isinstance(a, Network) and isinstance(b, Network) and a.reader is b.reader:
            one = a.adapter.model is b.adapter.model and a.adapter.processor is b.adapter.processor
        sides = (a,) if one else (a, b)
        return aligned(sides) if asked.align == "offsets" else sides
