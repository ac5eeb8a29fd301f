"""How alike is every layer of one network to every layer of another: :func:`compare`, in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.alignment import ALIGN, Align, aligned
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.routes import ComparisonPlan
from hf_stitch.analysis.comparison.sides import Network, Reader, Side
from hf_stitch.data import Samples, check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.processes import Processes
from hf_stitch.representation import POOLINGS, Pooling

if TYPE_CHECKING:
    from accelerate import Accelerator


Comparable = str | nn.Module | Adapter | Activations


@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), pooling: Pooling = "mean",
    align: Align = "tokens", paired_data: Any = None, batch_size: int = 64, plan: Literal[False] = False,
    checkpoint_dir: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
) -> SimilarityAtlas: ...  # fmt: skip


@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), pooling: Pooling = "mean",
    align: Align = "tokens", paired_data: Any = None, batch_size: int = 64, plan: Literal[True],
    checkpoint_dir: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
) -> ComparisonPlan: ...  # fmt: skip


def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), pooling: Pooling = "mean",
    align: Align = "tokens", paired_data: Any = None, batch_size: int = 64, plan: bool = False,
    checkpoint_dir: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
) -> SimilarityAtlas | ComparisonPlan:  # fmt: skip
    """Compare every layer of one network with every layer of another, in one pass over the data.

    Each network runs once per batch; the same model on both sides runs once for both. Where several routes lead to the
    same value (co-moments, d × d, or Gram matrices, n × n), the cheaper one that fits into memory is taken and named in
    the atlas. Under ``none`` grids of different sizes are brought to that of b's layer (bilinear), prefix tokens
    and masked positions are left out.

    Under ``accelerate launch`` every process takes a part of the samples and all get the same atlas; nothing is to be
    changed in the call. ``minibatch_cka`` alone depends on the order of the samples, and on the number of processes.

    Args:
        a: A network (an adapter, a live module, or a name for :func:`hf_stitch.load`) or saved :class:`Activations`.
        b: The other.
        data: Raw samples, the same for both: what :meth:`hf_stitch.Samples.of` takes; ``None`` if nothing has to run.
        layers_a: Layers of a: any modules that run once; default: its cuts.
        layers_b: Layers of b.
        metrics: Names of ``hf_stitch.registries.metrics``, or metrics
            (``registries.metrics.build("linear_cka", debiased=True)``).
        pooling: The pooling (:meth:`hf_stitch.Representation.rows`).
        align: Which rows of texts correspond under ``none``. ``tokens``: token i of both sides, which takes one
            tokenizer. ``offsets``: the smallest pieces of text that both tokenizers cut out, each the mean of its
            tokens' vectors, without special tokens, white space and what only one side saw.
        paired_data: Where b is to see other samples (the same sentence in another language): as many, with the same ids in
            the same order.
        batch_size: Samples per forward.
        plan: Say what it would take, and run nothing but two samples.
        checkpoint_dir: A folder for the state of the comparison; one that was interrupted goes on from there, to the same
            bits. Give it a folder of its own.
        accelerator: The ``accelerate.Accelerator`` that knows the processes; default: found where there are several.
        progress: Show a progress bar.

    Returns:
        The atlas, or with ``plan`` the plan.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.
        ValueError: If sides hold other samples or the same in another order, layers cannot be compared under the
            policy, activations are NaN or infinite (which layer, which sample), samples are too few for a metric
            (which layers) or masked entirely, a metric is undefined for a pair (which), offsets cannot be aligned, no
            route fits into memory, or the folder holds the state of another job.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> atlas = compare(a, b, torch.randn(100, 4), metrics=["linear_cka", "procrustes"])
        >>> atlas["linear_cka"].shape, atlas.n, dict(atlas.routes)
        ((2, 2), 100, {'linear_cka': 'moments', 'procrustes': 'moments'})
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    if align not in ALIGN:
        raise ValueError(f"align must be one of {', '.join(ALIGN)}, got {align!r}")
    if align == "offsets" and pooling != "none":
        raise ValueError(f"align='offsets' goes with pooling='none': under pooling={pooling!r} no token is a row")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    processes = Processes.of(accelerator)
    sides = _sides(a, b, data, paired_data, pooling, align, processes)
    if align == "offsets":
        sides = aligned(sides)
    comparison = Comparison(sides, metrics, pooling=pooling, layers_a=layers_a, layers_b=layers_b, processes=processes)
    if plan:
        return comparison.plan()
    return comparison.run(batch_size=batch_size, folder=checkpoint_dir, recipe={"align": align}, progress=progress)


def _sides(
    a: Comparable, b: Comparable, data: Any, paired_data: Any, pooling: Pooling, align: Align, processes: Processes
) -> tuple[Side, ...]:
    """Both sides, or the one that stands on both."""
    if isinstance(a, Activations) and isinstance(b, Activations) and data is not None:
        raise ValueError("both sides are saved activations, to which no data can be shown; leave data out")
    if isinstance(b, Activations) and paired_data is not None:
        raise ValueError("b is saved activations, to which no data can be shown; leave paired_data out")
    reader = None if data is None else Reader(Samples.of(data))
    other = reader if paired_data is None else Reader(Samples.of(paired_data))
    first = _side("a", a, reader, pooling, processes)
    if (a is b or (isinstance(a, str) and a == b)) and paired_data is None:
        return (first,)
    second = _side("b", b, other, pooling, processes)
    if isinstance(first, Network) and isinstance(second, Network):
        one = first.adapter.model is second.adapter.model and first.adapter.processor is second.adapter.processor
        if one and paired_data is None:
            return (first,)
        # aligned tokenizers may differ, as where no token is a row
        check_meet(first.adapter, second.adapter, "mean" if align == "offsets" else pooling)
    check_same_order(first.ids, second.ids)
    return first, second


def _side(name: str, side: Comparable, reader: Reader | None, pooling: Pooling, processes: Processes) -> Side:
    if isinstance(side, Activations):
        if side.pooling not in (None, pooling):
            raise ValueError(f"the activations of {name} were recorded with pooling={side.pooling!r}, not {pooling!r}")
        return side
    if reader is None:
        raise ValueError(f"{name} is a network and needs data to run on")
    return Network(load_on(side, processes.device), reader)
