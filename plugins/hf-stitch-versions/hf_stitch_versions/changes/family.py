"""Compare several versions of a network: :func:`diff_all`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.data import Batch, Data, PairedSamples
from hf_stitch.options import checked
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch_versions.changes.effects import Measured
from hf_stitch_versions.changes.family_result import CONFIDENCE, ROUNDED, Family, Pair
from hf_stitch_versions.changes.hybrids import run as forward
from hf_stitch_versions.changes.outputs import Array, Measure, per_sample
from hf_stitch_versions.changes.parts import named
from hf_stitch_versions.changes.weights import Distance, Weights, aligned, effective
from hf_stitch_versions.changes.workflow import FEWEST, Resampling
from hf_stitch_versions.inputs import Vocabulary, differences, for_second
from hf_stitch_versions.recording import dtype_of, in_dtype
from hf_stitch_versions.sources import Feed, Network

LEAST = math.log(torch.finfo(torch.float64).tiny)
"""Minimum of log-probabilities: lower values (of classes that a network excludes) are clamped."""


@checked
def diff_all(
    networks: Mapping[str, str | nn.Module | Adapter], data: Data | None = None, **options: Unpack[RunOptions]
) -> Family:
    """Compare several versions of a network: checkpoints of a run, or releases of a family.

    Each network runs once per batch, not once per pair. The first network runs again with its weights rounded to
    bfloat16, which gives the level of noise. All networks are in memory at once, in float32, and so are their outputs
    for one batch, in float64: use a small ``batch_size`` for language models.

    Args:
        networks: Name -> network, as in :func:`diff`, in the order of the run; at least two.
        data: Raw samples, a few hundred. Without data, only weights are compared.
        **options: Options of the run: ``batch_size``, ``seed`` (of resamples), ``progress`` and ``accelerator``, as in
            :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The distances of all pairs in outputs and weights, a tree of the networks, and distances from the first network.

    Raises:
        ValueError: If there are fewer than two networks, networks have few common weights or different classes, or
            weights or outputs are not finite.

    Example:
        >>> import copy, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = Sequential(Linear(4, 9), ReLU(), Linear(9, 3))
        >>> run = {"0": copy.deepcopy(net)}
        >>> for step in (10, 20):
        ...     _ = net[2].weight.data.add_(step / 100)
        ...     run[str(step)] = copy.deepcopy(net)
        >>> run = {step: hf_stitch.load(model, example_inputs=torch.randn(2, 4)) for step, model in run.items()}
        >>> family = diff_all(run, torch.randn(50, 4), progress=False)
        >>> [(pair.a, pair.b) for pair in family.pairs]
        [('0', '10'), ('0', '20'), ('10', '20')]
        >>> family.verdict[:28]
        '0 and 10 are nearest of 3: s'
    """
    if len(networks) < 2:
        raise ValueError(f"diff_all requires at least two networks, got {len(networks)}")
    with Run.of(diff_all, options, takes=WITHOUT_STATE) as run:
        versions = {name: Version(load_on(network, run.processes.device)) for name, network in networks.items()}
        return family_of(versions, None if data is None else Samples.of(data), run)


@dataclass(frozen=True)
class Version:
    """Network and new values of some of its parameters and buffers, by name."""

    network: Adapter
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def put(self) -> Iterator[None]:
        """Replace the weights of the network temporarily."""
        tensors = tensors_of(self.network.model)
        with ExitStack() as stack:
            if self.values:  # autocast caches casts of the previous weights
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            for name, value in self.values.items():
                stack.callback(setattr, tensors[name], "data", tensors[name].data)
                tensors[name].data = value.to(tensors[name].data)
            yield

    def weights(self) -> Weights:
        """Return its effective weights."""
        with self.put():
            return effective(self.network.model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; tied ones have a single name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def family_of(versions: Mapping[str, Version], samples: Samples | None, run: Run) -> Family:
    """Compare versions in weights and, with samples, in outputs."""
    first = next(iter(versions.values()))
    tensors = {**tensors_of(first.network.model), **first.values}
    rounded = {name: value.detach().bfloat16() for name, value in tensors.items() if value.is_floating_point()}
    with_rounded = {**versions, ROUNDED: Version(first.network, rounded)}
    names, all_versions = list(with_rounded), list(with_rounded.values())
    indices = [*combinations(range(len(versions)), 2), (0, len(versions))]
    changes, notes = {}, list[str]()
    for i, j in indices:
        changes[i, j], lone = weight_distance(
            all_versions[i].weights(), all_versions[j].weights(), (names[i], names[j])
        )
        if lone:
            notes.append(
                f"{lone} weights of {names[i]} and {names[j]} count as change: they lack a partner of the same shape"
            )
    if samples is None:
        return Family(
            tuple(versions), 0, None, "", "", tuple(Pair(names[i], names[j], *changes[i, j]) for i, j in indices[:-1]),
            Pair(names[0], ROUNDED, *changes[indices[-1]]), {}, tuple(notes),
        )  # fmt: skip
    input_notes = _other_inputs(versions, next(samples.batches(run.batch_size)))
    notes += input_notes
    measure = Measure.of(next(filter(None, (version.network.task for version in all_versions)), None))
    measure = replace(measure, nested=not input_notes)
    gaps, agreement = distances(with_rounded, samples, measure, run)
    resampling = Resampling(len(gaps), CONFIDENCE, run.seed)
    if len(gaps) < FEWEST:
        notes.append(f"intervals require at least {FEWEST} samples, got {len(gaps)}")
    pairs = [
        Pair(
            names[i], names[j], *changes[i, j], resampling.mean(gaps[:, i, j]), resampling.mean(gaps[:, j, i]),
            None if agreement is None else resampling.mean(agreement[:, i, j]),
        )
        for i, j in indices
    ]  # fmt: skip
    steps = np.stack([gaps[:, i, i + 1] for i in range(len(versions) - 1)], 1)
    largest = (resampling.weights @ steps)[1:].argmax(1)
    shares = {name: float((largest == i).mean()) for i, name in enumerate(names[1:-1]) if len(largest)}
    return Family(
        tuple(versions), len(samples), samples.fingerprint, measure.name, measure.what, tuple(pairs[:-1]), pairs[-1],
        shares, tuple(notes),
    )  # fmt: skip


def _other_inputs(versions: Mapping[str, Version], batch: Batch) -> list[str]:
    """Return notes on networks with inputs that differ from the first network's inputs for the same samples."""
    (first_name, first), *rest = ((name, version.network) for name, version in versions.items())
    if any(isinstance(sample, Tensor) for sample in batch.samples):
        return []
    inputs, notes = first.preprocess(batch.samples), list[str]()
    for name, network in rest:
        if network is not first and network.processor is not None:
            feed = Feed(tuple(batch.ids), inputs, network.preprocess(batch.samples), _mask(first, inputs))
            notes += [
                f"{name} runs on the inputs of {first_name}; its own differ: {reason}"
                for reason in differences(feed, first, network)[:1]
            ]
    return notes


