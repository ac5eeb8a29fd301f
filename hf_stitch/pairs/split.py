"""The samples of a job: :class:`Split`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from hf_stitch.data import PairedSamples, Samples
from hf_stitch.pairs.pair import Pair
from hf_stitch.running import Run
from hf_stitch.tasks.heads import task_named

TEST_SIZE = 0.2
"""Default share of held-out samples."""


@dataclass(frozen=True)
class Split:
    """Training samples to fit stitches, and test samples to score them.

    Attributes:
        train: The training samples.
        test: The test samples.
        unpaired: Unpaired samples of the source and of the target, or ``None``.
        record: Description of the samples as JSON values for a recipe.

    Example:
        >>> import torch, hf_stitch
        >>> net = hf_stitch.load(torch.nn.Sequential(torch.nn.Linear(4, 2)), example_inputs=torch.randn(2, 4))
        >>> split = Split.of(Pair(net, net), Run(), torch.randn(10, 4), test_size=2)
        >>> len(split.train), len(split.test), split.record["test_size"]
        (8, 2, 2)
    """

    train: PairedSamples
    test: PairedSamples
    unpaired: tuple[Samples, Samples] | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pair: Pair, run: Run, data: Any, *, paired_data: Any = None, test_data: Any = None,
        test_size: float | int | None = None, unpaired: Any = None,
    ) -> Self:  # fmt: skip
        """Read the samples of a pair of networks, number their labels as in the target, and split them by sample."""
        if paired_data is not None and pair.align == "prefix":
            raise ValueError("align='prefix' requires the same texts for both networks; remove paired_data")
        if paired_data is not None and test_data is not None:
            raise ValueError("paired_data is split together with data; remove test_data")
        if test_size is not None and test_data is not None:
            raise ValueError("test_size and test_data cannot be combined; remove one")
        unpaired_samples = None if unpaired is None else _unpaired(unpaired)
        pairs = PairedSamples.of(data, paired_data)
        record: dict[str, Any] = {"data": pairs.a.fingerprint}
        if pairs.differ:
            record["paired_data"] = pairs.b.fingerprint
        samples = _numbered(pairs, pair)
        if test_data is None:
            size = TEST_SIZE if test_size is None else test_size
            train, test = samples.split(size, run.seed)
            record |= {"test_size": size, "seed": run.seed}
        else:
            held_out = PairedSamples.of(test_data)
            record["test_data"] = held_out.a.fingerprint
            train, test = samples, _numbered(held_out, pair)
        if unpaired_samples is not None:
            record["unpaired"] = [side.fingerprint for side in unpaired_samples]
        for side_samples in (train.a, test.a, *(unpaired_samples or ())[:1]):
            pair.source.check_lengths(side_samples)
        return cls(train, test, unpaired_samples, {**record, "samples": len(train)})


def _numbered(samples: PairedSamples, pair: Pair) -> PairedSamples:
    first_samples = task_named(pair.task).numbered(samples.a, getattr(pair.target.model, "config", None))
    return samples.with_first(first_samples)


def _unpaired(data: tuple[Any, Any]) -> tuple[Samples, Samples]:
    sides = Samples.of(data[0]), Samples.of(data[1])
    for name, side in zip(("source", "target"), sides, strict=True):
        if len(side) < 2:
            raise ValueError(f"unpaired samples of the {name} must be at least 2, got {len(side)}")
    return sides
