"""Computation of a tensor for every sample, such as activations, collected in memory."""

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
    samples: Samples, run: Run, label: str, read: Callable[[Batch], Mapping[K, Tensor]], description: str, instead: str
) -> dict[K, Tensor]:
    """Compute tensors batch by batch, and store the tensors of all samples in memory, on the CPU.

    The processes share the samples, and each receives all tensors. Shorter texts are padded. ``read`` must return the
    same names for every batch; ``description`` names the tensors and ``instead`` an alternative, in the error if
    the tensors do not fit into memory.
    """
    parts: dict[K, list[Tensor]] = {}
    for _, batch, _ in PairedSamples(samples, samples).batches(run, label):
        tensors = read(batch)
        if not parts:
            size = sum(values.nbytes for values in tensors.values()) * len(samples) // len(batch.samples)
            check_fits(description, size, torch.device("cpu"), instead)
        for name, values in tensors.items():
            parts.setdefault(name, []).append(values.to("cpu"))
    return {
        name: concatenate([part for process_parts in run.processes.gather(parts.pop(name)) for part in process_parts])
        for name in list(parts)
    }
