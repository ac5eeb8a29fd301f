"""Looking at a network in training without its noticing: the same samples each time, everything left as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.data import Batch, Samples
from hf_stitch.processes import Processes
from hf_stitch.representation import POOLINGS, Pooling, Representation


class Probe:
    """The samples that a network is shown again and again while it learns, and what is taken of them.

    Attributes:
        samples: Raw samples.
        pooling: The pooling.
        batch_size: Samples per forward.

    Args:
        data: What :meth:`hf_stitch.Samples.of` takes; never the loader that training reads from.
        pooling: The pooling.
        batch_size: Samples per forward.

    Raises:
        ValueError: If there are less than two samples, or the policy is unknown.
    """

    def __init__(self, data: Any, pooling: Pooling, batch_size: int) -> None:
        self.samples = Samples.of(data)
        if len(self.samples) < 2:
            raise ValueError(f"a probe takes at least 2 samples, got {len(self.samples)}")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.pooling, self.batch_size = pooling, batch_size

    def activations(self, adapter: Adapter, layers: Iterable[str], processes: Processes) -> Activations:
        """What a network says of the samples; processes share them, and all get everything."""
        return extract_activations(
            adapter, self.samples, layers=layers, pooling=self.pooling,
            batch_size=self.batch_size, accelerator=processes.accelerator, progress=False,
        )  # fmt: skip

    def rehearse(self, adapter: Adapter, layers: Iterable[str]) -> None:
        """Take one sample to every layer, so that what cannot work fails before training begins.

        Raises:
            NotACutError: If a layer does not exist, does not run, or runs several times.
            ValueError: If the network does not take such samples, or a layer has no rows by the policy.
        """
        batch = next(self.samples.batches(1))
        for name, representation in representations(adapter, batch, layers).items():
            try:
                representation.rows(self.pooling)
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from error


@torch.no_grad()
def representations(adapter: Adapter, batch: Batch, layers: Iterable[str]) -> dict[str, Representation]:
    """What a network says of a batch at some layers, which need not be cuts; the context is left out."""
    found: dict[str, Representation] = {}

    def keep(name: str, representation: Representation) -> None:
        found[name] = representation.replace(values=representation.values.clone(), context={})

    adapter.run_with_callback(adapter.preprocess(batch.samples), list(layers), keep)
    return found


def check_whole(model: nn.Module) -> None:
    """Refuse a network whose weights no process has to itself.

    Raises:
        ValueError: If the weights are sharded (FSDP, DeepSpeed's ZeRO-3) or not loaded.
    """
    sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if sharded or any(isinstance(p, DTensor) or hasattr(p, "ds_id") or p.is_meta for p in model.parameters()):
        raise ValueError(
            f"the weights of {type(model).__name__} are sharded over the processes (FSDP, ZeRO-3) or offloaded, and to "
            "be watched a network must be whole in every process: train it by DDP or in one process, or compare its "
            "checkpoints afterwards by hf_stitch.compare"
        )


@contextmanager
def unnoticed(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Whatever runs inside leaves no trace in training.

    Random states of Python, NumPy and torch (CPU and CUDA) are put back. Gradients are off. Modules compiled in place
    run as they were written. Where several processes train, each has seen other batches and has other buffers
    (BatchNorm's statistics); inside, all have those of the first, whose are saved, so that one network is looked at.

    Args:
        model: The network in training, unwrapped.
        processes: Those that train it.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)  # casts made without gradients must not serve training
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_as_written(model))
        if processes.count > 1:
            stack.enter_context(_buffers_of_first(model))
        yield


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Without what ``module.compile()`` has put in the place of calls."""
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


@contextmanager
def _buffers_of_first(model: nn.Module) -> Iterator[None]:
    """Copies of the first process's buffers in the place of this one's, which a graph may still refer to."""
    from accelerate.utils import broadcast

    own = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    try:
        for module, name, buffer in own:
            module._buffers[name] = broadcast(buffer.clone())
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer
