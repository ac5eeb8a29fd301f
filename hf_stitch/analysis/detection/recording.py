"""Activations of layers, computed once for all detectors, and least-squares residuals as noise."""

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
"""Bytes of activations to hold in memory. A larger layer is stored in a temporary file."""

View = Pooling | Literal["prefix"]
"""View of activations that detectors score: the output of a stitch with this pooling, or the prefix tokens alone."""


def target_view(activations: Representation, view: View) -> Representation:
    """Return the target's own activations in the form of a stitch's output."""
    if view == "prefix":
        return Representation(activations.prefix(), "bnd")
    if view not in POOLED or activations.layout == "bd":
        return activations
    return Representation(activations.rows("cls" if activations.prefix_tokens else view), "bd")


def stitched_view(mapped: Representation, view: View) -> Representation:
    """Return the output of a stitch, as one vector per sample if the pooling returns one."""
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

    One run over the data records as many layers as fit into memory. A layer that is too large is stored in a temporary
    file, which is mapped into memory; its batches are moved to the device of the network one at a time. Several
    processes share the samples of layers that fit; each process writes a separate file for a larger layer. ``data``
    names the samples by argument, for messages.
    """
    sizes, specs = _sizes(network, layers, data, view, run.batch_size, task)
    for group in _groups(layers, sizes, memory):
        with ExitStack() as stack:
            folder = None
            if sizes[group[0]] > memory:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shared = run if folder is None else replace(run, processes=ALONE)
            activations = [
                _run(network, group, samples, view, specs, shared, folder, name, task)
                for name, samples in reversed([*data.items()])  # few samples first, which may not fit the network
            ]
            for layer in group:
                yield layer, [_gathered(by_layer.pop(layer), shared.processes) for by_layer in reversed(activations)]


def _encoded(
    network: Adapter, layers: Sequence[str], batch: Batch, name: str, task: Task
) -> dict[str, Representation]:  # fmt: skip
    """Run a network on a batch of samples; errors name the samples."""
    inputs = task.inputs(network, batch.samples)
    try:
        return network.encode(inputs, list(layers))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # errors of its library about shapes
        raise ValueError(
            f"{type(network.model).__name__} cannot run on {name} ({error.__cause__ or error}); pass samples of the "
            "form and size that it accepts"
        ) from error


@torch.no_grad()
def _sizes(
    network: Adapter, layers: Sequence[str], data: Mapping[str, Samples], view: View, batch_size: int, task: Task
) -> tuple[dict[str, int], dict[str, RepresentationSpec]]:
    """Estimate the bytes of each layer from the first batch, with texts padded to the longest."""
    name, samples = next(iter(data.items()))
    first_batch = next(iter(samples.batches(batch_size)))
    outputs = _encoded(network, layers, first_batch, name, task)
    scale = sum(map(len, data.values())) / len(first_batch.samples)
    views = {layer: target_view(outputs[layer], view) for layer in layers}
    sizes = {layer: round(scale * activations.values.nbytes) for layer, activations in views.items()}
    return sizes, {layer: activations.spec for layer, activations in views.items()}


def _groups(layers: Sequence[str], sizes: dict[str, int], memory: int) -> list[list[str]]:
    """Group layers so that each group fits into memory, if its layers do."""
    groups: list[list[str]] = []
    for layer in dict.fromkeys(layers):
        if groups and sum(sizes[grouped] for grouped in groups[-1]) + sizes[layer] <= memory:
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
    batches: dict[str, list[Representation]] = {layer: [] for layer in layers}
    store = None if folder is None else _Flat(folder / name)
    for _, batch, _ in PairedSamples(samples, samples).batches(run, "activations"):
        outputs = _encoded(network, layers, batch, name, task)
        check_finite(outputs, batch)
        for layer in layers:
            viewed = target_view(outputs[layer], view)
            if viewed.spec != specs[layer]:
                raise ValueError(
                    f"detectors require equal sizes, but layer {layer!r} outputs {viewed.spec} for sample "
                    f"{batch.ids[0]!r} of {name} and {specs[layer]} for the first samples"
                )
            viewed = viewed.replace(
                values=viewed.values.clone() if store is None else store.put(viewed.values), context={}
            )
            batches[layer].append(viewed)
    if store is not None:
        (layer,) = layers  # a file has one layer
        device = batches[layer][0].values.device
        stored = [viewed.replace(values=values) for viewed, values in zip(batches[layer], store.all(), strict=True)]
        return {layer: _OnDevice(stored, device)}
    return {**batches}


def _gathered(batches: Iterable[Representation], processes: Processes) -> Iterable[Representation]:
    """Return the batches of all processes, on the device of this process."""
    if processes.count == 1:
        return batches
    device = next(iter(batches)).values.device
    return [
        batch
        for gathered in processes.gather([batch.to("cpu") for batch in batches])
        for batch in _OnDevice(gathered, device)
    ]


class _OnDevice(Iterable[Representation]):
    """Batches that are moved to a device during iteration."""

    def __init__(self, batches: Iterable[Representation], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Representation]:
        return (batch.to(self._device) for batch in self._batches)


class _Flat:
    """File of consecutive tensors with any shapes and one dtype."""

    def __init__(self, path: Path) -> None:
        self._store, self._shapes = RowStore(path), list[torch.Size]()

    def put(self, values: Tensor) -> Tensor:
        """Append a tensor; return a placeholder of its shape without memory."""
        self._store.append(values.flatten())
        self._shapes.append(values.shape)
        return values.new_empty(1).expand(values.shape)

    def all(self) -> list[Tensor]:
        """Map all tensors into memory, in order."""
        flat = self._store.rows()
        return [
            piece.view(shape)
            for piece, shape in zip(flat.split([shape.numel() for shape in self._shapes]), self._shapes, strict=True)
        ]


@torch.no_grad()
def residuals(collected: CollectedPair) -> Mapping[str, Sequence[Tensor]]:
    """Return residuals of the best least-squares map into each layer of the target, for random samples.

    The residuals of a sample are ``(prefix tokens + positions, d)``. Layers with an undefined map are left out.
    """
    pair, samples = collected.pair, collected.samples.a
    layers = registries.matchers.build("lstsq").match(collected).layers
    best_cell = {
        lb: max(into, key=lambda cell: layers[cell].body.fitted["r2"])
        for lb in pair.layers_b
        if (into := [cell for cell in layers if cell[1] == lb])
    }
    donors = samples.select(donors_among(samples.ids, collected.run.seed))
    residuals_of: dict[str, list[Tensor]] = {lb: [] for lb in best_cell}
    for batch in donors.batches(DONORS // 4):
        ran = pair.run(batch)
        for lb, (la, _) in best_cell.items():
            activations, mapped = target_view(ran.y[lb], pair.pooling), layers[la, lb](ran.x[la])
            residual = activations.replace(
                values=stitched_view(mapped, pair.pooling).values.to(activations.values) - activations.values
            )
            counts = torch.bincount(residual.row_samples("none", prefix=True), minlength=residual.batch).tolist()
            residuals_of[lb] += residual.rows("none", prefix=True).double().split(counts)
    return residuals_of
