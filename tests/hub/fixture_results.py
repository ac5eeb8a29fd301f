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
from hf_stitch_embeddings import calibrate, evaluate_retrieval, monitor, pairs_curve, upgrade, verdict
from hf_stitch_embeddings.stores import ArrayStore

import hf_stitch
from hf_stitch import Adapter, StitchedModel, analysis
from hf_stitch.adapters.doctor import diagnose
from hf_stitch.results import Result
from hf_stitch.training import Dynamics, SimilarityCallback, TaskLoss

FEW: dict[str, Any] = {"resamples": 20, "progress": False}
LAYERS = ("1", "3")


def named() -> dict[str, Adapter]:
    return dict(zip("abc", classifiers(), strict=True))


@cache
def stitched() -> StitchedModel:
    a, b = classifiers()[:2]
    task = "image-classification"
    return hf_stitch.stitch(a, b, points(), source_layer="1", target_layer="1", task=task, progress=False)


def held_out() -> hf_stitch.Samples:
    return points(60, seed=5)


# -- results that take several lines -----------------------------------------------------------------------------------
def atlas_of_weights() -> Result:
    given = rows(20, 36).reshape(20, 1, 6, 6)
    a, b = (hf_stitch.load(convolutions(seed), example_inputs=given[:2]) for seed in range(2))
    return hf_stitch.compare(a, b, given, metrics=("linear_cka", "weight_cosine"), progress=False)


@cache
def network_atlas() -> Any:
    return hf_stitch.compare_all(named(), points(), layers=LAYERS, resamples=10, progress=False)


@cache
def grid() -> Any:
    return hf_stitch.stitch_grid(
        *classifiers()[:2], points(), layers_a=LAYERS, layers_b=LAYERS, matchers=("lstsq", "identity"),
        detectors=("knn",), task="image-classification", **FEW,
    )  # fmt: skip


def trajectory() -> Result:
    recorder = studies.TrajectoryRecorder(stitched(), held_out(), ["linear_cka"], every=2)
    TaskLoss(max_steps=4).fit(stitched(), points(), callback=recorder, progress=False)
    return recorder.trajectory


def history() -> Result:
    callback = SimilarityCallback("start", points(20), layers=["1"])
    adapter = classifiers()[0]
    for step in range(2):
        callback.measure(adapter, step=step, epoch=step / 2)
    return callback.to_history()


def of_recordings(write: Callable[[Path], None], metric: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "recordings"))
        return Dynamics.of(Path(folder, "recordings"), metric)


def retrieval() -> Result:
    (old, new), (asked, wanted) = encoders(80, 3), encoders(20, 4)
    return evaluate_retrieval(fitted_map(), old, new, asked, wanted, k=(1, 10), resamples=20)


def pairs() -> Result:
    sets = *encoders(100), *encoders(60, 3), *encoders(20, 4)
    return pairs_curve(*sets, sizes=(30, 60), seeds=(0, 1), k=5, resamples=20)


def upgraded() -> Result:
    """The store has a relative path."""
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name, "old.npy"), encoders(30)[0])
        done = upgrade(ArrayStore(Path(name, "old.npy"), Path(name, "new.npy")), fitted_map(), progress=False)
        values = done.to_dict().items()
        return type(done).from_dict(
            {key: value.replace(f"{name}/", "") if isinstance(value, str) else value for key, value in values}
        )


# -- all results -------------------------------------------------------------------------------------------------------
MAKERS: dict[str, Callable[[], Result]] = {
    "atlas": lambda: hf_stitch.compare(
        *classifiers()[:2], points(), layers_a=LAYERS, layers_b=LAYERS, permutations=19, progress=False,
        metrics=("linear_cka", "procrustes", "mutual_knn"),
    ),
    "atlas_of_weights": atlas_of_weights,
    "network_atlas": network_atlas,
    "comparison_plan": lambda: hf_stitch.plan(hf_stitch.compare, *classifiers()[:2], points(), progress=False),
    "plan": lambda: hf_stitch.plan(hf_stitch.evaluate, stitched(), held_out(), **FEW),
    "identification": lambda: network_atlas().identify(),
    "permutation_test": lambda: analysis.permutation_test(
        "linear_cka", rows(30), rows(30, seed=1), permutations=19
    ),
    "confidence_interval": lambda: analysis.bootstrap(
        "linear_cka", rows(30), rows(30) + rows(30, seed=1), resamples=20
    ),
    "bench": lambda: studies.bench(
        named(), points(240), layers=LAYERS, ranks=[2], probe_epochs=2, references=2, progress=False
    ),
    "grid": grid,
    "detection": lambda: grid().detections["knn"],
    "evaluation": lambda: hf_stitch.evaluate(
        stitched(), held_out(), target=classifiers()[1], source=classifiers()[0], examples=3, **FEW
    ),
    "audit": lambda: hf_stitch.audit(stitched(), held_out(), train_data=points(), target=classifiers()[1], **FEW),
    "rank_curve": lambda: studies.rank_curve(
        stitched(), held_out(),
        {"low_rank": studies.reduced_ranks(stitched(), points(), [1, 3], progress=False)}, **FEW,
    ),
    "sparsity_curve": lambda: studies.sparsity_curve(stitched(), held_out(), [0.0, 0.5], **FEW),
    "mode_connectivity": lambda: studies.mode_connectivity(
        stitched(), dict.fromkeys(("first", "second"), stitched().stitch), held_out(), weights=[0.5],
        min_relative_accuracy=0.0, **FEW,
    ),
    "trajectory": trajectory,
    "history": history,
    "dynamics": lambda: of_recordings(recordings, "linear_cka"),
    "dynamics_of_weights": lambda: of_recordings(recordings_of_weights, "weight_cosine"),
    "diagnosis": lambda: diagnose(classifiers()[0]),
    "retrieval": retrieval,
    "map_verdict": lambda: verdict(fitted_map()),
    "ageing": lambda: monitor(fitted_map(), *encoders(100, 6)),
    "calibration": lambda: calibrate([0.5, 0.85, 0.95], [0.4, 0.75, 0.85]),
    "pairs": pairs,
    "upgraded": upgraded,
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
