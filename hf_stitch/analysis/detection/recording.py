"""Activations of layers, computed once for all detectors, and what least squares leaves of them as noise."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.detection.noise import DONORS, donors_among
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.pairs import CollectedPair
from hf_stitch.pairs.pair import check_finite
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.running import ALONE, Processes, Run
from hf_stitch.stitches.layer import POOLED
from hf_stitch.storage.tensors import RowStore
from hf_stitch.tasks.base import Task

MEMORY = 2**31
"""Bytes of activations that are kept in memory. A layer with more is kept in a temporary file."""

View = Pooling | Literal["prefix"]
"""What detectors are shown of activations: what a stitch with this pooling hands over, or the prefix tokens alone."""


def received(activations: Representation, view: View) -> Representation:
    """Return the target's own activations in the form in which a stitch hands over its own."""
    if view == "prefix":
        return Representation(activations.prefix(), "bnd")
    if view not in POOLED or activations.layout == "bd":
        return activations
    return Representation(activations.rows("cls" if activations.prefix_tokens else view), "bd")


def handed_over(mapped: Representation, view: View) -> Representation:
    """Return the output of a stitch, as one vector per sample if the pooling leaves one."""
    if view == "prefix":
        return Representation(mapped.prefix(), "bnd")
    if view not in POOLED or mapped.layout == "bd":
        return mapped
    return Representation(mapped.positions()[:, 0], "bd")


def recorded(
    network: Adapter,
    layers: Sequence[str],
    data: Mapping[str, Samples],
    view: View,
    run: Run,
    task: Task,
    *,
    memory: int = MEMORY,
) -> Iterator[tuple[str, list[Iterable[Representation]]]]:
    """Compute the activations of a network at several layers, with few runs of the network.

    As many layers as fit into memory are recorded in one run over the data. A layer that alone does not fit is kept in
    a temporary file, which is mapped into memory; its batches are moved to the device of the network one by one.
    Several processes share the samples of layers that fit; each keeps a file of its own for one that does not. Samples
    have the names of arguments, for messages.
    """
    sizes, specs = _sizes(network, layers, data, view, run.batch_size, task)
    for group in _groups(layers, sizes, memory):
        with ExitStack() as stack:
            folder = None
            if sizes[group[0]] > memory:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shared = run if folder is None else replace(run, processes=ALONE)
            kept = [
                _run(network, group, samples, view, specs, shared, folder, name, task)
                for name, samples in reversed([*data.items()])  # few samples first, which may not fit the network
            ]
            for layer in group:
                yield layer, [_gathered(of_set.pop(layer), shared.processes) for of_set in reversed(kept)]


def _encoded(
    network: Adapter, layers: Sequence[str], batch: Batch, name: str, task: Task
) -> dict[str, Representation]:  # fmt: skip
    """Run a network on a batch of samples, which an error names."""
    inputs = task.inputs(network, batch.samples)
    try:
        return network.encode(inputs, list(layers))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # of its library, about shapes
        raise ValueError(
            f"{type(network.model).__name__} does not run on {name} ({error.__cause__ or error}): pass samples in the "
            "form that it takes, of the size of the others"
        ) from error


@torch.no_grad()
def _sizes(
    network: Adapter, layers: Sequence[str], data: Mapping[str, Samples], view: View, batch_size: int, task: Task
) -> tuple[dict[str, int], dict[str, RepresentationSpec]]:
    """Estimate the bytes of each layer from the first batch, whose texts are as long as the longest of them."""
    name, samples = next(iter(data.items()))
    first = next(iter(samples.batches(batch_size)))
    found = _encoded(network, layers, first, name, task)
    share = sum(map(len, data.values())) / len(first.samples)
    own = {layer: received(found[layer], view) for layer in layers}
    sizes = {layer: round(share * activations.values.nbytes) for layer, activations in own.items()}
    return sizes, {layer: activations.spec for layer, activations in own.items()}


def _groups(layers: Sequence[str], sizes: dict[str, int], memory: int) -> list[list[str]]:
    """Group layers so that each group fits into memory, if each of its layers does."""
    groups: list[list[str]] = []
    for layer in dict.fromkeys(layers):
        if groups and sum(sizes[other] for other in groups[-1]) + sizes[layer] <= memory:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


