"""How well a network in training can be stitched into another: relative accuracy per pair of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, Back, load_on
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.analysis.scoring import check_labels
from hf_stitch.artefacts.outputs import logits_of
from hf_stitch.data import Batch, Samples
from hf_stitch.matchers import Matcher
from hf_stitch.matchers.fitting import Statistics, fit_layer
from hf_stitch.processes import Processes
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling, Representation
from hf_stitch.statistics import Moments
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.training.callback import Every, ProbingCallback
from hf_stitch.training.probe import Probe, representations

Pair = tuple[str, str]


class StitchabilityCallback(ProbingCallback):
    """Relative accuracy of a network in training, stitched into a frozen one by closed form, watched while it learns.

    For each pair of layers a stitch is fitted on one part of the samples: the network in training up to its layer, the
    stitch, the reference from its layer on. It is scored on the other part: its accuracy over the reference's own
    (Csiszárik et al. 2021, section 4). Unlike :func:`hf_stitch.stitch` it makes no model, intervals or baselines. What
    the reference says at its layers is computed once, and its back halves are copied once.

    Figures are called ``<name>/relative_accuracy/<layer>``, or ``<layer>-><layer of the reference>`` where names
    differ.

    Args:
        reference: A frozen classifier: an adapter, a live module, or a name for :func:`hf_stitch.load`.
        data: Raw samples with labels: what :meth:`hf_stitch.Samples.of` takes.
        layers: Names of layers that both have, or pairs (of the network in training, of the reference); those of the
            reference must be cuts. Default: the cuts that both have.
        matcher: What finds the map: a name of ``hf_stitch.registries.matchers`` that fits in closed form, or a matcher.
        every: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of steps.
        pooling: The pooling: which vectors are mapped (:meth:`hf_stitch.Representation.rows`).
        test_size: Share or number of samples to score on; the others are fitted on.
        batch_size: Samples per forward.
        seed: Of the split.
        name: The first part of every figure's name.
        **options: The matcher's, where it is given by name (``ridge=1.0``).

    Raises:
        ValueError: If samples have no labels or are too few to split, the matcher is unknown or is trained, or
            ``every`` is none of the three.

    Example:
        >>> import hf_stitch
        >>> nets = [torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        ...                             torch.nn.Linear(16, 3)) for _ in range(2)]
        >>> images = torch.randn(60, 1, 4, 4)
        >>> ours, theirs = (hf_stitch.load(net, example_inputs=images[:2]) for net in nets)
        >>> labels = theirs.forward(images).argmax(1).tolist()
        >>> data = hf_stitch.Samples.of(images, label=labels)
        >>> list(StitchabilityCallback(theirs, data, layers=["1"]).measure(ours, step=0))
        ['stitchability/relative_accuracy/1']
    """

    def __init__(
        self,
        reference: str | nn.Module | Adapter,
        data: Any,
        layers: Iterable[str | Pair] | None = None,
        *,
        matcher: str | Matcher = "lstsq",
        every: Every = "epoch",
        pooling: Pooling = "none",
        test_size: float | int = 0.5,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "stitchability",
        **options: Any,
    ) -> None:
        super().__init__(name, every)
        self._matcher = registries.matchers.build(matcher, **options)
        if self._matcher.fits != "moments":
            raise ValueError(f"matcher {self._matcher.name!r} is trained, and training would not wait for it")
        if isinstance(layers, str):
            raise TypeError(f"layers must be a list of names or pairs, got {layers!r}; write [{layers!r}]")
        self._probe = Probe(data, pooling, batch_size)
        self._fit, self._test = self._probe.samples.split(test_size, seed)
        if self._probe.samples.labels is None:
            raise ValueError("accuracy needs labels, and these samples have none: Samples.of(data, label=…)")
        self._layers = None if layers is None else [(pair, pair) if isinstance(pair, str) else pair for pair in layers]
        self._given = reference
        self._pairs: list[Pair] = []
        self._backs: dict[str, Back] = {}
        self._targets: list[dict[str, Representation]] = []
        self._right = 0

    # -- once -------------------------------------------------------------------------------------------------------
    def _prepare(self, adapter: Adapter, processes: Processes) -> None:
        reference = load_on(self._given, processes.device)
        if reference.model is adapter.model:
            raise ValueError("the reference is the network in training itself: pass a frozen copy of it")
        check_meet(adapter, reference, self._probe.pooling)
        self._pairs = self._paired(adapter, reference)
        targets = list(dict.fromkeys(target for _, target in self._pairs))
        self._backs = {target: reference.back(target).to(adapter.device) for target in targets}
        self._probe.rehearse(adapter, [source for source, _ in self._pairs])
        self._targets, right = [], 0
        for batch in self._share(self._fit, processes):
            found = reference.encode(reference.preprocess(batch.samples), targets)
            self._targets.append({name: _at_rest(said) for name, said in found.items()})
        for name, said in self._targets[0].items():
            if said.spec != reference.spec(name):
                raise ValueError(
                    f"the samples give layer {name!r} of the reference the form {said.spec}, and it is cut for "
                    f"{reference.spec(name)}: load it with example_inputs of the size of the samples"
                )
        for batch in self._share(self._test, processes):
            logits = logits_of(reference.forward(reference.preprocess(batch.samples)))
            if logits.dim() != 2:
                raise ValueError(f"the reference must be a classifier; for a batch it returns {tuple(logits.shape)}")
            check_labels(batch, logits.shape[-1])
            right += _right(logits, batch)
        self._right = sum(processes.gather(right))
        if not self._right:
            raise ValueError(
                f"the reference has none of {len(self._test)} samples right, so that nothing can be said relative to it"
            )

    def _paired(self, adapter: Adapter, reference: Adapter) -> list[Pair]:
        if self._layers is not None:
            return list(dict.fromkeys(self._layers))
        pairs = [(layer, layer) for layer in adapter.layers if layer in reference.layers]
        if not pairs:
            raise ValueError(
                "the two networks have no layer of one name: pass layers=[(of the network in training, of the "
                f"reference), …]; there are {', '.join(adapter.layers)} and {', '.join(reference.layers)}"
            )
        return pairs

    def _share(self, samples: Samples, processes: Processes) -> Iterator[Batch]:
        """This process's batches."""
        return samples.select(range(*processes.part(len(samples)))).batches(self._probe.batch_size)

    # -- each time --------------------------------------------------------------------------------------------------
    def _figures(self, adapter: Adapter, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        sources = list(dict.fromkeys(source for source, _ in self._pairs))
        layers = self._fitted(adapter, sources, processes)
        right = dict.fromkeys(layers, 0)
        for batch in self._share(self._test, processes):
            said = representations(adapter, batch, sources)
            for (source, target), layer in layers.items():
                if isinstance(layer, StitchingLayer):
                    right[source, target] += _right(self._finished(layer(said[source]), target), batch)
        totals = processes.gather(right)
        found = {}
        for (source, target), layer in layers.items():
            figure = f"relative_accuracy/{source if source == target else f'{source}->{target}'}"
            if isinstance(layer, StitchingLayer):
                found[figure] = sum(part[source, target] for part in totals) / self._right
            else:
                found[figure] = self._undefined(f"the stitch from {source!r} to {target!r}", layer)
        return found

    def _fitted(
        self, adapter: Adapter, sources: list[str], processes: Processes
    ) -> dict[Pair, StitchingLayer | ValueError]:
        """By pair its stitching layer, or why there is none."""
        statistics: dict[Pair, Statistics] = {pair: {} for pair in self._pairs}
        failures: dict[Pair, str] = {}
        specs: dict[str, Any] = {}
        for batch, targets in zip(self._share(self._fit, processes), self._targets, strict=True):
            said = representations(adapter, batch, sources)
            specs = {name: representation.spec for name, representation in said.items()}
            for pair in self._pairs:
                source = said[pair[0]]
                target = _at(targets[pair[1]], source.values.device)
                try:
                    for part, (x, y) in paired_rows(source, target, self._probe.pooling).items():
                        if part not in statistics[pair]:
                            statistics[pair][part] = Moments(x.shape[1], y.shape[1], device=x.device)
                        statistics[pair][part].update(x, y)
                except ValueError as error:  # told to all processes first, which would wait for this one
                    failures[pair] = str(error)
        failures = {pair: why for part in processes.gather(failures) for pair, why in part.items()}
        found: dict[Pair, StitchingLayer | ValueError] = {}
        for pair in self._pairs:
            try:
                if pair in failures:
                    raise ValueError(failures[pair])
                if processes.accelerator is not None:
                    for moments in statistics[pair].values():
                        moments.all_reduce(processes.accelerator)
                target_form = self._targets[0][pair[1]].spec
                found[pair] = fit_layer(
                    self._matcher, statistics[pair], specs[pair[0]], target_form, self._probe.pooling
                )
            except ValueError as error:
                found[pair] = error
        return found

    def _finished(self, said: Representation, target: str) -> torch.Tensor:
        """The logits of the reference from a layer on."""
        back = self._backs[target]
        weight = next((p for p in back.parameters() if p.is_floating_point()), said.values)
        return logits_of(back(_at(said.replace(values=said.values.to(weight.dtype)), weight.device)))


def _at_rest(said: Representation) -> Representation:
    """A representation to be kept: on the CPU, its own memory, without context."""
    return _at(said.replace(values=said.values.clone(), context={}), torch.device("cpu"))


def _at(said: Representation, device: torch.device) -> Representation:
    return said.replace(
        values=said.values.to(device), mask=None if said.mask is None else said.mask.to(device), context={}
    )


def _right(logits: torch.Tensor, batch: Batch) -> int:
    """How many samples a classifier has right."""
    return int((logits.argmax(-1).cpu() == torch.as_tensor(batch.labels)).sum())
