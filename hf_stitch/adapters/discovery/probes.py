"""Inputs to verify cuts: an example in other sizes, with other tokens, padded on either side."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.adapters.cutting.interface import Interface, mask_of, size_of_inputs


class Probes:
    """Inputs derived from an example."""

    def __init__(self, interface: Interface, example: Mapping[str, Any]) -> None:
        self.interface, self.example = interface, dict(example)

    @property
    def tokens(self) -> int:
        """Number of tokens of the texts of the example; 0 without texts."""
        return size_of_inputs(self.example, self.interface)[1]

    def vary(self, batch: int, tokens: int | None = None) -> dict[str, Any]:
        """Change the number of samples and tokens of the example by repetition.

        If the example has one sample, every second repetition differs; otherwise, state left by one forward would be
        correct for the next forward.
        """
        old_batch = size_of_inputs(self.example, self.interface)[0]
        varied = {}
        for name, value in self.example.items():
            if isinstance(value, Tensor) and value.dim():
                rows = len(value) // old_batch if name in self.interface.packed else 1
                if value.shape[0] == old_batch * rows:
                    indices = torch.arange(batch, device=value.device) % old_batch
                    value = value.unflatten(0, (old_batch, rows))[indices].flatten(0, 1)
                if tokens and name not in self.interface.shapes and value.shape[1:2] == (self.tokens,):
                    value = value[:, self._positions(tokens).to(value.device)]
            varied[name] = copy.deepcopy(value) if not isinstance(value, Tensor) else value
        if old_batch == 1 < batch:
            varied |= {name: self._with_alternate_samples(varied[name]) for name in self.interface.content}
        return varied

    def _positions(self, tokens: int) -> Tensor:
        """Return the positions of the example's tokens that form a text of another length.

        Texts may end with a token that heads search for. In multimodal inputs, an ordinary word is repeated, not an
        image placeholder token.
        """
        if self.interface.modality != "text":
            special = torch.isin(self.example[str(self.interface.text)], torch.tensor(self.interface.special_ids))
            words = (~special.any(0)).nonzero().flatten().tolist() or [0]
            return torch.tensor([*range(self.tokens), *[words[-1]] * (tokens - self.tokens)]).sort().values
        positions = torch.arange(tokens) % max(self.tokens - 1, 1)
        positions[-1] = self.tokens - 1
        return positions

    def _half_empty(self, content: Tensor) -> Tensor:
        """Return images with one half set to zero; they are not padding."""
        content = content.clone()
        content[..., : content.shape[-1] // 2] = 0
        return content

    def _with_alternate_samples(self, content: Tensor) -> Tensor:
        """Change every second sample: values in reverse order, or other words."""
        second = content[1::2]
        content = content.clone()
        content[1::2] = second.flip(-1) if content.is_floating_point() else self._other_ids(second)
        return content

    def other_words(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the token ids of the content by other ids."""
        ids = {n: inputs[n] for n in self.interface.content if not inputs[n].is_floating_point()}
        return {**inputs, **{name: self._other_ids(value) for name, value in ids.items()}}

    def _other_ids(self, ids: Tensor) -> Tensor:
        """Permute token ids other than the special ones, which keep their positions."""
        special = self.interface.special_ids
        mixed, ordinary = ids.clone(), ~torch.isin(ids, ids.new_tensor(special))
        mixed[ordinary] = ids[ordinary].roll(1)
        if torch.equal(mixed, ids):  # all ids are the same: use another one
            mixed[ordinary] = next(i for i in range(len(special) + 2) if i not in special and i not in ids)
        return mixed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over inputs of sizes that differ from the traces; texts are also padded right and left.

        Consecutive inputs differ in size, to expose state that one forward leaves for the next.
        """
        if self.interface.modality != "text":
            yield self.vary(1)
            yield {n: v.flip(0) if n in self.interface.content else v for n, v in self.vary(4).items()}
            if self.interface.tiles:
                yield {n: self._half_empty(v) if n in self.interface.content else v for n, v in self.vary(2).items()}
            yield from self._with_other_texts()
            return
        n = self.tokens + 3
        full = self.vary(3, n)
        for name in self.interface.given:  # change the length of arguments whose length is independent of the content
            if full[name].shape[1] != n:
                for argument in {name, mask_of(name)} & full.keys():
                    full[argument] = torch.cat([full[argument], full[argument][:, -1:]], 1)
        yield full
        mask = self.interface.mask
        if mask in full and (self.interface.pad_id is not None or len(self.interface.content) == 1):
            for left in (False, True):
                n -= 1
                lengths = torch.tensor([n, 1])
                ragged = self.vary(2, n)
                real = torch.arange(n)[None] < lengths[:, None]
                real = (real.flip(1) if left else real).to(full[mask].device)
                last = (real * torch.arange(1, n + 1, device=real.device)).argmax(1, keepdim=True)
                ends = {name: ragged[name].scatter(1, last, ragged[name][:, -1:]) for name in self.interface.content}
                pad = self.interface.pad_id or 0
                padded = {name: torch.where(real, ids, pad) for name, ids in ends.items()}
                yield {**ragged, **padded, mask: real.long()}

    def _with_other_texts(self) -> Iterator[dict[str, Any]]:
        """Iterate over contents with longer texts, and with a text that is padded right and left."""
        text, mask, n = self.interface.text, self.interface.mask, self.tokens
        if text is None:
            return
        longer = self.vary(3, min(n + 3, (self.interface.max_tokens or n + 4) - 1))
        for name in {*self.interface.given} - {text}:
            for argument in {name, mask_of(name)} & longer.keys():
                longer[argument] = torch.cat([longer[argument], longer[argument][:, -1:]], 1)
        yield longer
        for left in (False, True) if mask in longer else ():
            batch, positions = self.vary(2), torch.arange(n)
            shorter = torch.cat([positions[:1], positions] if left else [positions, positions[-1:]])
            indices = self._positions(n + 1), shorter
            for name, value in batch.items():
                if isinstance(value, Tensor) and name not in self.interface.shapes and value.shape[1:2] == (n,):
                    rows = [row[index.to(row.device)] for row, index in zip(value, indices, strict=True)]
                    batch[name] = torch.stack(rows)
                    batch[name][1, 0 if left else -1] = (self.interface.pad_id or 0) if name == text else 0
            yield batch

    def further(self) -> Iterator[dict[str, Any]]:
        """Iterate over texts that the network may reject: up to four times as long, with all outputs of the tokenizer.

        The first batch has both properties, the second and third have one each.
        """
        if self.interface.modality != "text":
            return
        long = self.vary(1, min(4 * self.tokens, self.interface.max_tokens or 4 * self.tokens))
        both, usual = self._with_all(long), self.vary(2)
        yield both
        if both.keys() != long.keys():
            yield long
            yield self._with_all(usual)

    def _with_all(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the outputs of the tokenizer that the example lacks."""
        extra = {}
        for name in set(self.interface.arguments) - inputs.keys():
            ids = next(
                (i for i in (*self.interface.content, *self.interface.given) if mask_of(i) == mask_of(name)), None
            )
            if ids is not None:
                extra[name] = torch.full_like(inputs[ids], int(name == mask_of(ids)))
        return {**inputs, **extra}


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy inputs, so that a forward may overwrite them."""
    return {n: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for n, value in inputs.items()}
