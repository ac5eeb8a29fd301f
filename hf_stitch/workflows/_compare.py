"""Similarity of all pairs of layers in one pass over the data: :func:`compare` and :func:`compare_all`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from hf_stitch.adapters.checks import layer_names
from hf_stitch.analysis.comparison.asking import Align, Asked, Rows
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.jackknife import Jackknife
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.sides import Comparable, Networks, Sides
from hf_stitch.analysis.comparison.weights import compare_all_weights, compare_weights
from hf_stitch.data import Data
from hf_stitch.metrics import Metric
from hf_stitch.options import Natural, checked
from hf_stitch.running import Run, RunOptions
from hf_stitch.workflows._checks import Named, named_layers, named_networks


@checked
def compare(
    a: Comparable, b: Comparable, data: Data | None = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[Named | Metric] = ("linear_cka",),
    rows: Rows = "mean", align: Align = "tokens", paired_data: Data | None = None, permutations: Natural = 0,
    **options: Unpack[RunOptions],
) -> SimilarityAtlas:  # fmt: skip
    """Compare every layer of one network with every layer of another, in one pass over the data or by weights alone.

    Each network runs once per batch. If both sides are the same model, it runs once for both. If a metric can be
    computed in several ways (from co-moments, d × d, or Gram matrices, n × n), the cheaper one that fits into memory is
    chosen and recorded in ``atlas.routes``.

    Only ``minibatch_cka`` depends on the order of the samples and on the number of processes.

    Metrics of weights (:class:`hf_stitch.metrics.WeightMetric`) do not require data, and compare all layers with
    weights that they can read. With metrics of both kinds, ``atlas.weights`` contains the metrics of weights.

    Args:
        a: The first network (an adapter, a module, or a name for :func:`hf_stitch.load`) or saved :class:`Activations`.
        b: The second network, or its saved activations.
        data: Raw samples for the networks, in any form that :meth:`hf_stitch.Samples.of` accepts. ``None`` if both
            sides are saved activations, or all metrics compare weights.
        layers_a: Layers of a. Any module that runs once per forward pass is allowed. Default: all candidates of a
            (:attr:`hf_stitch.Adapter.candidates`). Metrics of weights include submodules of these; by default, they use
            all modules that they can read.
        layers_b: Layers of b. Default: all candidates of b.
        metrics: Metrics: names in ``hf_stitch.registries.metrics``, with options if needed
            (``"linear_cka:debiased=True"``), or objects (``registries.metrics.build("linear_cka", debiased=True)``).
        rows: Which vectors of a sample are rows, which affects all metrics (:doc:`/explanation/rows`). One row per
            sample: ``mean`` (over positions), ``flat`` (all positions, concatenated), ``cls`` or ``last`` (a token).
            Several: ``positions`` of grids and texts without prefix tokens, or ``tokens`` with them, for layers with
            the same positions (other pairs are undefined); ``resized``, with grids of a resized to the grid of b's
            layer (bilinear).
        align: How rows of texts are paired with ``rows="positions"``. ``tokens`` pairs token i of a with token i of b,
            which requires a common tokenizer. ``offsets`` pairs the smallest pieces of text that both tokenizers
            delimit; the row of a piece is the mean of its tokens' vectors. Special tokens, white space and text on only
            one side are left out.
        paired_data: Samples for b, if they differ from the samples for a (the same sentences in another language), with
            the same ids in the same order as ``data``.
        permutations: Number of permutations of the samples of b, for a test of the most similar pairs of layers: the
            highest of many similarities is high even between unrelated networks. ``atlas.p_values`` has one p-value per
            pair, adjusted for the search, ``atlas.match_p_values`` one for each best match. The test requires one row
            per sample and stores the rows in files. 0: no test; 200 are enough for a level of 5%.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The atlas, with one (layers of a, layers of b) matrix per metric. An undefined metric (too few samples for wide
        layers, a constant layer) is NaN, with the reason in ``atlas.undefined``.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward pass.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> atlas = compare(a, b, torch.randn(100, 4), metrics=["linear_cka", "procrustes"])
        >>> atlas["linear_cka"].shape, atlas.n, dict(atlas.routes)
        ((2, 2), 100, {'linear_cka': 'moments', 'procrustes': 'moments'})
    """
    layers = {
        name: None if selected is None else layer_names(f"layers_{name}", selected)
        for name, selected in (("a", layers_a), ("b", layers_b))
    }
    with Run.of(compare, options) as run:
        asked = Asked.of(metrics, rows, align)
        asked.check(run, data, paired_data, permutations=permutations)
        sides = Sides({"a": a, "b": b}, run)
        weight_atlas = compare_weights(sides.weights(), asked.weights, layers) if asked.weights else None
        if weight_atlas is not None and not asked.activations:
            return weight_atlas
        comparison = Comparison(sides.pair(asked, data, paired_data), asked, run, layers["a"], layers["b"])
        if run.planning:
            plan: Any = comparison.plan(permutations)
            return plan
        atlas = comparison.run(recipe={"align": align}, permutations=permutations)
        return replace(atlas, weights=weight_atlas)


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
    """Compare all pairs of layers of several networks in one pass over the data.

    Each network runs once per batch, not once for each pair of networks.

    Args:
        networks: Name -> network (an adapter, a module, or a name for :func:`hf_stitch.load`) or saved
            :class:`~hf_stitch.analysis.Activations`. A list names them ``0``, ``1``, ….
        data: Raw samples, as in :func:`hf_stitch.compare`. ``None`` if all are saved activations, or the metrics
            compare weights.
        layers: Layers of all networks, or name -> layers. Default: all candidates of each network.
        metrics: As in :func:`hf_stitch.compare`; either metrics of activations or metrics of weights.
        rows: As in :func:`hf_stitch.compare`.
        resamples: Number of random groups of samples for a jackknife, which tests whether corresponding layers are less
            similar than the most similar layers, for the ties of ``atlas.identify()``. 40 are enough. The test requires
            one row per sample and equally many layers of each network, and stores the rows in files. 0: no test.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The similarities. ``atlas.between("a", "b")`` is the atlas of two networks, ``atlas.identify()`` the layer
        identification over all pairs, ``atlas.similarities()`` one figure for each pair of networks.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(3)]
        >>> loaded = [hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets]
        >>> atlas = compare_all(loaded, torch.randn(100, 4), layers=["0", "1"])
        >>> atlas.networks, atlas.between("0", "2")["linear_cka"].shape
        (('0', '1', '2'), (2, 2))
    """
    networks_by_name = named_networks(networks)
    if len(networks_by_name) < 2:
        raise ValueError(f"compare_all requires at least two networks, got {len(networks_by_name)}")
    layers_by_name = named_layers(networks_by_name, layers)
    with Run.of(compare_all, options) as run:
        asked = Asked.of(metrics, rows)
        asked.check(run, data, resamples=resamples)
        sides = Sides(networks_by_name, run)
        if asked.weights:
            if asked.activations:
                raise ValueError(f"{', '.join(asked.weights)} compares weights; compare activations in a separate call")
            atlas, by_network, whole = compare_all_weights(sides.weights(), asked.weights, layers_by_name)
            return NetworkAtlas(atlas, by_network, whole=whole)
        all_networks = Networks(sides.reading(asked, data), layers_by_name)
        test = Jackknife(asked.activations, all_networks, resamples, run) if resamples else None
        comparison = Comparison((all_networks,), asked, run)
        if run.planning:
            plan: Any = comparison.plan(resampled=test is not None)
            return plan
        recipe = {"resamples": resamples, "seed": run.seed} if resamples else None
        atlas = comparison.run(recipe=recipe, then=test)
        return NetworkAtlas(atlas, all_networks.by_network, {} if test is None else test.p_values)
