"""Similarity of all layers of several networks in one pass over the data: :func:`compare_all`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.sides import Network, Networks, Reader
from hf_stitch.data import Samples, check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.processes import Processes
from hf_stitch.representation import POOLINGS, Pooling
from hf_stitch.workflows._compare import Comparable, side_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def compare_all(
    networks: Mapping[str, Comparable] | Sequence[Comparable],
    data: Any = None,
    *,
    layers: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    metrics: Iterable[str | Metric] = ("linear_cka",),
    pooling: Pooling = "mean",
    batch_size: int = 64,
    checkpoint_dir: str | Path | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> NetworkAtlas:
    """Compare every layer of several networks with every other layer of all of them, in one pass over the data.

    Each network runs once per batch, not once for each pair of networks.

    Args:
        networks: Name -> network (an adapter, a module, or a name for :func:`hf_stitch.load`) or saved
            :class:`~hf_stitch.analysis.Activations`. A list names them ``0``, ``1``, ….
        data: Raw samples, as in :func:`hf_stitch.compare`. ``None`` if all are saved activations.
        layers: Layers of all networks, or name -> layers. Default: all candidates of each.
        metrics: As in :func:`hf_stitch.compare`.
        pooling: As in :func:`hf_stitch.compare`.
        batch_size: Number of samples per forward pass.
        checkpoint_dir: As in :func:`hf_stitch.compare`.
        accelerator: As in :func:`hf_stitch.compare`.
        progress: Whether to show a progress bar.

    Returns:
        The similarities. ``found.between("a", "b")`` is the atlas of two networks, ``found.identify()`` the layer
        identification over all pairs, ``found.similarities()`` one figure for each pair of networks.

    Raises:
        ValueError: If there are fewer than two networks, a name is not one of ``networks``, or for the reasons of
            :func:`hf_stitch.compare`.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(3)]
        >>> loaded = [hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets]
        >>> found = compare_all(loaded, torch.randn(100, 4), layers=["0", "1"])
        >>> found.networks, found.between("0", "2")["linear_cka"].shape
        (('0', '1', '2'), (2, 2))
    """
    named = dict(networks) if isinstance(networks, Mapping) else {str(i): each for i, each in enumerate(networks)}
    if len(named) < 2:
        raise ValueError(f"compare_all needs at least two networks, got {len(named)}")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    if isinstance(layers, Mapping):
        if unknown := sorted(layers.keys() - named.keys()):
            raise ValueError(f"layers names {', '.join(unknown)}, but the networks are {', '.join(named)}")
        chosen = dict(layers)
    else:
        chosen = {} if layers is None else dict.fromkeys(named, tuple(layers))
    processes = Processes.of(accelerator)
    reader = None if data is None else Reader(Samples.of(data))
    sides = {name: side_of(name, each, reader, pooling, processes) for name, each in named.items()}
    first = next(iter(sides.values()))
    for side in sides.values():
        check_same_order(*(s.reader.samples if isinstance(s, Network) else s.ids for s in (first, side)))
        if isinstance(first, Network) and isinstance(side, Network):
            check_meet(first.adapter, side.adapter, pooling)
    several = Networks(sides, chosen)
    comparison = Comparison((several,), metrics, pooling=pooling, processes=processes)
    atlas = comparison.run(batch_size=batch_size, folder=checkpoint_dir, progress=progress)
    return NetworkAtlas(atlas, several.by_network)
