"""Tensors of many samples in a file, mapped into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class Store:
    """One tensor for each sample, in a file; what is read is only what is asked for.

    Samples of one shape are rows of the file. Where samples differ in length, as texts do, a mask says which positions
    are real: these alone are kept, and come back filled up on the right.

    Args:
        path: The file; one that is there is replaced.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder) / "values")
        ...     store.append(torch.arange(6.0).view(3, 2))
        ...     store.read(torch.tensor([2, 0]))[0]
        tensor([[4., 5.],
                [0., 1.]])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lengths: list[Tensor] = []
        self._ragged = False
        self._like = torch.empty(0)
        self._mapped: Tensor | None = None
        path.unlink(missing_ok=True)

    def append(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Add samples ``(batch, ...)``, of texts with a mask ``(batch, tokens)``."""
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

    def read(self, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """The samples at some places, with the mask of those that differ in length."""
        lengths = torch.cat(self._lengths)
        if self._mapped is None:
            shape = (int(lengths.sum()), *self._like.shape[1:])
            flat = torch.from_file(str(self.path), False, torch.Size(shape).numel(), dtype=self._like.dtype)
            self._mapped = flat.view(shape)
            self._starts = lengths.cumsum(0) - lengths
        if not self._ragged:
            return self._mapped[places], None
        samples = [self._mapped[start : start + n] for start, n in zip(self._starts[places], lengths[places])]  # noqa: B905
        real = torch.arange(int(lengths[places].max())) < lengths[places][:, None]
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), real
