"""Running a network over samples and keeping its activations."""

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
    """Run a network on samples and keep its activations, to compare them later or elsewhere.

    Under ``accelerate launch`` every process runs a part of the samples and all get the same activations.

    Args:
        model: The network: an adapter, a live module, or a name for :func:`hf_stitch.load`.
        data: Raw samples: what :meth:`hf_stitch.Samples.of` takes.
        layers: Names of modules; default: the adapter's ``candidates``.
        pooling: Which vectors are kept: ``none`` keeps those of all positions, the others one for each sample.
        batch_size: Samples per forward.
        accelerator: The ``accelerate.Accelerator`` that knows the processes; default: found where there are several.
        progress: Show a progress bar.

    Returns:
        The activations, on the CPU, in the dtype of the network.

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
    masks: dict[str, list[Tensor]] = {}  # by the first layer that has one
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
