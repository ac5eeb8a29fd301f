"""Rows of tensors in a file, mapped into memory: what is read is only what is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


class RowStore:
    """One tensor for each sample, in a file that grows.

    Samples of one shape are rows of the file. Where samples differ in length, as texts do, a mask says which positions
    are real: these alone are kept, and come back filled up on the right.

    Attributes:
        path: The file.

    Args:
        path: The file; one that is there is replaced.
        resume: Number of rows of the file that stay, all others being cut off.
        like: With ``resume``, a tensor of the shape (but for the number of rows) and dtype of the rows.

    Raises:
        ValueError: If the file has fewer rows than are to stay.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = RowStore(Path(folder) / "values")
        ...     store.append(torch.arange(6.0).view(3, 2))
        ...     store.read(torch.tensor([2, 0]))[0]
        tensor([[4., 5.],
                [0., 1.]])
    """

    def __init__(self, path: Path, *, resume: int = 0, like: Tensor | None = None) -> None:
        self.path = path
        self._lengths: list[Tensor] = []
        self._ragged = False
        self._like = torch.empty(0) if like is None else like[:0].cpu()
        self._mapped: Tensor | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        size = resume * self._like[:0].new_empty(1, *self._like.shape[1:]).nbytes
        if path.stat().st_size < size:
            raise ValueError(f"{path} is shorter than its state says; start again in an empty folder")
        os.truncate(path, size)
        if resume:
            self._lengths.append(torch.ones(resume, dtype=torch.long))

    def __len__(self) -> int:
        """Number of rows in the file."""
        return int(sum(lengths.sum() for lengths in self._lengths))

    def append(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Add samples.

        Args:
            values: ``(batch, ...)``.
            mask: ``(batch, tokens)`` bool, for texts: which positions are real.
        """
        if mask is None:
            rows, lengths = values, torch.ones(len(values), dtype=torch.long)
        else:
            self._ragged = True
            rows, lengths = values[mask], mask.sum(1).cpu()
        self._lengths.append(lengths)
        self._like = rows[:0].cpu()
        self._mapped = None
        with self.path.open("ab") as file:
            file.write(rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def rows(self) -> Tensor:
        """All rows, mapped into memory."""
        if self._mapped is None:
            shape = torch.Size((len(self), *self._like.shape[1:]))
            flat = torch.from_file(str(self.path), False, shape.numel(), dtype=self._like.dtype)
            self._mapped = flat.view(shape)
        return self._mapped

    def read(self, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """The samples at some places.

        Args:
            places: ``(n,)`` int64.

        Returns:
            ``(n, ...)``, and the mask of samples that differ in length.
        """
        rows = self.rows()
        if not self._ragged:
            return rows[places], None
        lengths = torch.cat(self._lengths)
        starts = lengths.cumsum(0) - lengths
        samples = [rows[start : start + n] for start, n in zip(starts[places], lengths[places], strict=True)]
        real = torch.arange(int(lengths[places].max())) < lengths[places][:, None]
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), real
