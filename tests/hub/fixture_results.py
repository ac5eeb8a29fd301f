"""Results of every kind, as JSON and together on one page."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hf_stitch_studies as studies
import numpy as np
from fixture_files import convolutions, encoders, fitted_map, recordings, recordings_of_weights
from fixture_networks import classifiers, points, rows
from hf_stitch_embeddings import (
    calibrate,
    evaluate_retrieval,
    monitor,
    pairs_curve,
    upgrade,
    verdict,
)
from hf_stitch_embeddings.stores import ArrayStore

import hf_stitch
from hf_stitch import StitchedModel, analysis
from hf_stitch.adapters.doctor import diagnose
from hf_stitch.results import Result
from hf_stitch.training import Dynamics, SimilarityCallback, TaskLoss

FEW: dict[str, Any] = {"resamples": 20, "progress": False}
LAYERS = ("1", "3")


@cache
def stitched(seed: int = 1) -> StitchedModel:
    """Stitch the first network to another one."""
    nets = classifiers()
    return hf_stitch.stitch(
        nets[0], nets[seed], points(), source_layer="1", target_layer="1", task="image-classification", progress=False
    )


def held_out() -> hf_stitch.Samples:
    """Draw samples to which nothing was fitted."""
    drawn = rows(60, seed=5)
    return hf_stitch.Samples.of(drawn, label=[int(x > 0) + int(y > 0) for x, y in drawn[:, :2].tolist()])


# -- comparisons -------------------------------------------------------------------------------------------------------
def atlas() -> Result:
    """Similarities of layers, with a test of the best pair."""
    a, b, _ = classifiers()
    metrics = ("linear_cka", "procrustes", "mutual_knn")
    return hf_stitch.compare(
        a, b, points(), layers_a=LAYERS, layers_b=LAYERS, metrics=metrics, permutations=19, progress=False
    )


def atlas_of_weights() -> Result:
    """Similarities of activations, with those of weights."""
    given = rows(20, 36).reshape(20, 1, 6, 6)
    a, b = (hf_stitch.load(convolutions(seed), example_inputs=given[:2]) for seed in range(2))
    return hf_stitch.compare(a, b, given, metrics=("linear_cka", "weight_cosine"), progress=False)


def network_atlas() -> Result:
    """Similarities of several networks, with the jackknife."""
    nets = dict(zip("abc", classifiers(), strict=True))
    return hf_stitch.compare_all(nets, points(), layers=LAYERS, resamples=10, progress=False)


def comparison_plan() -> Result:
    """What a comparison would take."""
    a, b, _ = classifiers()
    return hf_stitch.plan(hf_stitch.compare, a, b, points(), progress=False)


def plan() -> Result:
    """What an evaluation would take."""
    return hf_stitch.plan(hf_stitch.evaluate, stitched(), held_out(), **FEW)


def identification() -> Result:
    """Which layers are identified."""
    found: Any = network_atlas()
    return found.identify()


def permutation_test() -> Result:
    """A permutation test of one pair."""
    return analysis.permutation_test("linear_cka", rows(30), rows(30, seed=1), permutations=19)


def confidence_interval() -> Result:
    """A bootstrap of one pair."""
    return analysis.bootstrap("linear_cka", rows(30), rows(30) + rows(30, seed=1), resamples=20)


def bench() -> Result:
    """Which distance predicts functional differences."""
    nets = dict(zip("abc", classifiers(), strict=True))
    return studies.bench(nets, points(240), layers=LAYERS, ranks=[2], probe_epochs=2, references=2, progress=False)


# -- stitched models ---------------------------------------------------------------------------------------------------
@cache
def grid() -> Any:
    """Stitches between all layers, with a detector."""
    a, b, _ = classifiers()
    return hf_stitch.stitch_grid(
        a, b, points(), layers_a=LAYERS, layers_b=LAYERS, matchers=("lstsq", "identity"), detectors=("knn",),
        task="image-classification", **FEW,
    )  # fmt: skip


def detection() -> Result:
    """What a detector finds in a grid."""
    found: Result = grid().detections["knn"]
    return found


def evaluation() -> Result:
    """Scores of a stitched model, with its parts, a confusion matrix and the samples that differ most."""
    nets = classifiers()
    return hf_stitch.evaluate(stitched(), held_out(), target=nets[1], source=nets[0], examples=3, **FEW)


def audit() -> Result:
    """Accuracy and detectors of a stitched model."""
    return hf_stitch.audit(stitched(), held_out(), train_data=points(), target=classifiers()[1], **FEW)


def rank_curve() -> Result:
    """Accuracy by the rank of a stitch."""
    layers = studies.reduced_ranks(stitched(), points(), [1, 3], progress=False)
    return studies.rank_curve(stitched(), held_out(), {"low_rank": layers}, **FEW)


def sparsity_curve() -> Result:
    """Accuracy by the sparsity of a stitch."""
    return studies.sparsity_curve(stitched(), held_out(), [0.0, 0.5], **FEW)


def mode_connectivity() -> Result:
    """Accuracy between two stitches."""
    layers = {name: stitched().stitch for name in ("first", "second")}
    return studies.mode_connectivity(
        stitched(), layers, held_out(), weights=[0.5], min_relative_accuracy=0.0, **FEW
    )  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------------
def trajectory() -> Result:
    """Figures of a stitch in training."""
    recorder = studies.TrajectoryRecorder(stitched(), held_out(), ["linear_cka"], every=2)
    TaskLoss(max_steps=4).fit(stitched(), points(), callback=recorder, progress=False)
    return recorder.trajectory


def history() -> Result:
    """What a callback has measured."""
    callback = SimilarityCallback("start", points(20), layers=["1"])
    adapter = classifiers()[0]
    for step in range(2):
        callback.measure(adapter, step=step, epoch=step / 2)
    return callback.to_history()


def _of_recordings(write: Callable[[Path], None], metric: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "recordings"))
        return Dynamics.of(Path(folder, "recordings"), metric)


def dynamics() -> Result:
    """Similarities of activations during training."""
    return _of_recordings(recordings, "linear_cka")


def dynamics_of_weights() -> Result:
    """Similarities of weights during training."""
    return _of_recordings(recordings_of_weights, "weight_cosine")


def diagnosis() -> Result:
    """The cuts of a network."""
    return diagnose(classifiers()[0])


# -- embeddings --------------------------------------------------------------------------------------------------------
def retrieval() -> Result:
    """Recall of maps between two encoders."""
    (old, new), (asked, wanted) = encoders(80, 3), encoders(20, 4)
    return evaluate_retrieval(fitted_map(), old, new, asked, wanted, k=(1, 10), resamples=20)


def map_verdict() -> Result:
    """Whether to use a map."""
    return verdict(fitted_map())


def ageing() -> Result:
    """Whether a map has aged."""
    return monitor(fitted_map(), *encoders(100, 6))


def calibration() -> Result:
    """The margin of verdicts."""
    return calibrate([0.5, 0.85, 0.95], [0.4, 0.75, 0.85])


def pairs() -> Result:
    """Recall by the number of pairs."""
    return pairs_curve(
        *encoders(100), *encoders(60, 3), *encoders(20, 4), sizes=(30, 60), seeds=(0, 1), k=5, resamples=20
    )


def upgraded() -> Result:
    """What an upgrade has done; the store has a relative path."""
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name, "old.npy"), encoders(30)[0])
        done = upgrade(ArrayStore(Path(name, "old.npy"), Path(name, "new.npy")), fitted_map(), progress=False)
        return type(done).from_dict(
            {
                key: value.replace(f"{name}/", "") if isinstance(value, str) else value
                for key, value in done.to_dict().items()
            }
        )


MAKERS: dict[str, Callable[[], Result]] = {
    each.__name__: each
    for each in (
        atlas, atlas_of_weights, network_atlas, comparison_plan, plan, identification, permutation_test,
        confidence_interval, bench, grid, detection, evaluation, audit, rank_curve, sparsity_curve, mode_connectivity,
        trajectory, history, dynamics, dynamics_of_weights, diagnosis, retrieval, map_verdict, ageing, calibration,
        pairs, upgraded,
    )
}  # fmt: skip
"""Name of a file -> function that makes the result in it."""


def results(folder: Path) -> None:
    """Write each result to a file of its own, and all of them to one page, compressed."""
    made = {name: make() for name, make in MAKERS.items()}
    for name, result in made.items():
        result.save(folder / f"{name}.json")
    with tempfile.TemporaryDirectory() as name:
        hf_stitch.report(made.values(), Path(name, "page.html"), title="Results", command="hf-stitch …")
        page = Path(name, "page.html").read_bytes()
    (folder / "page.html.gz").write_bytes(gzip.compress(page, mtime=0))
