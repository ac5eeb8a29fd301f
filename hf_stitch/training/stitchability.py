"""Callback that stitches a network in training into a frozen one and measures relative accuracy."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

from hf_stitch.adapters import Adapter, Back, load_on, untrained
from hf_stitch.adapters.checks import check_comparable
from hf_stitch.data import Batch, Data, Samples
from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.options import Count, Natural, checked
from hf_stitch.pairs import CollectedParts
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Processes
from hf_stitch.statistics import Moments
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.tasks.base import Task, check_predictions, logits_of, most_likely
from hf_stitch.tasks.heads import check_head, task_named
from hf_stitch.tasks.per_sample import Classification
from hf_stitch.training.callback import Every, ProbingCallback
from hf_stitch.training.probe import Probe, representations

logger = logging.getLogger(__name__)

Pair = tuple[str, str]  # layer of the network in training, layer of the reference
Kind = Literal["relative_accuracy", "identity", "mean_only", "untrained"]
Place = tuple[Kind, Pair]  # key of a measured stitch

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Measurements of each pair of layers, in the order of the values."""


class StitchabilityCallback(ProbingCallback):
    """Callback that measures the relative accuracy of a network in training, stitched into a frozen network.

    For each pair of layers, the callback fits a stitching layer in closed form on one part of the samples. The layer
    connects the front half of the network in training with the back half of the reference. On the held-out samples, the
    callback computes the accuracy divided by the accuracy of the reference (Csiszárik et al. 2021, section 4). Unlike
    :func:`hf_stitch.stitch`, it returns neither a model nor confidence intervals. The activations of the reference are
    computed once, and its back halves are copied once.

    Values are named ``<name>/relative_accuracy/<layer>``, or ``<name>/relative_accuracy/<layer>-><layer of the
    reference>`` if the names differ. Each value comes with baselines, also relative to the reference, because an early
    layer of an untrained network can score .7:

    - ``<name>/untrained/<layer>``: the same for an untrained copy of the network, measured once.
    - ``<name>/mean_only/<layer>``: the mean activations of the reference replace the mapped ones, measured once.
    - ``<name>/identity/<layer>``: no map; only between layers of the same width.

    Args:
        reference: A frozen classifier: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples with labels, in a form that :meth:`hf_stitch.Samples.of` accepts.
        layers: Names of layers of both networks, or pairs (layer of the network in training, layer of the reference);
            layers of the reference must be cuts. Default: the cuts with the same names in both networks.
        matcher: Matcher that fits the map in closed form, or its name in ``hf_stitch.registries.matchers``.
        every: When to measure: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of optimizer steps.
        pooling: Pooling, which determines the vectors to map (:meth:`hf_stitch.Representation.rows`).
        test_size: Share (float) or number (int) of held-out samples for the accuracy; the map is fitted on the rest.
        batch_size: Number of samples per forward pass.
        untrained: Whether to measure an untrained copy of the network when the callback is attached. This temporarily
            needs the memory of a second network.
        seed: Seed of the split, and of the weights of the untrained copy.
        name: First part of the name of every value.
        **options: Options of the matcher if ``matcher`` is a name, for example ``ridge=1.0``.

    Example:
        >>> import hf_stitch
        >>> nets = [torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        ...                             torch.nn.Linear(16, 3)) for _ in range(2)]
        >>> images = torch.randn(60, 1, 4, 4)
        >>> ours, theirs = (hf_stitch.load(net, example_inputs=images[:2]) for net in nets)
        >>> labels = theirs.forward(images).argmax(1).tolist()
        >>> data = hf_stitch.Samples.of(images, label=labels)
        >>> for name in StitchabilityCallback(theirs, data, layers=["1"]).measure(ours, step=0):
        ...     print(name)
        stitchability/relative_accuracy/1
        stitchability/identity/1
        stitchability/mean_only/1
        stitchability/untrained/1
    """

    @checked
    def __init__(
        self,
        reference: str | nn.Module | Adapter,
        data: Data,
        layers: Iterable[str | Pair] | None = None,
        *,
        matcher: str | Matcher = "lstsq",
        every: Every = "epoch",
        pooling: Pooling = "none",
        test_size: float | int = 0.5,
        batch_size: Count = 64,
        untrained: bool = True,
        seed: Natural = 0,
        name: str = "stitchability",
        **options: Any,
    ) -> None:
        super().__init__(name, every)
        self._matcher = registries.matchers.build(matcher, **options)
        if not isinstance(self._matcher, ClosedFormMatcher):
            raise ValueError(
                f"matcher {self._matcher.name!r} is not fitted in closed form; use for example matcher='lstsq'"
            )
        self._probe = Probe(data, pooling, batch_size)
        self._fit_samples, self._test_samples = self._probe.samples.split(test_size, seed)
        if self._probe.samples.labels is None:
            raise ValueError("accuracy requires labelled samples; pass Samples.of(data, label=…)")
        self._layers = None if layers is None else [(pair, pair) if isinstance(pair, str) else pair for pair in layers]
        self._reference = reference
        self._task: Task = Classification()
        self._pairs: list[Pair] = []
        self._backs: dict[str, Back] = {}
        self._target_activations: list[dict[str, Representation]] = []
        self._reference_correct = 0.0
        self._untrained, self._seed = untrained, seed
        self._constant: dict[Place, float] = {}

    # -- preparation ------------------------------------------------------------------------------------------------
    def _prepare(self, processes: Processes) -> None:
        adapter, reference = self._loaded, load_on(self._reference, processes.device)
        if reference.model is adapter.model:
            raise ValueError("the reference is the network in training; pass a frozen copy")
        check_comparable(adapter, reference, self._probe.pooling)
        check_head(reference)
        if reference.task is not None:  # a network without a known head may output classes, too
            self._task = task_named(reference.task).about(reference)
        if not self._task.classifies:
            raise ValueError(
                f"relative accuracy requires one class per sample, but the task of the reference is {reference.task}; "
                "pass a classifier"
            )
        classes = getattr(reference.model, "config", None)
        self._test_samples = self._task.numbered(self._test_samples, classes)
        self._task.warn_of_labels(self._test_samples, classes)
        self._pairs = self._layer_pairs(adapter, reference)
        targets = list(dict.fromkeys(target for _, target in self._pairs))
        self._backs = {target: reference.back(target).to(adapter.device) for target in targets}
        self._probe.check_layers(adapter, self._sources)
        self._target_activations, correct = [], 0.0
        for batch in self._batches_of_process(self._fit_samples, processes):
            by_layer = representations(reference, batch, targets)
            self._target_activations.append({name: activations.to("cpu") for name, activations in by_layer.items()})
        for name, activations in self._target_activations[0].items():
            if activations.spec != reference.spec(name):
                raise ValueError(
                    f"layer {name!r} of the reference has the spec {activations.spec} with these samples, expected "
                    f"{reference.spec(name)}; load the reference with example_inputs of the same size as the samples"
                )
        for batch in self._batches_of_process(self._test_samples, processes):
            output = reference.forward(reference.preprocess(batch.samples))
            if requirement := self._task.difference(reference, output):
                raise ValueError(f"the reference must be a classifier with {requirement}")
            logits = logits_of(output)
            self._task.check_labels(batch, logits.shape[-1])
            check_predictions(logits.float().logsumexp(-1, keepdim=True), batch)
            correct += self._count(logits, batch)
        self._reference_correct = sum(processes.gather(correct))
        if not self._reference_correct:
            raise ValueError(
                f"relative accuracy is undefined: the reference classifies none of {len(self._test_samples)} samples "
                "correctly"
            )
        self._constant = {}
        if self._untrained:
            self._constant = self._measure_stitches(untrained(adapter, self._seed), processes, "untrained")

    def _layer_pairs(self, adapter: Adapter, reference: Adapter) -> list[Pair]:
        if self._layers is not None:
            return list(dict.fromkeys(self._layers))
        pairs = [(layer, layer) for layer in adapter.layers if layer in reference.layers]
        if not pairs:
            raise ValueError(
                "the two networks do not share cut names: pass layers=[(layer of the network in training, layer of "
                f"the reference), …]. Cuts: {', '.join(adapter.layers)} and {', '.join(reference.layers)}"
            )
        return pairs

    def _batches_of_process(self, samples: Samples, processes: Processes) -> Iterator[Batch]:
        return samples.select(range(*processes.part(len(samples)))).batches(self._probe.batch_size)

    # -- measurement ------------------------------------------------------------------------------------------------
    def _figures(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        accuracies = self._measure_stitches(self._loaded, processes, "relative_accuracy")
        self._constant |= {place: value for place, value in accuracies.items() if place[0] == "mean_only"}
        ordered = sorted({**accuracies, **self._constant}.items(), key=lambda item: KINDS.index(item[0][0]))
        return {f"{kind}/{a if a == b else f'{a}->{b}'}": value for (kind, (a, b)), value in ordered}

    def _measure_stitches(self, adapter: Adapter, processes: Processes, map_kind: Kind) -> dict[Place, float]:
        """Fit the stitching layers of a network; return their relative accuracies and the baselines."""
        layers: dict[Place, StitchingLayer] = {}
        undefined: dict[Place, Exception] = {}
        for pair, layer in self._fit_stitches(adapter, processes).items():
            if isinstance(layer, Exception):
                undefined[map_kind, pair] = layer
                continue
            layers[map_kind, pair] = layer
            if map_kind == "untrained":
                continue
            if layer.equal_widths:
                layers["identity", pair] = layer.identity()
            if ("mean_only", pair) not in self._constant:
                layers["mean_only", pair] = layer.mean_only()
        accuracies = self._accuracies(adapter, layers, processes)
        undefined |= {
            place: ValueError("its logits are NaN") for place, share in accuracies.items() if math.isnan(share)
        }
        for (kind, (source, target)), error in undefined.items():
            stitch = f"the stitch from {source!r} to {target!r}"
            if kind == "untrained":  # training goes on without the untrained copy
                logger.warning("%s: %s of an untrained copy is undefined: %s", self.name, stitch, error)
                accuracies[kind, (source, target)] = math.nan
            else:
                accuracies[kind, (source, target)] = self._undefined(stitch, error)
        return accuracies

    def _accuracies(
        self, adapter: Adapter, layers: Mapping[Place, StitchingLayer], processes: Processes
    ) -> dict[Place, float]:
        """Return the accuracy of each stitching layer on the held-out samples, relative to the reference."""
        correct = dict.fromkeys(layers, 0.0)
        for batch in self._batches_of_process(self._test_samples, processes):
            activations = representations(adapter, batch, self._sources)
            for place, layer in layers.items():
                _, (source, target) = place
                correct[place] += self._count(self._run_back_half(layer(activations[source]), target), batch)
        totals = processes.gather(correct)
        return {place: sum(counts[place] for counts in totals) / self._reference_correct for place in layers}

    @property
    def _sources(self) -> list[str]:
        return list(dict.fromkeys(source for source, _ in self._pairs))

    def _fit_stitches(self, adapter: Adapter, processes: Processes) -> dict[Pair, StitchingLayer | Exception]:
        statistics: dict[Pair, dict[str, Moments]] = {pair: {} for pair in self._pairs}
        failures: dict[Pair, str] = {}
        specs: dict[str, Any] = {}
        for batch, targets in zip(
            self._batches_of_process(self._fit_samples, processes), self._target_activations, strict=True
        ):
            activations = representations(adapter, batch, self._sources)
            specs = {name: representation.spec for name, representation in activations.items()}
            for pair in self._pairs:
                source = activations[pair[0]]
                target = targets[pair[1]].to(source.values.device)
                try:
                    for part, (x, y) in paired_rows(source, target, self._probe.pooling).items():
                        if part not in statistics[pair]:
                            statistics[pair][part] = Moments(x.shape[1], y.shape[1], device=x.device)
                        statistics[pair][part].update(x, y)
                except ValueError as error:  # raised after all processes have exchanged failures, or they would wait
                    failures[pair] = str(error)
        failures = {pair: reason for reasons in processes.gather(failures) for pair, reason in reasons.items()}
        stitches: dict[Pair, StitchingLayer | Exception] = {}
        for pair in self._pairs:
            try:
                if pair in failures:
                    raise ValueError(failures[pair])
                if processes.accelerator is not None:
                    for moments in statistics[pair].values():
                        moments.all_reduce(processes.accelerator)
                target_spec = self._target_activations[0][pair[1]].spec
                collected = CollectedParts(specs[pair[0]], target_spec, self._probe.pooling, statistics[pair])
                stitches[pair] = self._matcher.match(collected).only
            except (ValueError, torch.linalg.LinAlgError) as error:
                stitches[pair] = error
        return stitches

    def _count(self, logits: torch.Tensor, batch: Batch) -> float:
        """Return the number of samples classified correctly; NaN if a sample does not have a class."""
        predicted = most_likely(logits).cpu()
        correct = (predicted == torch.as_tensor(self._task.labels(batch))).sum()
        return math.nan if bool((predicted < 0).any()) else float(correct)

    def _run_back_half(self, mapped: Representation, target: str) -> torch.Tensor:
        """Run the back half of the reference on activations at a layer; return the logits."""
        back = self._backs[target]
        weight = next((p for p in back.parameters() if p.is_floating_point()), mapped.values)
        return logits_of(back(mapped.replace(values=mapped.values.to(weight.dtype)).to(weight.device)))
