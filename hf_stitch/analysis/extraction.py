"""Recording the activations of a network on samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.caching.layers import LayerCache, Recorded
from hf_stitch.data import Samples
from hf_stitch.data.samples import Batch
from hf_stitch.processes import Processes
from hf_stitch.registry import check_choice
from hf_stitch.representation import POOLINGS, Pooling, Representation, concatenate
from hf_stitch.resources import check_fits
from hf_stitch.running import Run, RunOptions
from hf_stitch.storage.cache import Cache


@torch.no_grad()
def extract_activations(
    model: str | nn.Module | Adapter,
    data: Any,
    *,
    layers: Iterable[str] | None = None,
    pooling: Pooling = "mean",
    cache: bool | str | Path = False,
    **options: Unpack[RunOptions],
) -> Activations:
    """Run a network on samples and return its activations, for later comparison or saving.

    With a cache, the activations of each layer are kept on the disk, and a later call runs the network only for the
    layers that are not there. They are the same bit for bit: what changes a bit of them is another entry, be it the
    network, its code or processor, a sample, an option or the machine. ``hf-stitch cache`` lists and removes entries.

    Under ``accelerate launch`` each process runs a part of the samples, and all processes return the same activations.

    Args:
        model: The network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts.
        layers: Names of modules; ``None`` uses the ``candidates`` of the adapter.
        pooling: Pooling of the activations: ``none`` keeps the vectors of all positions, all other poolings return one
            vector per sample.
        cache: Whether to keep activations and use those that are kept: ``True`` for the cache of the user
            (``HF_STITCH_CACHE``, by default ``~/.cache/hf-stitch``), or the folder of another one. Beyond
            ``HF_STITCH_CACHE_SIZE`` (by default 20 GB), what was not used for the longest time is removed. Of several
            processes, the first one reads and writes.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``progress``,
            ``accelerator``.

    Returns:
        The activations, on the CPU, in the dtype of the network: (samples, d) per layer, or (samples, positions, d)
        for layers with positions under pooling ``none``.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.
        ValueError: If an option is out of range, there are fewer samples than processes, the activations do not fit
            into memory, or the code of a network cannot be read (TorchScript) and there is a cache.

    Example:
        >>> import hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> extract_activations(adapter, torch.randn(20, 4), layers=["0"]).values["0"].shape
        torch.Size([20, 8])
    """
    check_choice("pooling", pooling, POOLINGS)
    if not isinstance(cache, bool | str | Path) or cache == "":
        raise ValueError(f"cache must be True, False or a folder, got {cache!r}")
    with Run.of(extract_activations, options, ("batch_size", "progress", "accelerator")) as run:
        processes, batch_size = run.processes, run.batch_size
        adapter = load_on(model, processes.device)
        samples = Samples.of(data)
        start, stop = processes.part(len(samples), batch_size)
        share = samples if processes.count == 1 else samples.select(range(start, stop))
        kept = None
        if cache is not False and processes.rank == 0:
            folder = None if cache is True else Path(cache)
            kept = LayerCache(Cache(folder), adapter, samples, pooling, _batches(len(samples), batch_size, processes))
        if layers is not None:
            names = list(dict.fromkeys(layers))
        elif cache is False:
            names = list(adapter.candidates)
        else:
            names = processes.agree([] if kept is None else kept.candidates())
        found: dict[str, Recorded] = {}
        if cache is not False:
            found = processes.agree({} if kept is None else kept.read(names))
        if missing := [name for name in names if name not in found]:
            batches = share.batches(batch_size, run.shown("recording"))
            recorded = _record(adapter, batches, missing, pooling, processes, len(samples))
            if kept is not None:
                kept.write(recorded)
            found |= recorded
    values = {name: found[name].values for name in names}
    masks = (mask for name in names if (mask := found[name].mask) is not None)
    grids = {name: grid for name in names if (grid := found[name].grid) is not None}
    return Activations(values, samples.ids, pooling, next(masks, None), grids)


def _batches(count: int, batch_size: int, processes: Processes) -> str:
    """Return what decides which samples share a forward: batches, or processes that have less than one each."""
    whole = -(-count // batch_size) >= processes.count
    return f"of {min(batch_size, count)}" if whole else f"in {processes.count} processes"


def _record(
    adapter: Adapter, batches: Iterable[Batch], names: Sequence[str], pooling: Pooling, processes: Processes, count: int
) -> dict[str, Recorded]:
    """Run the network on the samples of this process, and return the activations of all processes."""
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    masks: dict[str, list[Tensor]] = {name: [] for name in names}
    grids: dict[str, tuple[int, int]] = {}

    def keep(name: str, representation: Representation) -> None:
        if pooling != "none" or representation.layout == "bd":
            parts[name].append(representation.rows(pooling).to("cpu", copy=True))
            return
        representation.check_padding_known(pooling)
        parts[name].append(representation.positions().to("cpu", copy=True))
        if representation.grid is not None:
            grids[name] = representation.grid
        if representation.mask is not None:
            masks[name].append(representation.mask[:, representation.prefix_tokens :].cpu())

    for number, batch in enumerate(batches):
        adapter.run_with_callback(adapter.preprocess(batch.samples), names, keep)
        if not number:
            size = sum(own[0].nbytes for own in parts.values()) * count // len(batch.samples)
            instead = f"use fewer samples or layers, or another pooling than {pooling!r}"
            check_fits(
                f"the activations of {len(names)} layers on {count:,} samples", size, torch.device("cpu"), instead
            )
    found = {}
    for name in names:
        values = concatenate([part for own in processes.gather(parts.pop(name)) for part in own])
        real = [mask for own in processes.gather(masks.pop(name)) for mask in own]
        found[name] = Recorded(values, concatenate(real) if real else None, grids.get(name))
    return found
