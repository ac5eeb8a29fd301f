"""Measurement of a network on fixed samples during training, without side effects on training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.forwards import is_compiled
from hf_stitch.adapters.examples import LACKING, lacks_weights
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.data import Batch, Samples
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Processes


class Probe:
    """Fixed samples for measuring a network during training."""

    def __init__(self, data: Any, pooling: Pooling, batch_size: int) -> None:
        self.samples = Samples.of(data)
        if len(self.samples) < 2:
            raise ValueError(f"a probe must have at least 2 samples, got {len(self.samples)}")
        self.pooling, self.batch_size = pooling, batch_size

    def activations(self, adapter: Adapter, layers: Iterable[str], processes: Processes) -> Activations:
        """Compute activations of the samples, distributed over the processes."""
        return extract_activations(
            adapter, self.samples, layers=layers, pooling=self.pooling,
            batch_size=self.batch_size, accelerator=processes.accelerator, progress=False,
        )  # fmt: skip

    def check_layers(self, adapter: Adapter, layers: Iterable[str]) -> None:
        """Run one sample to every layer, so that errors occur before training starts."""
        batch = next(self.samples.batches(1))
        for name, representation in representations(adapter, batch, layers).items():
            try:
                representation.rows(self.pooling)
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from error


def optional_probe(data: Any, pooling: Pooling, batch_size: int, *, runs: bool) -> Probe | None:
    """Return the probe of a callback that computes activations, otherwise None."""
    if runs and data is None:
        raise ValueError("metrics of activations require samples: pass probe=")
    if not runs and data is not None:
        raise ValueError("metrics of weights do not use samples: remove probe=")
    return Probe(data, pooling, batch_size) if runs else None


@torch.no_grad()
def representations(adapter: Adapter, batch: Batch, layers: Iterable[str]) -> dict[str, Representation]:
    """Compute activations of a batch at any layers, including layers that are not cuts."""
    by_layer: dict[str, Representation] = {}

    def keep(name: str, representation: Representation) -> None:
        by_layer[name] = representation.replace(values=representation.values.clone(), context={})

    adapter.run_with_callback(adapter.preprocess(batch.samples), list(layers), keep)
    return by_layer


def check_whole(model: nn.Module) -> None:
    """Raise an error if a weight of a network is missing in this process."""
    if any(map(lacks_weights, model.modules())):
        raise ValueError(f"{type(model).__name__} {LACKING}")


@contextmanager
def unnoticed(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Run a network in this context without side effects on training.

    Random states of Python, NumPy and torch (CPU and CUDA) are restored afterwards. Gradients are disabled. Modules
    compiled in place run uncompiled. With several processes, the buffers (BatchNorm statistics) differ between
    processes because each has trained on different batches. Inside the context, all processes use the buffers of rank
    0, which checkpoints also store, so that all measure the same network.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)  # casts cached without gradients must not be reused in training
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.no_grad())
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if processes.count > 1:
            stack.enter_context(_buffers_of_first(model, processes))
        yield


@contextmanager
def _buffers_of_first(model: nn.Module, processes: Processes) -> Iterator[None]:
    """Replace the buffers with copies from rank 0; the originals stay intact because a graph may refer to them."""
    from accelerate.utils import broadcast

    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = broadcast(buffer.clone())
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
