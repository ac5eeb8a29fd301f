"""Tokens of two tokenizers, brought together by the characters that they stand for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
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
"""A stretch of a text: its first character, and the one after its last."""

LEFT_OUT = -1


def align(text: str, a: Sequence[Span], b: Sequence[Span]) -> tuple[list[int], list[int]]:
    """The segments of a text that two tokenizations share, and which of them each token belongs to.

    The text is cut wherever no token of either side goes across: the finest segmentation that both tokenizations
    refine. White space counts for nothing, so that a token with a leading space begins at its first letter; tokens that
    share a character (the bytes of an emoji) are in one segment.

    What only one side saw is left out: segments in which the other has no token (a character that it drops), and those
    that reach before the first or beyond the last character of the other, where a text may have been cut at the limit
    of a model.

    Args:
        text: The text.
        a: For each token of one side the characters that it stands for; none, ``(0, 0)``, for special tokens.
        b: Of the other side.

    Returns:
        For each token of both sides the number of its segment, from 0 in the order of the text; -1 for tokens that are
        left out: of what only one side saw, of white space, and special ones.

    Example:
        >>> align("naive cat", [(0, 2), (2, 5), (6, 9)], [(0, 5), (5, 9), (0, 0)])
        ([0, 0, 1], [0, 1, -1])
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
    """The span without white space at its ends; ``None`` if there is nothing else."""
    piece = text[slice(*span)]
    kept = piece.strip()
    start = span[0] + len(piece) - len(piece.lstrip())
    return (start, start + len(kept)) if kept else None


def aligned(sides: Sequence[Side]) -> tuple[Side, ...]:
    """Sides whose tokens correspond, of sides that read the same texts: their rows are segments of text.

    Raises:
        ValueError: If a side is no network, or the sides read different samples.
    """
    networks = [side for side in sides if isinstance(side, Network)]
    if len(networks) < len(sides):
        raise ValueError(
            "align='offsets' takes networks on both sides: saved activations do not say which text is where"
        )
    if networks[0].reader is not networks[-1].reader:
        raise ValueError("align='offsets' takes the same texts on both sides: leave paired_data out")
    shared = _Shared(networks)
    return tuple(_Aligned(network, shared, place) for place, network in enumerate(networks))


class _Aligned(Network):
    """A network that says one vector for each segment of text: the mean of those of its tokens."""

    def __init__(self, network: Network, shared: _Shared, place: int) -> None:
        super().__init__(network.adapter, network.reader)
        self._shared, self._place = shared, place

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run the network once."""
        inputs, segments = self._shared.batch(start, stop)[self._place]
        self.adapter.run_with_callback(inputs, layers, lambda name, said: callback(name, segments.mean(name, said)))


class _Shared:
    """What the networks' tokenizers make of a batch of texts; a batch that both sides ask for is read once."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._place: tuple[int, int] | None = None
        self._batch: list[tuple[dict[str, Any], _Segments]] = []

    def batch(self, start: int, stop: int) -> list[tuple[dict[str, Any], _Segments]]:
        """For each network its inputs, and which segment each token belongs to."""
        if self._place != (start, stop):
            self._batch = self._read(start, stop)
            self._place = (start, stop)
        return self._batch

    def _read(self, start: int, stop: int) -> list[tuple[dict[str, Any], _Segments]]:
        reader = self._networks[0].reader
        texts, ids = reader.read(start, stop), reader.samples.ids[start:stop]
        for text, id_ in zip(texts, ids, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"align='offsets' takes texts, and sample {id_!r} is of type {type(text).__name__}")
        inputs = [network.adapter.preprocess(texts, offsets=True) for network in self._networks]
        spans = [each.pop(OFFSETS).tolist() for each in inputs]
        found = [align(*sample) for sample in zip(texts, spans[0], spans[-1], strict=True)]
        return [(each, _Segments.of([pair[side] for pair in found], ids)) for side, each in enumerate(inputs)]


@dataclass(frozen=True)
class _Segments:
    """The tokens of each segment of a batch.

    Attributes:
        shape: Of the batch: (samples, tokens).
        tokens: Places in the batch of the tokens that count, segment by segment.
        starts: For each segment the place of its first token in ``tokens``.
        mask: (samples, most segments of one), true where there is a segment.
    """

    shape: tuple[int, int]
    tokens: Tensor
    starts: Tensor
    mask: Tensor

    @classmethod
    def of(cls, segments: Sequence[Sequence[int]], ids: Sequence[Id]) -> _Segments:
        """From the segment of every token of every sample, as :func:`align` says it."""
        numbers = torch.tensor(segments)
        counts = numbers.amax(1) + 1
        if bool((counts == 0).any()):
            sample = ids[int((counts == 0).nonzero()[0])]
            raise ValueError(f"sample {sample!r} has no text that both tokenizers saw; leave it out by select")
        mask = torch.arange(int(counts.amax())) < counts[:, None]
        before = counts.cumsum(0) - counts
        order = torch.where(numbers == LEFT_OUT, LEFT_OUT, numbers + before[:, None]).flatten()
        tokens = order.argsort(stable=True)[int((order == LEFT_OUT).sum()) :]
        _, sizes = order[tokens].unique_consecutive(return_counts=True)
        return cls((numbers.shape[0], numbers.shape[1]), tokens, sizes.cumsum(0) - sizes, mask)

    def mean(self, name: str, said: Representation) -> Representation:
        """What a layer says of the segments: the means over their tokens; of a text as a whole it is left as it is."""
        values = said.values
        if said.layout == "bd":
            return said
        if values.shape[:2] != self.shape:
            raise ValueError(
                f"layer {name!r} says {values.shape[1]} vectors of texts of {self.shape[1]} tokens, so that nobody "
                "knows which text is where; leave it out"
            )
        tokens, starts, mask = (part.to(values.device) for part in (self.tokens, self.starts, self.mask))
        means = values.new_zeros(*mask.shape, values.shape[2])
        means[mask] = functional.embedding_bag(tokens, values.flatten(0, 1), starts, mode="mean")
        return Representation(means, "bnd", mask=mask)
