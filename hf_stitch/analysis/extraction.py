"""Recording the activations of a network on samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.analysis.activations import Activations
from hf_stitch.data import Samples
from hf_stitch.processes import Processes
from hf_stitch.representation import Pooling, Representation, concatenate

if TYPE_CHECKING:
    from accelerate import Accelerator


@torch.no_grad()
def extract_activations(
    model: str | nn.Module | Adapter,
    data: Any,
    *,
    layers: Iterable[str] | None = None,
    pooling: Pooling = "mean",
    batch_size: int = 64,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> Activations:
    """Run a network on samples and return its activations, for later comparison or saving.

    Under ``accelerate launch`` each process runs a part of the samples, and all processes return the same activations.

    Args:
        model: The network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts.
        layers: Names of modules; ``None`` uses the ``candidates`` of the adapter.
        pooling: Pooling of the activations: ``none`` keeps the vectors of all positions, all other poolings return one
            vector per sample.
        batch_size: Samples per forward.
        accelerator: An ``accelerate.Accelerator``; ``None`` creates one if there are several processes.
        progress: Show a progress bar.

    Returns:
        The activations, on the CPU, in the dtype of the network: (samples, d) per layer, or (samples, positions, d)
        for layers with positions under pooling ``none``.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.
        ValueError: If there are fewer samples than processes.

    Example:
        >>> import hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> extract_activations(adapter, torch.randn(20, 4), layers=["0"]).values["0"].shape
        torch.Size([20, 8])
    """
    processes = Processes.of(accelerator)
    adapter = load_on(model, processes.device)
    names = list(adapter.candidates if layers is None else layers)
    samples = Samples.of(data)
    share = samples if processes.count == 1 else samples.select(range(*processes.part(len(samples))))
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    masks: dict[str, list[Tensor]] = {}  # of the first layer that has a mask
    grids: dict[str, tuple[int, int]] = {}

    def keep(name: str, representation: Representation) -> None:
        if pooling != "none" or representation.layout == "bd":
            parts[name].append(representation.rows(pooling).to("cpu", copy=True))
            return
        representation.check_padding_known(pooling)
        parts[name].append(representation.positions().to("cpu", copy=True))
        if representation.grid is not None:
            grids[name] = representation.grid
        if representation.mask is not None and name == next(iter(masks), name):
            masks.setdefault(name, []).append(representation.mask[:, representation.prefix_tokens :].cpu())

    for batch in share.batches(batch_size, progress="recording" if progress and processes.rank == 0 else None):
        adapter.run_with_callback(adapter.preprocess(batch.samples), names, keep)
    values = {
        name: concatenate([part for own in processes.gather(layer) for part in own]) for name, layer in parts.items()
    }
    real = [mask for own in processes.gather(next(iter(masks.values()), [])) for mask in own]
    return Activations(values, samples.ids, pooling, concatenate(real) if real else None, grids)
