"""Conversion of tokens of a target into the tokens that a source decoder reads.

At a token of the target, the source reads the text up to the end of the token. The tokens of these prefixes differ from
the tokens of the whole text, because token boundaries depend on later characters (``walk|ed``, ``walking``). All
prefixes of a text form a tree: each node is a token that attends to its ancestors. One forward of the source computes
the whole tree, with a mask of queries by keys and the depth of each node as its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

__all__ = ["INPUTS", "PrefixReader", "Reading", "fast"]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Character that a byte-level tokenizer decodes for an incomplete character."""


@dataclass(frozen=True)
class Reading:
    """Tokens that a source reads for a batch of texts in tokens of a target.

    Attributes:
        input_ids: (batch, nodes) int64, tokens of the source.
        attention_mask: (batch, 1, nodes, past + nodes) bool, nodes that each node attends to. The first ``past`` nodes
            are in a cache.
        position_ids: (batch, nodes) int64, depth of each node.
        alignment: (batch, tokens) int64, node that each token of the target reads.
        kept: (batch, length) int64, positions in (past + nodes) of the tokens of the whole text, padded with 0: a cache
            must keep them for the next tokens.

    Example:
        >>> one = torch.zeros(1, 1, dtype=torch.long)
        >>> list(Reading(one, one[None, None].bool(), one, one, one).to_inputs())[:2]
        ['source_input_ids', 'source_attention_mask']
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    alignment: Tensor
    kept: Tensor

    def to_inputs(self) -> dict[str, Tensor]:
        """Return the tensors by the names of the arguments of a stitched model."""
        return {
            "source_input_ids": self.input_ids,
            "source_attention_mask": self.attention_mask,
            "source_position_ids": self.position_ids,
            "alignment": self.alignment,
            "source_kept": self.kept,
        }


INPUTS = ("source_input_ids", "source_attention_mask", "source_position_ids", "alignment", "source_kept")
"""Names of the tensors of a reading as arguments of a stitched model."""


class PrefixReader:
    """Converter from tokens of a target to the tokens that a source reads.

    A token of only white space does not add text: the source reads the same text as at the previous token. A character
    of several tokens is read at its last token. Special tokens are not text. For an empty text, the source reads the
    tokens that its tokenizer puts before any text, otherwise ``start``. Tokens that it appends are dropped, because the
    text continues.

    Args:
        source: Tokenizer of the source.
        target: Tokenizer of the target.
        start: Token that the source reads for an empty text.
        max_tokens: Maximum number of tokens of a text of the source; ``None`` for no limit.

    Example:
        >>> from tokenizers import models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"a": 0, "walk": 1}, "a"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate("aklw ")}, []))
        >>> reader = PrefixReader(letters, words, start=4)
        >>> reading = reader.read(torch.tensor([[0, 1]]))  # "a", "a walk"
        >>> reading.input_ids.tolist(), reading.alignment.tolist()
        ([[0, 4, 3, 0, 2, 1]], [[0, 5]])
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, start: int, max_tokens: int | None = None) -> None:
        self.source, self.target = (plain(tokenizer) for tokenizer in (source, target))
        self.start, self.max_tokens = start, max_tokens
        ends = self.source.encode("a").special_tokens_mask[::-1]
        self._added = ends.index(0) if 0 in ends else 0

    def prefixes(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that the source reads at each token of a target."""
        decoded = self.target.decode_batch([tokens[: i + 1] for i in range(len(tokens))], skip_special_tokens=True)
        texts: list[str] = []
        for text in decoded:
            text, previous = text.rstrip(UNFINISHED), texts[-1] if texts else ""
            texts.append(previous if text.rstrip() == previous.rstrip() else text)
        return texts

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts in the tokenizer of the source."""
        encoded = (encoding.ids for encoding in self.source.encode_batch(list(texts)))
        token_ids = [ids[: len(ids) - self._added] or [self.start] for ids in encoded]
        longest = max(map(len, token_ids))
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ValueError(
                f"texts must have at most {self.max_tokens} tokens in the tokenizer of the source, got {longest}: "
                "shorten them"
            )
        return token_ids

    def length(self, tokens: Sequence[int]) -> int:
        """Return the number of source tokens of a whole text."""
        text = self.target.decode(list(tokens), skip_special_tokens=True)
        return len(self.source.encode(text).ids) - self._added

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, new: int | None = None, held: int | None = None
    ) -> Reading:
        """Compute the tokens that the source reads at each token of the target.

        Args:
            input_ids: (batch, tokens) int64, tokens of the target.
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding. Default: all tokens are real.
            new: Number of last tokens that are not in a cache. Default: all.
            held: Number of tokens of the source in a cache. Default: the longest text of the batch. The cache is longer
                if a text was dropped, as in beam search.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        past = 0 if new is None else input_ids.shape[1] - new
        rows = [
            self._row(tokens, real, past) for tokens, real in zip(input_ids.tolist(), mask.bool().tolist(), strict=True)
        ]
        return _batch(rows, max(held or 0, max(row.past for row in rows)), input_ids.device)

    def _row(self, tokens: Sequence[int], real: Sequence[bool], past: int) -> _Tree:
        """Read one text; its first ``past`` tokens are in a cache."""
        ids = [token for token, is_real in zip(tokens, real, strict=True) if is_real]
        texts = self.prefixes(ids)
        cached = sum(real[:past])
        recent = texts[max(cached - 1, 0) :] if past and cached else texts
        unique = list(dict.fromkeys([*recent, ""] if not cached else recent))
        ids_of = dict(zip(unique, self.tokens(unique), strict=True))
        last_ids = ids_of[texts[cached - 1] if cached else ""]
        prefixes = [ids_of[text] for text in texts[cached:]] or [last_ids]
        num_cached = 0
        if past:
            num_cached = min(min(_common_length(last_ids, prefix), len(prefix) - 1) for prefix in prefixes)
        tree = _Tree(len(last_ids) if past else 0, num_cached)
        nodes = iter([tree.add(prefix) for prefix in prefixes])
        tree.alignment = [next(nodes) if is_real else 0 for is_real in real[past:]]
        tree.chain = tree.path(prefixes[-1])
        return tree


def tree(prefixes: Sequence[Sequence[int]], device: torch.device) -> Reading:
    """Combine several token sequences into a reading with a batch of one, aligned with the last node of each sequence.

    Example:
        >>> tree([[5], [5, 6], [5, 7]], torch.device("cpu")).input_ids.tolist()
        [[5, 6, 7]]
    """
    branches = _Tree(0, 0)
    branches.alignment = [branches.add(prefix) for prefix in prefixes]
    branches.chain = branches.path(prefixes[-1])
    return _batch([branches], 0, device)


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that neither pads nor truncates."""
    twin = Tokenizer.from_str(tokenizer.to_str())
    twin.no_padding()
    twin.no_truncation()
    return twin