@torch.no_grad()
def _run(
    network: Adapter,
    layers: Sequence[str],
    samples: Samples,
    view: View,
    specs: Mapping[str, RepresentationSpec],
    run: Run,
    folder: Path | None,
    name: str,
    task: Task,
) -> dict[str, Iterable[Representation]]:
    kept: dict[str, list[Representation]] = {layer: [] for layer in layers}
    store = None if folder is None else _Flat(folder / name)
    for _, batch, _ in PairedSamples(samples, samples).batches(run, "activations"):
        found = _encoded(network, layers, batch, name, task)
        check_finite(found, batch)
        for layer in layers:
            own = received(found[layer], view)
            if own.spec != specs[layer]:
                raise ValueError(
                    f"layer {layer!r} outputs {own.spec} for sample {batch.ids[0]!r} of {name}, but {specs[layer]} for "
                    "the first samples to which detectors are fitted: all need one size"
                )
            own = own.replace(values=own.values.clone() if store is None else store.put(own.values), context={})
            kept[layer].append(own)
    if store is not None:
        (layer,) = layers  # a file has one layer
        device = kept[layer][0].values.device
        stored = [own.replace(values=values) for own, values in zip(kept[layer], store.all(), strict=True)]
        return {layer: _OnDevice(stored, device)}
    return {**kept}


def _gathered(batches: Iterable[Representation], processes: Processes) -> Iterable[Representation]:
    """Return the batches of all processes, on the device of those of this process."""
    if processes.count == 1:
        return batches
    device = next(iter(batches)).values.device
    return [
        batch for part in processes.gather([batch.to("cpu") for batch in batches]) for batch in _OnDevice(part, device)
    ]


class _OnDevice(Iterable[Representation]):
    """Batches that are moved to a device when they are taken."""

    def __init__(self, batches: Iterable[Representation], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Representation]:
        return (batch.to(self._device) for batch in self._batches)


class _Flat:
    """Tensors of any shapes and of one dtype, one behind the other in a file."""

    def __init__(self, path: Path) -> None:
        self._store, self._shapes = RowStore(path), list[torch.Size]()

    def put(self, values: Tensor) -> Tensor:
        """Append a tensor; returns one of its shape that takes no memory."""
        self._store.append(values.flatten())
        self._shapes.append(values.shape)
        return values.new_empty(1).expand(values.shape)

    def all(self) -> list[Tensor]:
        """Map all tensors into memory, in order."""
        flat = self._store.rows()
        return [
            part.view(shape)
            for part, shape in zip(flat.split([shape.numel() for shape in self._shapes]), self._shapes, strict=True)
        ]


@torch.no_grad()
def residuals(collected: CollectedPair) -> Mapping[str, Sequence[Tensor]]:
    """Return residuals of the best least-squares map into each layer of the target, of samples drawn by their ids.

    Those of a sample are ``(prefix tokens + positions, d)``. Layers for which least squares is undefined are left out.
    """
    pair, samples = collected.pair, collected.samples.a
    layers = registries.matchers.build("lstsq").match(collected).layers
    best = {
        lb: max(into, key=lambda cell: layers[cell].body.fitted["r2"])
        for lb in pair.layers_b
        if (into := [cell for cell in layers if cell[1] == lb])
    }
    donors = samples.select(donors_among(samples.ids, collected.run.seed))
    kept: dict[str, list[Tensor]] = {lb: [] for lb in best}
    for batch in donors.batches(DONORS // 4):
        ran = pair.run(batch)
        for lb, (la, _) in best.items():
            own, mapped = received(ran.y[lb], pair.pooling), layers[la, lb](ran.x[la])
            left = own.replace(values=handed_over(mapped, pair.pooling).values.to(own.values) - own.values)
            counts = torch.bincount(left.row_samples("none", prefix=True), minlength=left.batch).tolist()
            kept[lb] += left.rows("none", prefix=True).double().split(counts)
    return kept