def weight_distance(a: Weights, b: Weights, sides: tuple[str, str]) -> tuple[tuple[float, float], int]:
    """Compare the weights of two networks.

    Args:
        a: Weights of the first network.
        b: Weights of the second network.
        sides: Names of both, for errors.

    Returns:
        The norm of the change over the norm of the first network's weights, the cosine, and the number of weights
            without a partner.
    """
    *_, names, reshaped, renamed = named(a, b)
    distance = Distance()
    for _, x, y, one_sided in aligned(a, renamed, sides):
        distance.add(x, y, one_sided)
    return (distance.change, distance.cosine), len(a) + len(b) - 2 * len(names) + len(reshaped)


# -- outputs ----------------------------------------------------------------------------------------------------------
def distances(
    versions: Mapping[str, Version], samples: Samples, measure: Measure, run: Run
) -> tuple[Array, Array | None]:
    """Run each version once per batch.

    Returns:
        Distances (samples, reference versions, versions), as expectations over the reference, and the shares of equal
        predictions in the same shape; ``None`` without classes.
    """
    measured, names = Measured(), list(versions)
    networks = {id(version.network): version.network for version in versions.values()}.values()
    dtypes = [dtype_of(network.model) for network in networks]
    wider = torch.float64 if torch.float64 in dtypes else torch.float32
    with ExitStack() as stack:
        for network, dtype in zip(networks, dtypes, strict=True):
            stack.enter_context(in_dtype(network.model, wider if dtype != wider else None))
        for _, batch, _ in PairedSamples(samples, samples).batches(run, "running networks"):
            _add(measured, versions, batch, measure)
    gathered = run.processes.gather(measured.joined())
    values = {name: np.concatenate([part[name] for part in gathered]) for name in gathered[0]}
    gaps = values["apart"]
    if not np.isfinite(gaps).all():
        i, j = np.argwhere(~np.isfinite(gaps).all(0))[-1]
        raise ValueError(f"the outputs of {names[i]} or {names[j]} are not finite for some samples: omit this network")
    if measure.is_divergence:
        return gaps, values["agreement"]
    spread = float(values["squares"].mean() - np.square(values["means"].mean(0)).sum())
    if not spread > 0:
        raise ValueError(
            f"the outputs of {names[0]} are equal for all samples, so the scale of differences is not defined"
        )
    return gaps / spread, None


