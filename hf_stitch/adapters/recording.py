"""Tensors of all samples in memory, such as activations: the one recorder that jobs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.representation import concatenate
from hf_stitch.resources import check_fits
from hf_stitch.running import Run

K = TypeVar("K")


@torch.no_grad()
def record(
    samples: Samples, run: Run, label: str, read: Callable[[Batch], Mapping[K, Tensor]], what: str, instead: str
) -> dict[K, Tensor]:
    """Compute tensors batch by batch, and keep those of all samples in memory, on the CPU.

    The processes share the samples, and all of them get all tensors. Shorter texts are padded. ``read`` returns the
    same names for every batch; ``what`` and ``instead`` are for the error if the tensors do not fit.
    """
    parts: dict[K, list[Tensor]] = {}
    for _, batch, _ in PairedSamples(samples, samples).batches(run, label):
        found = read(batch)
        if not parts:
            size = sum(values.nbytes for values in found.values()) * len(samples) // len(batch.samples)
            check_fits(what, size, torch.device("cpu"), instead)
        for name, values in found.items():
            parts.setdefault(name, []).append(values.to("cpu"))
    return {
        name: concatenate([part for own in run.processes.gather(parts.pop(name)) for part in own])
        for name in list(parts)
    }
