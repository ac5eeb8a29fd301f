"""The samples of two networks as one object: equal samples, or pairs with equal ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from hf_stitch.data.samples import Batch, Samples, check_same_order
from hf_stitch.printing import progress_bar
from hf_stitch.running import Run


@dataclass(frozen=True)
class PairedSamples:
    """Samples for two networks: the same samples, or different samples with equal ids in the same order (translations).

    Attributes:
        a: Samples of the first network.
        b: Samples of the second network; the same object as ``a`` for shared samples, so that each batch is read once.

    Example:
        >>> samples = PairedSamples.of(["a", "b", "c"], ["x", "y", "z"])
        >>> [(count, a.samples, b.samples) for count, a, b in samples.batches(Run(batch_size=2), "reading")]
        [(2, ['a', 'b'], ['x', 'y']), (3, ['c'], ['z'])]
    """

    a: Samples
    b: Samples

    @classmethod
    def of(cls, data: Any, paired_data: Any = None) -> Self:
        """Read the samples of one network or of both networks.

        Args:
            data: Raw samples in any form that :meth:`Samples.of` accepts.
            paired_data: Raw samples of the second network, if they differ.
        """
        a = Samples.of(data)
        if paired_data is None:
            return cls(a, a)
        b = Samples.of(paired_data)
        check_same_order(a, b)
        return cls(a, b)

    def __len__(self) -> int:
        return len(self.a)

    @property
    def differ(self) -> bool:
        """Whether the second network reads different samples."""
        return self.a is not self.b

    def with_first(self, a: Samples) -> Self:
        """Return the pair with replaced samples of the first network."""
        return type(self)(a, self.b if self.differ else a)

    def select(self, places: Iterable[int]) -> Self:
        """Return some of the samples."""
        positions = list(places)
        a = self.a.select(positions)
        return type(self)(a, self.b.select(positions) if self.differ else a)

    def take(self, count: int) -> Self:
        """Return the first samples."""
        a = self.a.take(count)
        return type(self)(a, self.b.take(count) if self.differ else a)

    def split(self, test_size: float | int, seed: int) -> tuple[Self, Self]:
        """Return a training and a test part (:meth:`Samples.split`)."""
        train, test = self.a.split(test_size, seed)
        if not self.differ:
            return type(self)(train, train), type(self)(test, test)
        index_by_id = {id_: index for index, id_ in enumerate(self.a.ids)}
        parts_b = (self.b.select([index_by_id[id_] for id_ in part.ids]) for part in (train, test))
        return type(self)(train, next(parts_b)), type(self)(test, next(parts_b))

    def of_process(self, run: Run) -> Self:
        """Return the share of the samples that this process reads."""
        if run.processes.count == 1:
            return self
        return self.select(range(*run.processes.part(len(self), run.batch_size)))

    def batches(self, run: Run, label: str, done: int = 0) -> Iterator[tuple[int, Batch, Batch]]:
        """Iterate over the batches of this process for both networks.

        Args:
            run: Options of the run.
            label: Label of the progress bar.
            done: Number of samples of this process to skip, because they have been read before.

        Yields:
            Number of samples including the batch, and the batch of each network.
        """
        of_process = self.of_process(run)
        with progress_bar(run.shown(label), len(of_process), "sample", done) as bar:
            if done >= len(of_process):
                return
            rest = of_process.select(range(done, len(of_process))) if done else of_process
            batches_a = rest.a.batches(run.batch_size)
            pairs: Iterable[tuple[Batch, Batch]] = ((batch_a, batch_a) for batch_a in batches_a)
            if rest.differ:
                pairs = zip(batches_a, rest.b.batches(run.batch_size), strict=True)
            for batch_a, batch_b in pairs:
                done += len(batch_a.samples)
                yield done, batch_a, batch_b
                bar.update(len(batch_a.samples))
