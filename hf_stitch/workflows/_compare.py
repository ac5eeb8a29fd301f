"""Similarity of all pairs of layers of two networks in one pass over the data: :func:`compare`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from hf_stitch.adapters import load_on, unwrap
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.adapters.loading import NetworkLike
from hf_stitch.adapters.naming import layer_names
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.alignment import Align, aligned
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.sides import Network, Reader, Side
from hf_stitch.analysis.comparison.weights import WeightSide, compare_weights, sorted_metrics
from hf_stitch.data import Data, Samples, check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.options import Natural, checked
from hf_stitch.processes import Processes
from hf_stitch.reference import weights_hash
from hf_stitch.representation import Pooling
from hf_stitch.running import Run, RunOptions
from hf_stitch.workflows._networks import Named

Comparable = NetworkLike | Activations


@checked
def compare(
    a: Comparable, b: Comparable, data: Data | None = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[Named | Metric] = ("linear_cka",),
    pooling: Pooling = "mean", align: Align = "tokens", paired_data: Data | None = None, permutations: Natural = 0,
    **options: Unpack[RunOptions],
) -> SimilarityAtlas:  # fmt: skip
    """Compare every layer of one network with every layer of another, in one pass over the data or by weights alone.

    Each network runs once per batch. If both sides are the same model, it runs once for both. If a metric can be
    computed in several ways (from co-moments, d × d, or Gram matrices, n × n), the cheaper one that fits into memory is
    chosen and recorded in ``atlas.routes``. With ``pooling="none"``, grids of different sizes are resized to the grid
    of b's layer (bilinear), and prefix tokens and masked positions are left out.

    Under ``accelerate launch`` each process takes a part of the samples and all processes return the same atlas,
    without any change to the call. Only ``minibatch_cka`` depends on the order of the samples and on the number of
    processes.

    Metrics of weights (:class:`hf_stitch.metrics.WeightMetric`) need no data, and have layers of their own: those whose
    weights they read. With metrics of both kinds, ``atlas.weights`` contains those of weights.

    Args:
        a: The first network (an adapter, a module, or a name for :func:`hf_stitch.load`) or saved :class:`Activations`.
        b: The second network, or its saved activations.
        data: Raw samples for the networks, in any form that :meth:`hf_stitch.Samples.of` accepts. ``None`` if both
            sides are saved activations, or all metrics compare weights.
        layers_a: Layers of a. Any module that runs once per forward pass is allowed. Default: all
            candidates of a (:attr:`hf_stitch.Adapter.candidates`). Metrics of weights take these modules and the
            modules in them; by default, all that they read.
        layers_b: Layers of b. Default: all candidates of b.
        metrics: Names in ``hf_stitch.registries.metrics``, with options if needed (``"linear_cka:debiased=True"``), or
            metric objects (``registries.metrics.build("linear_cka", debiased=True)``).
        pooling: Which vectors of a sample become rows: ``mean``, ``none``, ``flatten``, ``cls`` or ``last``
            (:meth:`hf_stitch.Representation.rows`).
        align: How rows of texts are paired with ``pooling="none"``. ``tokens`` pairs token i of a with token i of b,
            which requires a common tokenizer. ``offsets`` pairs the smallest pieces of text that both tokenizers
            delimit; the row of a piece is the mean of its tokens' vectors. Special tokens, white space and text that
            only one side contains are left out.
        paired_data: Samples for b, if it takes other samples than a (the same sentences in another language). They need
            the same ids in the same order as ``data``.
        permutations: Number of permutations of the samples of b, for a test of the most similar pairs of layers: the
            highest of many similarities is high even between unrelated networks. ``atlas.p_values`` has one p-value
            per pair, adjusted for the search, ``atlas.match_p_values`` one for each best match. The test needs one row
            per sample, keeps the rows in files, and takes longer with more samples. 0: no test; 200 are enough
            for a level of 5%.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The atlas, with one (layers of a, layers of b) matrix per metric. Where a metric is undefined (too few samples
        for wide layers, a constant layer), the value is NaN and ``atlas.undefined`` has the reason.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward pass.
        ValueError: If an option is out of range; both sides do not hold the same samples in the same order; layers
            cannot be compared under the pooling; activations are NaN or infinite (the message names layer and sample);
            a metric needs more samples (the message names the layers); a sample is masked entirely; a metric is
            undefined for all pairs of layers; offsets cannot be aligned; no route fits into memory; or the folder holds
            the state of another comparison.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> atlas = compare(a, b, torch.randn(100, 4), metrics=["linear_cka", "procrustes"])
        >>> atlas["linear_cka"].shape, atlas.n, dict(atlas.routes)
        ((2, 2), 100, {'linear_cka': 'moments', 'procrustes': 'moments'})
    """
    if align == "offsets" and pooling != "none":
        raise ValueError(f"align='offsets' needs pooling='none', got pooling={pooling!r}: its rows are not tokens")
    if permutations and pooling == "none":
        raise ValueError(
            "a permutation test of the layers exchanges samples, so that it needs one row per sample: use "
            "pooling='mean', 'cls', 'last' or 'flatten'. For the positions of two layers, use "
            "hf_stitch.analysis.permutation_test(…, samples=…)"
        )
    activations, weights = sorted_metrics(metrics)
    with Run.of(compare, options) as run:
        processes = run.processes
        if weights and (run.planning or permutations):
            raise ValueError(f"{next(iter(weights))} compares weights: it has no plan and no permutations of samples")
        if weights and not activations and not (data is paired_data is None):
            raise ValueError(f"{', '.join(weights)} compares weights, without samples; leave data out")
        by_weights = None
        if weights:
            one = isinstance(a, str) and a == b
            a = load_on(a, processes.device) if isinstance(a, str) else a  # once, for both kinds of metrics
            b = a if one else load_on(b, processes.device) if isinstance(b, str) else b
            layers_a, layers_b = (
                None if given is None else layer_names(argument, given)
                for argument, given in (("layers_a", layers_a), ("layers_b", layers_b))
            )
            sides_by_weights = [weight_side(name, each, processes) for name, each in (("a", a), ("b", b))]
            by_weights = compare_weights(sides_by_weights, weights, layers_a, layers_b)
            if not activations:
                return by_weights
        sides = _sides(a, b, data, paired_data, pooling, align, processes)
        if align == "offsets":
            sides = aligned(sides)
        comparison = Comparison(sides, activations, run, pooling=pooling, layers_a=layers_a, layers_b=layers_b)
        if run.planning:
            planned: Any = comparison.plan(permutations)
            return planned
        atlas = comparison.run(recipe={"align": align}, permutations=permutations)
        return replace(atlas, weights=by_weights)


def weight_side(name: str, network: Comparable, processes: Processes) -> WeightSide:
    """Return a network whose weights are compared. A module needs no example inputs."""
    if isinstance(network, Activations):
        raise TypeError(f"{name} is saved activations, which contain no weights; pass the network itself")
    if isinstance(network, nn.Module):
        module: nn.Module = unwrap(network)
        return WeightSide(module, {"class": type(module).__name__, "weights": weights_hash(module)})
    adapter = load_on(network, processes.device)
    described = {"reference": adapter.pinned.to_dict(), "class": type(adapter.model).__name__}
    return WeightSide(adapter.model, described)


def _sides(
    a: Comparable, b: Comparable, data: Any, paired_data: Any, pooling: Pooling, align: Align, processes: Processes
) -> tuple[Side, ...]:
    """Return both sides, or a single one if a and b are the same network."""
    if isinstance(a, Activations) and isinstance(b, Activations) and data is not None:
        raise ValueError("a and b are saved activations, which take no data; leave data out")
    if isinstance(b, Activations) and paired_data is not None:
        raise ValueError("b is saved activations, which take no data; leave paired_data out")
    reader = None if data is None else Reader(Samples.of(data))
    other = reader if paired_data is None else Reader(Samples.of(paired_data))
    first = side_of("a", a, reader, pooling, processes)
    if (a is b or (isinstance(a, str) and a == b)) and paired_data is None:
        return (first,)
    second = side_of("b", b, other, pooling, processes)
    if isinstance(first, Network) and isinstance(second, Network):
        # With aligned offsets the tokenizers may differ, so the check is that of a pooled comparison.
        check_meet(first.adapter, second.adapter, "mean" if align == "offsets" else pooling)
        one = first.adapter.model is second.adapter.model and first.adapter.processor is second.adapter.processor
        if one and paired_data is None:
            return (first,)
    check_same_order(*(side.reader.samples if isinstance(side, Network) else side.ids for side in (first, second)))
    return first, second


def side_of(name: str, side: Comparable, reader: Reader | None, pooling: Pooling, processes: Processes) -> Side:
    """Return a network or saved activations as a side of a comparison."""
    if isinstance(side, Activations):
        if side.pooling not in (None, pooling):
            raise ValueError(f"the activations of {name} were recorded with pooling={side.pooling!r}, not {pooling!r}")
        return side
    if reader is None:
        raise ValueError(f"{name} is a network and needs samples to run on: pass data")
    return Network(load_on(side, processes.device), reader)
