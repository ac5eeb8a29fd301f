"""Jobs that several processes share, with two small networks in float64 or float32."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hf_stitch
from hf_stitch.data import PairedSamples
from hf_stitch.matchers import RowsMatcher
from hf_stitch.matchers.regression import Lstsq
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.reference import weights_hash
from hf_stitch.running import Processes, Run
from hf_stitch.scoring.halves import HalvesOfModel
from hf_stitch.scoring.passing import Scoring
from hf_stitch.tasks.heads import task_named
from hf_stitch.training import TaskLoss

N, BATCH, CLASSES = 61, 8, 3
"""61 samples, a prime, cannot be split evenly."""


def _net(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, 5, 3, stride=2, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, CLASSES),
    )  # fmt: skip


@cache
def networks(dtype: torch.dtype = torch.float64) -> tuple[hf_stitch.Adapter, hf_stitch.Adapter]:
    example = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(9)).to(dtype)
    a, b = (hf_stitch.load(_net(seed, 4 + seed).to(dtype).eval(), example_inputs=example) for seed in range(2))
    return a, b


def images(count: int = N, seed: int = 0, dtype: torch.dtype = torch.float64) -> hf_stitch.Samples:
    """Images, labelled by the second network."""
    pixels = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    with torch.no_grad():
        labels = networks(dtype)[1].model(pixels).argmax(1).tolist()
    return hf_stitch.Samples.of(pixels, label=labels, id=[f"image {place}" for place in range(count)])


@cache
def stitched(dtype: torch.dtype = torch.float64, **options: Any) -> hf_stitch.StitchedModel:
    """A model stitched in closed form; built once in a process."""
    given: dict[str, Any] = {
        "source_layer": "1", "target_layer": "3", "matcher": "lstsq", "task": "image-classification", **options,
    }  # fmt: skip
    a, b = networks(dtype)
    return hf_stitch.stitch(a, b, images(dtype=dtype), progress=False, batch_size=BATCH, **given)


def weights(model: hf_stitch.StitchedModel) -> Any:
    return torch.cat([value.flatten() for value in model.stitch.state_dict().values()])


def flat(value: Any) -> list[float]:
    """All numbers of nested values, in a fixed order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in flat(item)]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def numbers(result: Any) -> Any:
    """All numbers of a result, without its recipe, which names the versions and the number of processes."""
    return np.array(flat({key: value for key, value in result.to_dict().items() if key != "recipe"}))


# -- jobs: each returns an array --------------------------------------------------------------------------------------
def atlas(folder: Path, **options: Any) -> Any:
    given = {"metrics": ["linear_cka", "procrustes", "rsa", "mutual_knn"], "batch_size": BATCH, **options}
    return numbers(hf_stitch.compare(*networks(), images(), progress=False, **given))


def moments(folder: Path) -> Any:
    """What closed-form matchers are fitted to, of all pairs of layers, and a map in float64."""
    a, b = networks()
    pair = Pair(a, b).at((la, lb) for la in ("1", "3") for lb in ("1", "3"))
    run = Run(BATCH, progress=False, processes=Processes.of(None))
    collected = CollectedPair(pair, PairedSamples.of(images()), run)
    sums = [collected.moments(cell)["body"] for cell in pair.cells]
    return torch.cat([v.flatten() for each in sums for v in (each.mean_x, each.sxx, each.sxy, each.syy)] + [
        weight.detach().flatten() for weight in [Lstsq().fit(each, dtype=torch.float64).weight for each in sums]
    ])  # fmt: skip


def closed_form(folder: Path) -> Any:
    return weights(stitched(matcher="ridge", ridge=1e-3))


def enlarged(folder: Path) -> Any:
    """The source has fewer positions than the target."""
    return weights(stitched(source_layer="3", target_layer="1"))


def of_rows(folder: Path) -> Any:
    """A matcher that is fitted to rows."""
    matchers = hf_stitch.registries.matchers
    name = next(name for name in matchers if issubclass(matchers.get(name), RowsMatcher))
    return weights(stitched(source_layer="5", target_layer="6", matcher=name))


def unpaired(folder: Path) -> Any:
    """A matcher that also reads samples without partners, from a network to itself."""
    a, _ = networks()
    found = hf_stitch.stitch(
        a, a, images(), source_layer="1", target_layer="1", matcher="seeded_refinement", iterations=3,
        unpaired=(images(43, seed=5), images(38, seed=6)), task="image-classification", batch_size=BATCH,
        progress=False,
    )  # fmt: skip
    return weights(found)


def chosen(folder: Path) -> Any:
    """Both layers are chosen by similarity."""
    return weights(stitched(source_layer="auto", target_layer="auto", matcher="ridge", ridge=1e-3))


def evaluation(folder: Path, **options: Any) -> Any:
    model = stitched(**options)
    return numbers(hf_stitch.evaluate(model, images(47, seed=3), batch_size=BATCH, resamples=40, progress=False))


def vectors(folder: Path) -> Any:
    return evaluation(folder, task=None)


