"""Networks stitched pair by pair and layer by layer, and what they answer on test images."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

import hf_stitch
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.evaluation import Score
from hf_stitch.matchers import Matcher
from hf_stitch.matchers.fitting import collect, fit_layer
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer
from hf_stitch.training import TaskLoss
from hf_stitch.training.prepared import Augment
from hf_stitch.workflows._stitch import join

Array = NDArray[np.float64]
Pair = tuple[str, str]
"""Names of source and target."""
DRAWS = 1000
"""Of a bootstrap."""
START = "least squares"
"""The method that task-loss matching starts from."""
BASELINES = ("identity", "mean_only")


@dataclass(frozen=True)
class Answers:
    """What every predictor says of the test images.

    Attributes:
        pairs: Source and target of each pair.
        labels: ``(images,)``, the truth.
        targets: ``(pairs, images, classes)``, logits of the targets themselves.
        stitched: Layer -> method -> ``(pairs, images, classes)``.
    """

    pairs: tuple[Pair, ...]
    labels: Tensor
    targets: Tensor
    stitched: Mapping[str, Mapping[str, Tensor]]

    def relative(self, layer: str, method: str, less: str | None = None) -> Score:
        """Accuracy over that of the target, mean over the pairs; less that of another method on the same images."""
        right = self._right(self.stitched[layer][method])
        if less is not None:
            right = right - self._right(self.stitched[layer][less])
        return self._interval(right, self._right(self.targets))

    def imitation(self, layer: str, method: str) -> Score:
        """Cross-entropy with the target's answers as soft labels, in nats, mean over the pairs."""
        said = self.stitched[layer][method].log_softmax(-1)
        loss = -(self.targets.softmax(-1) * said).sum(-1).numpy().astype(float)
        return self._interval(loss, np.ones_like(loss))

    def _right(self, logits: Tensor) -> Array:
        return (logits.argmax(-1) == self.labels).numpy().astype(float)

    def _interval(self, above: Array, below: Array) -> Score:
        """A ratio of sums over images, mean over pairs.

        The interval is of the bootstrap over test images, together with the Bayesian one over networks (Rubin 1981): a
        pair weighs the product of its networks' weights, so that two networks alone leave the images.
        """
        images, pairs = self._draws
        drawn = (pairs * (above @ images.T) / (below @ images.T)).sum(0)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Score(float((above.sum(1) / below.sum(1)).mean()), float(low), float(high))

    @cached_property
    def _draws(self) -> tuple[Array, Array]:
        """How often each image counts ``(draws, images)``, and what each pair weighs ``(pairs, draws)``."""
        random, n = np.random.default_rng(0), len(self.labels)
        names = sorted({name for pair in self.pairs for name in pair})
        sides = np.array([[names.index(name) for name in pair] for pair in self.pairs])
        images = random.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(float)
        weights = random.dirichlet(np.ones(len(names)), size=DRAWS)[:, sides].prod(2).T
        return images, weights / weights.sum(0)


def ring(names: Iterable[str]) -> list[Pair]:
    """Each network as the source of the next, so that each is source once and target once."""
    ordered = list(names)
    return list(zip(ordered, ordered[1:] + ordered[:1], strict=True))


@torch.no_grad()
def answers(
    sources: Mapping[str, hf_stitch.Adapter],
    targets: Mapping[str, hf_stitch.Adapter],
    pairs: Sequence[Pair],
    layers: Sequence[str],
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    *,
    direct: Mapping[str, Matcher],
    trained: Mapping[str, TaskLoss],
    augment: Augment | None = None,
    progress: bool = True,
) -> Answers:
    """Stitch every pair at every layer by every method, and ask for the answers on the test images.

    Stitches are trained in bfloat16 with weights in float32; closed forms and answers are in full precision.

    Args:
        sources: Networks by name.
        targets: Networks by name.
        pairs: Source and target.
        layers: Where to stitch; the same layer on both sides.
        train: Images to match on.
        test: Held-out images.
        direct: Method -> matcher in closed form, all fitted from one pass over the images; ``START`` is added.
        trained: Method -> training on the task's loss, from ``START``; of all sources of a target at once.
        augment: Changes images in training.
        progress: Show progress bars.
    """
    direct = {START: registries.matchers.build("lstsq"), **direct}
    said: dict[tuple[str, str, Pair], Tensor] = {}
    whole = {}
    for name in dict.fromkeys(b for _, b in pairs):
        group, target = [pair for pair in pairs if pair[1] == name], targets[name]
        whole[name] = torch.cat([target.forward(target.preprocess(b.samples)) for b in test.batches(500)])
        same = [(layer, layer) for layer in layers]
        found = {a: collect(sources[a], target, same, train, batch_size=500, progress=progress) for a, _ in group}
        for layer in layers:
            models = []
            maps: list[dict[str, StitchingLayer]] = []
            for a, _ in group:
                specs = sources[a].spec(layer), target.spec(layer)
                fitted = {m: fit_layer(matcher, found[a][layer, layer], *specs) for m, matcher in direct.items()}
                start = fitted[START]
                maps.append({**fitted, "identity": start.identity(), "mean_only": start.mean_only()})
                models.append(join(sources[a], layer, start, target, layer, task=target.task))
            for method, matcher in trained.items():
                with torch.enable_grad():
                    ends = matcher.fit(
                        models, train, target=target, augment=augment, progress=progress,
                        accelerator=Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16"),
                    )  # fmt: skip
                for own, end in zip(maps, ends, strict=True):
                    own[method] = end
            for pair, model, own in zip(group, models, maps, strict=True):
                for method, logits in _said(model, own, test).items():
                    said[layer, method, pair] = logits
    methods = [*direct, *trained, *BASELINES]
    stitched = {
        layer: {method: torch.stack([said[layer, method, pair] for pair in pairs]) for method in methods}
        for layer in layers
    }
    return Answers(tuple(pairs), torch.tensor(test.labels), torch.stack([whole[b] for _, b in pairs]), stitched)


def _said(
    model: hf_stitch.StitchedModel, maps: Mapping[str, StitchingLayer], test: hf_stitch.Samples
) -> dict[str, Tensor]:
    """The logits of a stitched model with each of some maps; its front runs once."""
    parts = list(_batches(model, maps, test))
    return {method: torch.cat([part[method] for part in parts]) for method in maps}


def _batches(
    model: hf_stitch.StitchedModel, maps: Mapping[str, StitchingLayer], test: hf_stitch.Samples
) -> Iterator[dict[str, Tensor]]:
    for batch in test.batches(500):
        with evaluating(model):
            here = model.source(**model.source_inputs(model.preprocess(batch.samples)))
            yield {method: model.head(layer.eval()(here)).logits for method, layer in maps.items()}
