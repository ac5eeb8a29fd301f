"""Similarity of all layers of several networks in one pass over the data: :func:`compare_all`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from hf_stitch.analysis.comparison.asking import Asked, Comparable, Sides
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.jackknife import Jackknife
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.rows import Rows
from hf_stitch.analysis.comparison.sides import Networks
from hf_stitch.analysis.comparison.weights import compare_all_weights
from hf_stitch.data import Data
from hf_stitch.metrics import Metric
from hf_stitch.options import Natural, checked
from hf_stitch.running import Run, RunOptions
from hf_stitch.workflows._networks import Named, named_layers, named_networks


@checked
def compare_all(
    networks: Mapping[str, Comparable] | Iterable[Comparable],
    data: Data | None = None,
    *,
    layers: Mapping[str, Iterable[str]] | Iterable[str] | None = None,
    metrics: Iterable[Named | Metric] = ("linear_cka",),
    rows: Rows = "mean",
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
        rows: As in :func:`hf_stitch.compare`.
        resamples: Number of random groups of samples, each of which is left out once (a jackknife), to test whether
            corresponding layers are less similar than the most similar ones, for the ties of ``found.identify()``. 40
            are enough. It needs one row per sample and as many layers of each network, and keeps the rows in files.
            0: no test.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The similarities. ``found.between("a", "b")`` is the atlas of two networks, ``found.identify()`` the layer
        identification over all pairs, ``found.similarities()`` one figure for each pair of networks.

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
        asked = Asked.of(metrics, rows)
        asked.check(run, data, resamples=resamples)
        sides = Sides(named, run)
        if asked.weights:
            if asked.activations:
                raise ValueError(
                    f"{', '.join(asked.weights)} compares weights: compare activations in a call of its own"
                )
            atlas, by_network, whole = compare_all_weights(sides.weights(), asked.weights, chosen)
            return NetworkAtlas(atlas, by_network, whole=whole)
        several = Networks(sides.reading(asked, data), chosen)
        test = Jackknife(asked.activations, several, resamples, run) if resamples else None
        comparison = Comparison((several,), asked, run)
        if run.planning:
            planned: Any = comparison.plan(resampled=test is not None)
            return planned
        recipe = {"resamples": resamples, "seed": run.seed} if resamples else None
        atlas = comparison.run(recipe=recipe, then=test)
        return NetworkAtlas(atlas, several.by_network, {} if test is None else test.p_values)
