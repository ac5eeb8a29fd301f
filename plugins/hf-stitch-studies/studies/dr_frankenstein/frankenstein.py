"""Stitch networks for each pair and layer, and compute their logits on test images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from accelerate import Accelerator
from dr_frankenstein.stitching import BATCH, collected, logits
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch import Adapter, Samples, StitchedModel, registries
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.analysis.evaluation import Score
from hf_stitch.artefacts.joining import join
from hf_stitch.matchers import Matcher
from hf_stitch.stitches import StitchingLayer
from hf_stitch.training import TaskLoss

Array = NDArray[np.float64]
Pair = tuple[str, str]
"""Names of source and target."""
DRAWS = 1000
"""Number of bootstrap draws."""
START = "least squares"
"""The starting point of task-loss matching."""
BASELINES = ("identity", "mean_only")


@dataclass(frozen=True)
class Answers:
    """Logits of every predictor on the test images."""

    pairs: tuple[Pair, ...]  # source and target
    labels: Tensor  # true classes (images,)
    targets: Tensor  # logits of the targets (pairs, images, classes)
    stitched: Mapping[str, Mapping[str, Tensor]]  # layer -> method -> logits (pairs, images, classes)

    def relative(self, layer: str, method: str, less: str | None = None) -> Score:
        """Return the relative accuracy, optionally less the one of ``less``, as the mean over pairs."""
        right = self._right(self.stitched[layer][method])
        if less is not None:
            right = right - self._right(self.stitched[layer][less])
        return self._interval(right, self._right(self.targets))

    def by_pair(self, layer: str, method: str) -> list[float]:
        """Return the relative accuracy of each pair."""
        shares = self._right(self.stitched[layer][method]).mean(1) / self._right(self.targets).mean(1)
        return [float(share) for share in shares]

    def imitation(self, layer: str, method: str) -> Score:
        """Return the cross-entropy with the soft labels of the target in nats, as the mean over pairs."""
        predicted = self.stitched[layer][method].log_softmax(-1)
        loss = -(self.targets.softmax(-1) * predicted).sum(-1).numpy().astype(float)
        return self._interval(loss, np.ones_like(loss))

    def _right(self, logits: Tensor) -> Array:
        return (logits.argmax(-1) == self.labels).numpy().astype(float)

    def _interval(self, above: Array, below: Array) -> Score:
        """Compute a ratio of sums over images, as the mean over pairs, with its interval.

        The interval combines the bootstrap over test images with the Bayesian bootstrap over networks (Rubin 1981). The
        weight of a pair is the product of the weights of its networks, so with only two networks the interval reflects
        only the images.
        """
        images, pairs = self._draws
        low, high = np.quantile((pairs * (above @ images.T) / (below @ images.T)).sum(0), [0.025, 0.975])
        return Score(float((above.sum(1) / below.sum(1)).mean()), float(low), float(high))

    @cached_property
    def _draws(self) -> tuple[Array, Array]:
        """Counts of images ``(draws, images)`` and weights of pairs ``(pairs, draws)``."""
        random, n = np.random.default_rng(0), len(self.labels)
        names = sorted({name for pair in self.pairs for name in pair})
        sides = np.array([[names.index(name) for name in pair] for pair in self.pairs])
        images = random.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(float)
        weights = random.dirichlet(np.ones(len(names)), size=DRAWS)[:, sides].prod(2).T
        return images, weights / weights.sum(0)


def ring(names: Iterable[str]) -> list[Pair]:
    """Pair each network with the next one, so that each network is the source once and the target once."""
    ordered = list(names)
    return list(zip(ordered, ordered[1:] + ordered[:1], strict=True))


@torch.no_grad()
def answers(
    networks: Mapping[str, Adapter], pairs: Sequence[Pair], layers: Sequence[str], train: Samples,
    test: Samples, *, direct: Mapping[str, Matcher], trained: Mapping[str, TaskLoss],
) -> Answers:  # fmt: skip
    """Stitch every pair at every layer with every method, and compute logits on the test images.

    Task-loss matching runs in bfloat16 with float32 weights. Closed-form fits and logits are in full precision.
    """
    direct = {START: registries.matchers.build("lstsq"), **direct}
    outputs: dict[tuple[str, str, Pair], Tensor] = {}
    whole = {}
    for name in dict.fromkeys(b for _, b in pairs):
        group, target = [pair for pair in pairs if pair[1] == name], networks[name]
        whole[name], same = logits(target, test), [(layer, layer) for layer in layers]
        statistics = {a: collected(networks[a], target, same, train) for a, _ in group}
        closed = {(a, m): matcher.match(statistics[a]).layers for a in statistics for m, matcher in direct.items()}
        maps: dict[tuple[str, Pair], dict[str, StitchingLayer]] = {}
        for layer, (a, b) in product(layers, group):
            fitted = {m: closed[a, m][layer, layer] for m in direct}
            start = fitted[START]
            maps[layer, (a, b)] = {**fitted, "identity": start.identity(), "mean_only": start.mean_only()}
        for method, matcher in trained.items():
            starts = {a: matcher.initial.match(statistics[a]).layers for a in statistics}
            models = [
                join(networks[a], layer, starts[a][layer, layer], target, layer, task=target.task)
                for layer, (a, _) in maps
            ]
            with torch.enable_grad():
                accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16")
                ends = matcher.fit(models, train, target=target, accelerator=accelerator)
            for place, end in zip(maps, ends, strict=True):
                maps[place][method] = end
        for (layer, pair), fitted in maps.items():
            model = join(networks[pair[0]], layer, fitted[START], target, layer, task=target.task)
            for method, method_logits in _logits(model, fitted, test).items():
                outputs[layer, method, pair] = method_logits
    methods = [*direct, *trained, *BASELINES]
    stitched = {
        layer: {method: torch.stack([outputs[layer, method, pair] for pair in pairs]) for method in methods}
        for layer in layers
    }
    return Answers(tuple(pairs), torch.tensor(test.labels), torch.stack([whole[b] for _, b in pairs]), stitched)


def _logits(model: StitchedModel, maps: Mapping[str, StitchingLayer], test: Samples) -> dict[str, Tensor]:
    """Compute the logits of a stitched model with each of several maps, running the front half once."""
    outputs: dict[str, list[Tensor]] = {method: [] for method in maps}
    for batch in test.batches(BATCH):
        with evaluating(model):
            activations = model.source(**model.source_inputs(model.preprocess(batch.samples)))
            for method, layer in maps.items():
                outputs[method].append(model.head(layer.eval()(activations)).logits)
    return {method: torch.cat(parts) for method, parts in outputs.items()}
