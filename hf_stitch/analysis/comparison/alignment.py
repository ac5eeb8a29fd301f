"""Alignment of the tokens of two tokenizers by their character offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters.base import LayerCallback
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.analysis.comparison.sides import Network, Side
from hf_stitch.data import Id
from hf_stitch.representation import Representation

Align = Literal["tokens", "offsets"]
ALIGN: tuple[str, ...] = get_args(Align)

Span = tuple[int, int]
"""Character span of a token: index of the first character, and index after the last one."""

Tokenized = tuple[dict[str, Any], "_Segments"]
"""Inputs of a network, and the segments of their tokens."""

LEFT_OUT = -1


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
