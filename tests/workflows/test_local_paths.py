"""What can be shared holds no path of this machine: results, pages, checkpoints and entries of caches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_stitch_studies import bench
from transformers import Trainer, TrainingArguments

import hf_stitch
from hf_stitch import Samples
from hf_stitch.relative import AnchorSet
from hf_stitch.results import Result
from hf_stitch.training import DynamicsRecorder, SimilarityCallback, StitchabilityCallback, TaskLoss

from tiny_networks import LAYERS, build  # isort: skip

LAYER = LAYERS["vit"]
SECRET = "home-of-alice"
QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two networks in folders of the same name, and another one."""
    root = tmp_path_factory.mktemp(SECRET)
    places = [root / run / "vit" for run in ("first", "second")]
    places.append(root / "third")
    for seed, place in enumerate(places):
        build("vit", seed).save_pretrained(place)
    return [str(place) for place in places]


def everything(folder: Path, result: Result) -> bytes:
    """Return all that a result writes, in files and as text."""
    result.save(folder / "result.json")
    result.to_html(folder / "result.html")
    return b"".join([*(path.read_bytes() for path in folder.rglob("*") if path.is_file()), str(result).encode()])


def test_a_comparison_names_local_folders_by_their_differences(folders: list[str], images: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers_a": [LAYER], "layers_b": [LAYER], **QUIET}
    found = hf_stitch.compare(*folders[:2], images, checkpoint_dir=tmp_path / "job", **options)
    assert found.recipe["a"]["name"] == "first/vit" and found.recipe["b"]["name"] == "second/vit"
    assert found.recipe["a"]["reference"]["id"] is None and found.recipe["a"]["reference"]["weights_hash"]
    assert found._titles == ("layers of a: first/vit", "layers of b: second/vit")
    written = everything(tmp_path, found)
    assert SECRET.encode() not in written and b"first/vit" in written
    assert "first/vit" in (tmp_path / "job" / "job.json").read_text()
    one = hf_stitch.compare(folders[0], folders[0], images, **options)
    assert one.recipe["a"]["name"] == one.recipe["b"]["name"] == "vit"
    moved = [str(shutil.copytree(each, tmp_path / "moved" / Path(each).parent.name / "vit")) for each in folders[:2]]
    hf_stitch.compare(*moved, images, checkpoint_dir=tmp_path / "job", **options)  # goes on with the same job


VERBS: dict[str, Callable[[dict[str, str], Any, Path], Any]] = {
    "weights": lambda nets, x, job: hf_stitch.compare(nets["x"], nets["y"], metrics=["weight_cosine"]),
    "all": lambda nets, x, job: hf_stitch.compare_all(nets, x, layers=[LAYER], checkpoint_dir=job, **QUIET),
    "all_weights": lambda nets, x, job: hf_stitch.compare_all(nets, metrics=["weight_cosine"]),
    "grid": lambda nets, x, job: hf_stitch.stitch_grid(
        nets["x"], nets["y"], x, layers_a=[LAYER], layers_b=[LAYER], checkpoint_dir=job, resamples=5, **QUIET
    ),
    "bench": lambda nets, x, job: bench(nets, x, layers=[LAYER], probe_epochs=1, **QUIET),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_result_holds_the_path_of_a_network(verb: str, folders: list[str], images: Any, tmp_path: Path) -> None:
    found = VERBS[verb](dict(zip("xyz", folders, strict=True)), images, tmp_path / "job")
    assert SECRET.encode() not in everything(tmp_path, found)
    if verb == "all":
        assert found.between("x", "y").recipe["a"]["name"] == "first/vit"
    if verb == "grid":
        assert found._titles == ("layers of the source: first/vit", "layers of the target: second/vit")


def test_trained_maps_and_their_checkpoints_hold_no_path(folders: list[str], images: Any, tmp_path: Path) -> None:
    trained, options = TaskLoss(max_steps=2, batch_size=16, initial="ridge"), {"source_layer": LAYER, **QUIET}
    made = hf_stitch.stitch(*folders[:2], images[:60], target_layer=LAYER, matcher=trained, **options)
    trained.fit(made, images[:60], checkpoint_dir=tmp_path / "job", progress=False)
    audit = hf_stitch.audit(made, images[60:], detectors=["knn"], **QUIET)
    made.save_pretrained(tmp_path / "model")
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    assert (tmp_path / "job" / "job.json").is_file()
    for found in (made.evaluation, hf_stitch.evaluate(made, images[60:], **QUIET), audit):
        assert SECRET.encode() not in everything(tmp_path, found)


def test_relative_models_and_anchors_hold_no_path(folders: list[str], images: Any, tmp_path: Path) -> None:
    anchors = Samples.of(images[:20])
    options: dict[str, Any] = {"num_labels": 5, "task": "image-classification", "progress": False}
    made = hf_stitch.relative_model(folders[0], anchors, layer=LAYER, **options)
    made.save_pretrained(tmp_path / "model")
    swapped = hf_stitch.swap(made, folders[1], anchors, encoder_layer=LAYER, data=images[20:], progress=False)
    swapped.save_pretrained(tmp_path / "swapped")
    AnchorSet.of(anchors).encode(folders[0], LAYER, anchors, progress=False).save_pretrained(tmp_path / "anchors")
    assert SECRET.encode() not in everything(tmp_path, swapped.evaluation)


def test_callbacks_and_their_checkpoints_hold_no_path(folders: list[str], images: Any, tmp_path: Path) -> None:
    """The arguments of the Trainer itself, in ``training_args.bin``, name its own folder; they name no network."""
    own, data = hf_stitch.load(folders[0]), [{"pixel_values": row["image"], "labels": row["label"]} for row in images]
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    run = Trainer(own.model, arguments, train_dataset=data)
    probe = Samples.of([row["image"] for row in images[:40]])
    watched = [
        SimilarityCallback(folders[1], probe, [LAYER], ["linear_cka"], every=1, name="a").attach(run, own),
        SimilarityCallback("start", probe, [LAYER], ["linear_cka"], every=1).attach(run, own),
        StitchabilityCallback(folders[1], Samples.of(images), [LAYER], matcher="ridge", every=1).attach(run, own),
    ]
    recorder = DynamicsRecorder(tmp_path / "recordings", probe, [LAYER], every=1).attach(run, own)
    run.train()
    for each in (*(callback.to_history() for callback in watched), recorder.result()):
        assert SECRET.encode() not in everything(tmp_path, each)
    assert [*(tmp_path / "trainer" / "checkpoint-1").glob("similarity_to_start*")]
