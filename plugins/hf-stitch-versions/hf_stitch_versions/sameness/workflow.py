"""Whether two networks are the same: :func:`same`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from hf_stitch import Activations, Adapter, Samples, load
from hf_stitch.adapters import load_on
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.data import Data
from hf_stitch.options import Positive, checked
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch_versions.sameness.comparison import Comparison
from hf_stitch_versions.sameness.result import Sameness
from hf_stitch_versions.sources import Recorded, Source, in_memory

BATCH = 8
"""Samples per forward: the values of all modules are in memory at the same time."""


@checked
def same(
    a: str | nn.Module | Adapter, b: str | Path | nn.Module | Adapter | Activations, data: Data | None = None, *,
    tolerance: Positive = 4.0, **options: Unpack[RunOptions],
) -> Sameness:  # fmt: skip
    """Tell whether two networks are the same, and where they first differ.

    The first network, computed in float64, is the reference. What rounding does to each module, in float32 or in the
    coarser of their dtypes if these differ, is the null. The first module of the second network (also computed in
    float64, if it is here) that differs by more than ``tolerance`` times its null is looked at: if its inputs differ,
    too, not the module is the cause, but what called it. Then its output is replaced by that of the reference, and the
    next difference is looked for.

    Args:
        a: The first network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The second network, also a module that takes the inputs of the first, or what ``torch.compile`` returned; or
            a file of an exported one (``….onnx``), or recorded activations of layers that have the names of the first
            network's (:class:`hf_stitch.Activations`, or a file of them).
        data: Raw samples; some tens suffice. Default: random inputs within the bounds of the first network, of several
            lengths, padded on both sides.
        tolerance: Multiple of the null from which on a module differs.
        **options: Options of the run: ``batch_size`` (here 8), ``seed`` (of random inputs), ``progress`` and
            ``accelerator``, as in :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The answer in a sentence, the modules that compute something else, and a table of all modules.

    Raises:
        ValueError: If the networks have other widths (then use :func:`hf_stitch.compare`), the second one does not run
            on the inputs of the first, recorded activations are of other samples or of no layer of the first network.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import LayerNorm, Linear, Sequential
        >>> net = Sequential(Linear(4, 8), LayerNorm(8), Linear(8, 2))
        >>> port = Sequential(Linear(4, 8), LayerNorm(8, eps=1e-3), Linear(8, 2))
        >>> _ = port.load_state_dict(net.state_dict())
        >>> a, b = (hf_stitch.load(each, example_inputs=torch.randn(2, 4)) for each in (net, port))
        >>> found = same(a, b, torch.randn(20, 4), progress=False)
        >>> found.is_same, found.findings[0].module, found.findings[0].settings
        (False, '1', ('eps 1e-05 against 0.001',))
        >>> same(a, a).is_same
        True
    """
    options.setdefault("batch_size", BATCH)
    with Run.of(same, options, takes=WITHOUT_STATE) as run:
        first = in_memory(load_on(a, run.processes.device))
        other = _source(b, first, run)
        other = in_memory(other) if isinstance(other, Adapter) else other
        samples = None if data is None else Samples.of(data)
        code = b if isinstance(b, nn.Module) and hasattr(b, "_orig_mod") else None
        return Comparison(first, other, samples, tolerance, run, code).answer()


def _source(b: Any, first: Adapter, run: Run) -> Adapter | Source:
    """Return the second network, or what reads its file."""
    place = Path(b) if isinstance(b, (str, Path)) else None
    if place is not None and place.suffix == ".onnx":
        from hf_stitch_versions.sameness.exports import Onnx

        return Onnx(place)
    if place is not None and place.suffix in (".npz", ".safetensors"):
        return Recorded(Activations.load(place))
    if isinstance(b, Activations):
        return Recorded(b)
    if isinstance(b, nn.Module):
        with suppress(ExampleError):  # user code, which takes the inputs of the first network
            return load(b)
        return load(b, example_inputs=dict(first.example), processor=first.processor)
    return load_on(str(b) if isinstance(b, Path) else b, run.processes.device)
