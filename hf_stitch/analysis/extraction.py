"""Record the activations of a network on samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.recording import record
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.planning import NETWORKS, Plan, bytes_of_weights, seconds_per_sample
from hf_stitch.data import Batch, Samples
from hf_stitch.options import checked
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Run, RunOptions


@checked
def extract_activations(
    model: str | nn.Module | Adapter,
    data: Any,
    *,
    layers: Iterable[str] | None = None,
    pooling: Pooling = "mean",
    **options: Unpack[RunOptions],
) -> Activations:
    """Run a network on samples and return its activations, for later comparison or saving.

    Args:
        model: The network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts.
        layers: Names of modules; ``None`` uses the ``candidates`` of the adapter.
        pooling: Pooling of the activations: ``none`` keeps the vectors of all positions; all other poolings return one
            vector per sample.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``progress``,
            ``accelerator``.

    Returns:
        The activations, on the CPU, in the dtype of the network: (samples, d) per layer, or (samples, positions, d)
        for layers with positions under pooling ``none``.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.

    Example:
        >>> import hf_stitch, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> extract_activations(adapter, torch.randn(20, 4), layers=["0"]).values["0"].shape
        torch.Size([20, 8])
    """
    with Run.of(extract_activations, options, ("batch_size", "progress", "accelerator")) as run:
        adapter = load_on(model, run.processes.device)
        samples = Samples.of(data)
        names = list(dict.fromkeys(adapter.candidates if layers is None else layers))
        if run.planning:
            return _planned(adapter, samples, names, pooling, run)
        grids: dict[str, tuple[int, int]] = {}
        read_batch = partial(_read, adapter, names, pooling, grids)
        contents = f"the activations of {len(names)} layers on {len(samples):,} samples"
        memory_advice = f"use fewer samples or layers, or another pooling than {pooling!r}"
        tensors = record(samples, run, "recording", read_batch, contents, memory_advice)
    values = {name: tensors[name, "values"] for name in names}
    mask = next((tensors[name, "mask"] for name in names if (name, "mask") in tensors), None)
    return Activations(values, samples.ids, pooling, mask, {name: grids[name] for name in names if name in grids})


def _read(
    adapter: Adapter, names: Sequence[str], pooling: Pooling, grids: dict[str, tuple[int, int]], batch: Batch
) -> dict[tuple[str, str], Tensor]:
    tensors: dict[tuple[str, str], Tensor] = {}

    def keep(name: str, representation: Representation) -> None:  # copies: the network may overwrite its values
        if pooling != "none" or representation.layout == "bd":
            tensors[name, "values"] = representation.rows(pooling).to("cpu", copy=True)
            return
        representation.check_padding_known(pooling)
        tensors[name, "values"] = representation.positions().to("cpu", copy=True)
        if representation.grid is not None:
            grids[name] = representation.grid
        if representation.mask is not None:
            tensors[name, "mask"] = representation.mask[:, representation.prefix_tokens :].to("cpu", copy=True)

    adapter.run_with_callback(adapter.preprocess(batch.samples), names, keep)
    return tensors


def _planned(adapter: Adapter, samples: Samples, names: Sequence[str], pooling: Pooling, run: Run) -> Any:
    count, outputs = len(samples), list[dict[tuple[str, str], Tensor]]()
    seconds = seconds_per_sample(
        lambda batch: outputs.append(_read(adapter, names, pooling, {}, batch)), samples, run, adapter.device
    )
    size = sum(values.nbytes for values in outputs[0].values()) * count // min(run.batch_size, count)
    memory = {NETWORKS: bytes_of_weights(adapter.model), "activations": size}
    job = f"extract_activations, {len(names)} layers, {count} samples"
    return Plan.of(job, {"recording": count * seconds}, memory, {}, adapter.device, run)