def fast(tokenizer: Any, side: str) -> Tokenizer:
    """Return the ``tokenizers.Tokenizer`` inside a tokenizer of transformers.

    Args:
        tokenizer: The tokenizer of a network.
        side: Name of the network, for the message.

    Example:
        >>> from tokenizers import models
        >>> from transformers import PreTrainedTokenizerFast
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
        >>> type(fast(tokenizer, "source")).__name__
        'Tokenizer'
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"align='prefix' requires a fast tokenizer of the {side}, got {type(tokenizer).__name__}: pass one as "
            "processor= to hf_stitch.load"
        )
    return backend


@dataclass
class _Tree:
    past: int  # tokens of this text in a cache
    have: int  # number of cached tokens that are used; the rest is read again
    tokens: list[int] = field(default_factory=list)  # token of each node
    depths: list[int] = field(default_factory=list)  # position of each node
    above: list[tuple[int, ...]] = field(default_factory=list)
    alignment: list[int] = field(default_factory=list)  # node of each token of the target
    chain: list[int] = field(default_factory=list)  # nodes of the whole text
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> int:
        """Add a prefix and return its last node; its first tokens may be in the cache."""
        node = -1
        for depth in range(self.have, len(tokens)):
            child = self._children.setdefault((node, tokens[depth]), len(self.tokens))
            if child == len(self.tokens):
                self.above.append((*(self.above[node] if node >= 0 else ()), child))
                self.tokens.append(tokens[depth])
                self.depths.append(depth)
            node = child
        return node

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Return the positions of the tokens of a prefix."""
        return [*range(self.have), *(-1 - node for node in self.above[self.add(tokens)])]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _batch(trees: Sequence[_Tree], past: int, device: torch.device) -> Reading:
    nodes = max(len(tree.tokens) for tree in trees)
    ids, depths = np.zeros((2, len(trees), nodes), dtype=np.int64)
    mask = np.zeros((len(trees), 1, nodes, past + nodes), dtype=bool)
    mask[:, 0, :, past:] |= np.eye(nodes, dtype=bool)  # an empty row would be NaN
    chains = np.zeros((len(trees), max(len(tree.chain) for tree in trees)), dtype=np.int64)
    for row, tree in enumerate(trees):
        ids[row, : len(tree.tokens)] = tree.tokens
        depths[row, : len(tree.tokens)] = tree.depths
        mask[row, 0, : len(tree.tokens), : tree.have] = True
        for node, above in enumerate(tree.above):
            mask[row, 0, node, [past + position for position in above]] = True
        chains[row, : len(tree.chain)] = [position if position >= 0 else past - 1 - position for position in tree.chain]
    alignment = np.array([tree.alignment for tree in trees], dtype=np.int64)
    tensors = (torch.from_numpy(array).to(device) for array in (ids, mask, depths, alignment, chains))
    return Reading(*tensors)
