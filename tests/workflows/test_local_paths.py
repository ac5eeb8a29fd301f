"""What can be shared holds no path of this machine: results, pages, checkpoints and entries of caches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_studies import bench
from transformers import Trainer, TrainingArguments

import hf_stitch
from hf_stitch import Samples
from hf_stitch.analysis.caching import LayerCache, Recorded
from hf_stitch.relative import AnchorSet
from hf_stitch.results import Result
from hf_stitch.storage.cache import Cache
from hf_stitch.training import DynamicsRecorder, SimilarityCallback, StitchabilityCallback, TaskLoss

from tiny_networks import LAYERS, build  # isort: skip

LAYER = LAYERS["vit"]
SECRET = "home-of-alice"


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


def test_a_comparison_names_local_folders_by_what_tells_them_apart(
    folders: list[str], images: Any, tmp_path: Path
) -> None:
    found = hf_stitch.compare(
        *folders[:2], images, layers_a=[LAYER], layers_b=[LAYER], checkpoint_dir=tmp_path / "job", progress=False
    )
    assert found.recipe["a"]["name"] == "first/vit" and found.recipe["b"]["name"] == "second/vit"
    assert found.recipe["a"]["reference"]["id"] is None and found.recipe["a"]["reference"]["weights_hash"]
    assert found._titles == ("layers of a: first/vit", "layers of b: second/vit")
    written = everything(tmp_path, found)
    assert SECRET.encode() not in written and b"first/vit" in written
    assert "first/vit" in (tmp_path / "job" / "job.json").read_text()


def test_one_folder_is_named_by_its_own_name(folders: list[str], images: Any) -> None:
    found = hf_stitch.compare(folders[0], folders[0], images, layers_a=[LAYER], layers_b=[LAYER], progress=False)
    assert found.recipe["a"]["name"] == found.recipe["b"]["name"] == "vit"


def test_a_moved_folder_resumes_the_comparison(folders: list[str], images: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers_a": [LAYER], "layers_b": [LAYER], "checkpoint_dir": tmp_path / "job"}
    hf_stitch.compare(*folders[:2], images, progress=False, **options)
    moved = [
        str(shutil.copytree(place, tmp_path / "elsewhere" / Path(place).parent.name / "vit")) for place in folders[:2]
    ]
    hf_stitch.compare(*moved, images, progress=False, **options)


@pytest.mark.parametrize("verb", ["weights", "all", "all_weights", "grid", "evaluation", "audit", "bench"])
def test_no_result_holds_the_path_of_a_network(verb: str, folders: list[str], images: Any, tmp_path: Path) -> None:
    named = dict(zip("xyz", folders, strict=True))
    quiet: dict[str, Any] = {"progress": False}
    if verb == "weights":
        found: Any = hf_stitch.compare(*folders[:2], metrics=["weight_cosine"])
    elif verb == "all":
        found = hf_stitch.compare_all(named, images, layers=[LAYER], checkpoint_dir=tmp_path / "job", **quiet)
        assert found.between("x", "y").recipe["a"]["name"] == "first/vit"
    elif verb == "all_weights":
        found = hf_stitch.compare_all(named, metrics=["weight_cosine"])
    elif verb == "grid":
        found = hf_stitch.stitch_grid(
            *folders[:2],
            images,
            layers_a=[LAYER],
            layers_b=[LAYER],
            checkpoint_dir=tmp_path / "job",
            resamples=5,
            **quiet,
        )
    elif verb == "bench":
        found = bench(named, images, layers=[LAYER], probe_epochs=1, **quiet)
    else:
        made = hf_stitch.stitch(*folders[:2], images[:60], source_layer=LAYER, target_layer=LAYER, **quiet)
        found = hf_stitch.evaluate(made, images[60:], **quiet) if verb == "evaluation" else None
        if found is None:
            found = hf_stitch.audit(made, images[60:], detectors=["knn"], **quiet)
        made.save_pretrained(tmp_path / "model")
    assert SECRET.encode() not in everything(tmp_path, found)


def test_activations_anchors_and_entries_of_caches_hold_no_path(
    folders: list[str], images: Any, tmp_path: Path
) -> None:
    adapter = hf_stitch.load(folders[0])
    cached = LayerCache(Cache(tmp_path / "cache"), adapter, Samples.of(images), "mean", "of 8")
    cached.write({LAYER: Recorded(torch.ones(3, 2), None, None)})
    (entry,) = Cache(tmp_path / "cache").entries()
    assert entry.about["network"].startswith("vit ")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_trained_maps_and_their_checkpoints_hold_no_path(folders: list[str], images: Any, tmp_path: Path) -> None:
    trained = TaskLoss(max_steps=2, batch_size=16, initial="ridge")
    made = hf_stitch.stitch(
        *folders[:2], images[:60], source_layer=LAYER, target_layer=LAYER, matcher=trained, progress=False
    )
    trained.fit(made, images[:60], checkpoint_dir=tmp_path / "job", progress=False)
    made.save_pretrained(tmp_path / "model")
    made.stitcher.save_pretrained(tmp_path / "stitcher")
    assert (tmp_path / "job" / "job.json").is_file()
    assert SECRET.encode() not in everything(tmp_path, made.evaluation)


def test_relative_models_and_anchors_hold_no_path(folders: list[str], images: Any, tmp_path: Path) -> None:
    anchors = Samples.of(images[:20])
    made = hf_stitch.relative_model(
        folders[0], anchors, layer=LAYER, num_labels=5, task="image-classification", progress=False
    )
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
