"""Similarity of all layers of several networks in one pass over the data: :func:`compare_all`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.analysis.comparison.comparing import Comparison, labelled
from hf_stitch.analysis.comparison.jackknife import Array, Places, differences_from_best, groups_of
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.sides import Network, Networks, Reader, Side
from hf_stitch.analysis.comparison.weights import compare_all_weights, sorted_metrics
from hf_stitch.data import Data, Samples, check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.options import Natural, checked
from hf_stitch.representation import Pooling
from hf_stitch.running import Run, RunOptions
from hf_stitch.workflows._compare import Comparable, side_of, weight_side
from hf_stitch.workflows._networks import Named, named_layers, named_networks


@checked
def compare_all(
    networks: Mapping[str, Comparable] | Iterable[Comparable],
    data: Data | None = None,
    *,
    layers: Mapping[str, Iterable[str]] | Iterable[str] | None = None,
    metrics: Iterable[Named | Metric] = ("linear_cka",),
    pooling: Pooling = "mean",
    resamples: Natural = 0,
    **options: Unpack[RunOptions],
) -> NetworkAtlas:
    """Compare every layer of several networks with every other layer of all of them, in one pass over the data.

    Each network runs once per batch, not once for each pair of networks.

    Args:
        networks: Name -> network (an adapter, a module, or a name for :func:`hf_stitch.load`) or saved
            :class:`~hf_stitch.analysis.Activations`. A list names them ``0``, ``1``, ….
        data: Raw samples, as in :func:`hf_stitch.compare`. ``None`` if all are saved activations, or the metrics
            compare weights.
        layers: Layers of all networks, or name -> layers. Default: all candidates of each.
        metrics: As in :func:`hf_stitch.compare`; either metrics of activations or metrics of weights.
        pooling: As in :func:`hf_stitch.compare`.
        resamples: Number of random groups of samples, each of which is left out once (a jackknife), to test whether
            corresponding layers are less similar than the most similar ones, for the ties of ``found.identify()``. 40
            are enough. It needs one row per sample and as many layers of each network, and keeps the rows in files.
            0: no test.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The similarities. ``found.between("a", "b")`` is the atlas of two networks, ``found.identify()`` the layer
        identification over all pairs, ``found.similarities()`` one figure for each pair of networks.

    Raises:
        TypeError: If ``networks`` or ``layers`` are a single one.
        ValueError: If there are fewer than two networks, a name is not one of ``networks``, networks that are resampled
            have different numbers of layers, a resample does not determine a metric, or for the reasons of
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
    named = named_networks(networks)
    if len(named) < 2:
        raise ValueError(f"compare_all needs at least two networks, got {len(named)}")
    chosen = named_layers(named, layers)
    with Run.of(compare_all, options) as run:
        processes = run.processes
        activations, weights = sorted_metrics(metrics)
        if weights:
            if activations or data is not None or resamples or run.planning:
                raise ValueError(
                    f"{', '.join(weights)} compares weights: leave out data and resamples, plan nothing, and compare "
                    "activations in a call of its own"
                )
            weighed = {name: weight_side(name, each, processes) for name, each in named.items()}
            atlas, by_network, whole = compare_all_weights(weighed, weights, chosen)
            return NetworkAtlas(atlas, by_network, whole=whole)
        reader = None if data is None else Reader(Samples.of(data))
        sides = {name: side_of(name, each, reader, pooling, processes) for name, each in named.items()}
        _check_meet(sides, pooling)
        several, scores = Networks(sides, chosen), labelled(activations)
        if resamples:
            _check_resamples(resamples, pooling, several)
        comparison = Comparison((several,), scores.values(), run, pooling=pooling)
        if run.planning:
            planned: Any = comparison.plan(resampled=resamples > 0)
            return planned
        p_values: dict[str, Array] = {}

        def test(rows: Sequence[Tensor], values: Mapping[str, Array]) -> None:
            groups = groups_of(len(several.ids), resamples, run.seed)
            shown = run.progress and processes.rank == 0
            p_values.update(_tested(scores, rows, values, groups, len(several.by_network), shown))

        recipe = {"resamples": resamples, "seed": run.seed} if resamples else None
        atlas = comparison.run(recipe=recipe, then=test if resamples else None)
        return NetworkAtlas(atlas, several.by_network, p_values)


def _check_meet(sides: Mapping[str, Side], pooling: Pooling) -> None:
    """Check that all networks can be compared on the same samples."""
    first = next(iter(sides.values()))
    for side in sides.values():
        check_same_order(*(s.reader.samples if isinstance(s, Network) else s.ids for s in (first, side)))
        if isinstance(first, Network) and isinstance(side, Network):
            check_meet(first.adapter, side.adapter, pooling)


def _check_resamples(resamples: int, pooling: Pooling, networks: Networks) -> None:
    n = len(networks.ids)
    if not 2 <= resamples <= n:
        raise ValueError(
            f"resamples must be 0 (no test) or from 2 to the number of samples, {n}, got {resamples}; 40 are enough"
        )
    if pooling == "none":
        raise ValueError(
            "a resample leaves out whole samples, so that it needs one row per sample: use pooling='mean', 'cls', "
            "'last' or 'flatten'"
        )
    if len(counts := {len(own) for own in networks.by_network.values()}) > 1:
        raise ValueError(
            "with resamples, layer i of a network corresponds to layer i of the others, but they have "
            f"{sorted(counts)} layers: pass layers, or resamples=0"
        )


def _tested(
    metrics: Mapping[str, Metric], rows: Sequence[Tensor], values: Mapping[str, Array], groups: Sequence[Places],
    networks: int, progress: bool,
) -> dict[str, Array]:  # fmt: skip
    """Test the differences from the most similar layer, for all pairs of networks with as many layers each."""
    from tqdm.auto import tqdm

    places = [slice(part[0], part[-1] + 1) for part in np.split(np.arange(len(rows)), networks)]
    found = {label: np.full((2, len(rows), len(rows)), np.nan) for label in metrics}
    jobs = [(label, a, b) for label in metrics for a, b in combinations(places, 2)]
    hide = None if progress else True  # None shows the bar on terminals only
    for label, a, b in tqdm(jobs, desc="resampling", unit="pair", delay=3, disable=hide):
        found[label][:, a, b] = differences_from_best(metrics[label], rows[a], rows[b], values[label][a, b], groups)
    return found