def audit(folder: Path) -> Any:
    models = [stitched(), stitched(matcher="identity", source_layer="3")]
    found = hf_stitch.audit(
        models, images(90, seed=4), far_data=images(20, seed=5), detectors=("mahalanobis", "knn"), batch_size=BATCH,
        resamples=40, progress=False,
    )  # fmt: skip
    return np.concatenate([numbers(each) for each in found])


def grid(folder: Path, **options: Any) -> Any:
    a, b = networks()
    given: dict[str, Any] = {"matchers": ["lstsq", "procrustes"], "detectors": ["mahalanobis"], **options}
    found = hf_stitch.stitch_grid(
        a, b, images(150), layers_a=["1", "3"], layers_b=["1", "3"], task="image-classification", batch_size=BATCH,
        resamples=40, progress=False, **given,
    )  # fmt: skip
    return numbers(found)


def relative(folder: Path) -> Any:
    """A relative model whose encoder is swapped, and scored."""
    a, b = networks()
    anchors = images(23, seed=6)
    torch.manual_seed(0)
    model = hf_stitch.relative_model(a, anchors, layer="6", num_labels=CLASSES, batch_size=BATCH, progress=False)
    data = images(47, seed=3)
    swapped = hf_stitch.swap(model, b, anchors, encoder_layer="6", data=data, batch_size=BATCH, progress=False)
    inputs = next(images(9, seed=8).batches(9)).samples
    with torch.no_grad():
        logits = swapped(**swapped.preprocess(inputs)).logits
    assert swapped.evaluation is not None
    return np.concatenate([numbers(swapped.evaluation), logits.double().numpy().ravel()])


def training(folder: Path, **options: Any) -> Any:
    """20 steps on batches of 16 samples, in float64."""
    model = nn.Module.to(copy.deepcopy(stitched()), torch.float64)
    layer = TaskLoss(epochs=1, max_steps=20, batch_size=16, lr=1e-2).fit(
        model, images(80), target=networks()[1], progress=False, **options
    )
    return torch.cat([value.flatten() for value in layer.state_dict().values()])


def _held(half: nn.Module) -> int:
    """Bytes of the weights of a half that this process holds between forwards."""
    weights: list[Any] = list({id(p): p for p in half.parameters()}.values())
    return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in weights)


def sharded(folder: Path) -> Any:
    """The same with distributed weights of both halves, and validation on samples that cannot be split evenly."""
    model = nn.Module.to(copy.deepcopy(stitched()), torch.float64)
    halves, processes = (model.source, model.target), Processes.of(None).count
    before = weights_hash(model), [type(module) for module in model.modules()]
    whole = [_held(half) for half in halves]
    held: list[list[int]] = []
    layer = TaskLoss(epochs=1, max_steps=20, batch_size=16, lr=1e-2).fit(
        model, images(80), target=networks()[1], validation_data=images(33, seed=3), progress=False, shard=True,
        callback=lambda step, layers: held.append([_held(half) for half in halves]),
    )  # fmt: skip
    assert (weights_hash(model), [type(module) for module in model.modules()]) == before
    largest = sum(-(-p.shape[0] // processes) / p.shape[0] * p.nbytes for half in halves for p in half.parameters())
    assert all(sum(sizes) <= largest <= sum(whole) for sizes in held) and len(held) == 21
    return torch.cat([value.flatten() for value in layer.state_dict().values()])


def scores_of_float32(folder: Path) -> Any:
    """What is measured of each sample, with networks in float32."""
    model = stitched(torch.float32, matcher="identity", source_layer="3")
    halves = HalvesOfModel(model)
    predictors = list(halves.predictors({"stitched": model.stitch}))
    scoring = Scoring(networks(torch.float32)[1], {"": halves}, predictors, task_named(model.task))
    samples = PairedSamples.of(images(47, seed=3, dtype=torch.float32))
    found = scoring.run(samples, Run(BATCH, progress=False, processes=Processes.of(None))).answers[""]
    return np.stack([found["stitched"][name] for name in sorted(found["stitched"])])


JOBS = (
    atlas, moments, closed_form, enlarged, of_rows, unpaired, chosen, evaluation, vectors, audit, grid, relative,
    training, sharded, scores_of_float32,
)  # fmt: skip


def run_all(rank: int, folder: Path) -> None:
    """Do all jobs as one of several processes, and count the samples that each of them reads here."""
    counted = dict.fromkeys((job.__name__ for job in JOBS), 0)
    batches = hf_stitch.Samples.batches
    stitched.cache_clear()

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        for batch in batches(self, *arguments, **options):
            counted[job.__name__] += len(batch.samples)
            yield batch

    hf_stitch.Samples.batches = counting  # type: ignore[method-assign]
    try:
        for job in JOBS:
            np.save(folder / f"{job.__name__}-{rank}.npy", np.asarray(job(folder)))
    finally:
        hf_stitch.Samples.batches = batches  # type: ignore[method-assign]
    (folder / f"read-{rank}.json").write_text(json.dumps(counted))