def _add(measured: Measured, versions: Mapping[str, Version], batch: Batch, measure: Measure) -> None:
    """Run all versions on a batch and add the distances of their outputs to ``measured``."""
    first_name, first = next((name, version.network) for name, version in versions.items())
    inputs = first.preprocess(batch.samples)
    mask = _mask(first, inputs)
    outputs = list[Tensor]()
    for name, version in versions.items():
        arguments = inputs if version.network is first else for_second(inputs, first, version.network)
        if version.network is not first:
            Vocabulary(first, version.network).check(batch.ids, arguments)
        with version.put():
            output = forward(version.network, Network(version.network).arguments(Feed((), arguments)))
        outputs.append(measure.output(output).to(first.device))
        if not measure.fits(outputs[0], outputs[-1]):
            raise ValueError(
                f"the outputs of {first_name} and {name} must have the same classes or tokens, got the shapes "
                f"{tuple(outputs[0].shape)} and {tuple(outputs[-1].shape)}. Omit the data to compare only weights"
            )
    if measure.is_divergence and len({output.shape for output in outputs}) == 1:
        kl = torch.stack([_divergences(torch.stack(logs)) for logs in zip(*outputs, strict=True)], 2)
        measured.add("apart", _table(len(outputs), lambda i, j: per_sample(kl[i, j], mask)))
    else:
        measured.add("apart", _table(len(outputs), lambda i, j: measure.apart(outputs[i], outputs[j], mask)))
    if measure.is_divergence:
        predictions = [output.argmax(-1) for output in outputs]
        measured.add(
            "agreement",
            _table(len(outputs), lambda i, j: per_sample((predictions[i] == predictions[j]).double(), mask)),
        )
        return
    for name, values in measure.spread(outputs[0], mask).items():
        measured.add(name, values)


def _mask(network: Adapter, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of real tokens; ``None`` without padding."""
    mask = inputs.get(network.interface.mask)
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _divergences(logs: Tensor) -> Tensor:
    """Return the divergences (from, to, …) of log-probabilities (versions, …, classes), from cross-entropies."""
    cross = torch.einsum("i...c,j...c->ij...", logs.exp(), logs.clamp(min=LEAST))
    entropies = torch.stack([cross[i, i] for i in range(len(logs))])
    return (entropies[:, None] - cross).clamp(min=0)


def _table(count: int, value: Callable[[int, int], Any]) -> Array:
    """Return a function's values for all pairs of indices: (samples, count, count)."""
    return np.stack([np.stack([value(i, j) for j in range(count)], -1) for i in range(count)], -2)
