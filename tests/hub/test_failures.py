"""Failed uploads and downloads: nothing is left incomplete, and the error contains a remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, errors
from parents import files_of, serve
from server import Hub, turned_to_a_hub
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.analysis.evaluation import Example
from hf_stitch.cli import app

from tiny_networks import LAYERS, network, stitched  # isort: skip


@pytest.fixture(scope="module")
def evaluated(images: Any) -> StitchedModel:
    return stitched(network("vit"), network("vit", 1), images, (LAYERS["vit"],) * 2)


@pytest.fixture
def model(evaluated: StitchedModel) -> Iterator[StitchedModel]:
    """The same without its evaluation, of which each push would draw pictures."""
    evaluation, evaluated.evaluation = evaluated.evaluation, None
    yield evaluated
    evaluated.evaluation = evaluation


ENDS = {"source": "alice/vit", "target": "alice/vit-2"}


@pytest.fixture(scope="module")
def fitted(images: Any, tmp_path_factory: pytest.TempPathFactory) -> Stitcher:
    with turned_to_a_hub(tmp_path_factory.mktemp("fitted")) as hub:
        serve(hub, *ENDS.values())
        a, b = map(hf_stitch.load, ENDS.values())
        found = stitched(a, b, images, (LAYERS["vit"],) * 2).stitcher
    found.evaluation = None
    return found


@pytest.fixture
def stitcher(hub: Hub, fitted: Stitcher) -> Stitcher:
    """A stitcher whose networks are on the Hub of the test."""
    serve(hub, *ENDS.values())
    found = copy.copy(fitted)
    for side, id in ENDS.items():
        setattr(found, side, replace(getattr(fitted, side), revision=hub.models[id].refs["main"]))
    return found


def same(stitcher: Stitcher, again: Stitcher) -> bool:
    return torch.equal(stitcher.stitch.body.weight, again.stitch.body.weight)


# -- pushing -----------------------------------------------------------------------------------------------------------
def test_a_push_is_one_commit(hub: Hub, evaluated: StitchedModel) -> None:
    model = evaluated
    commit = model.stitcher.push_to_hub("alice/new", private=True, commit_message="Hello", tags=["mine"])
    assert hub.models["alice/new"].private
    assert len(hub.models["alice/new"].commits) == 2  # the empty model, and the push
    assert hub.models["alice/new"].refs["main"] == commit.oid
    own, shown = ["stitch.safetensors", "stitcher.json"], ["report.html", "scores.png", "stitch.png"]
    assert set(hub.files("alice/new")) == {".gitattributes", "README.md", *own, *shown}
    assert b"- mine\n" in hub.files("alice/new")["README.md"]
    assert same(model.stitcher, Stitcher.from_pretrained("alice/new", revision=commit.oid))


def test_the_card_shows_pictures_and_links_the_page_of_the_evaluation(
    hub: Hub, evaluated: StitchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = (Example("private text", 1.0, "x", "y", None, "private text"),)
    monkeypatch.setattr(evaluated, "evaluation", replace(evaluated.evaluation, examples=private))
    evaluated.push_to_hub("alice/new")
    card = hub.files("alice/new")["README.md"].decode()
    assert "![Both networks as strips" in card and "](stitch.png)" in card and "](scores.png)" in card
    assert "[report.html](report.html)" in card
    page = hub.files("alice/new")["report.html"].decode()
    assert "private text" not in page and "parameters (" in page
    assert hub.files("alice/new")["stitch.png"].startswith(b"\x89PNG")
    StitchedModel.from_pretrained("alice/new").push_to_hub("alice/new")  # it has not been evaluated
    assert not {"report.html", "scores.png", "stitch.png"} & set(hub.files("alice/new"))
    assert "report.html" not in hub.files("alice/new")["README.md"].decode()


def test_a_push_to_a_branch_and_as_a_pull_request(hub: Hub, model: StitchedModel) -> None:
    model.stitcher.push_to_hub("alice/new", revision="trial")
    assert "stitcher.json" not in hub.files("alice/new")
    assert same(model.stitcher, Stitcher.from_pretrained("alice/new", revision="trial"))
    commit = model.stitcher.push_to_hub("alice/new", create_pr=True)
    assert commit.pr_url is not None
    assert "stitcher.json" not in hub.files("alice/new")
    assert same(model.stitcher, Stitcher.from_pretrained("alice/new", revision="refs/pr/1"))


def test_saved_and_pushed_files_are_equal_without_old_shards(hub: Hub, model: StitchedModel, tmp_path: Path) -> None:
    how = {"state_dict": {name: value * 2 for name, value in model.state_dict().items()}, "max_shard_size": "20KB"}
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="alice/new", **how)
    there = hub.files("alice/new")
    for path in tmp_path.iterdir():
        assert path.name == "README.md" or there[path.name] == path.read_bytes(), path.name
    assert any("-of-" in name for name in there)
    model.save_pretrained("unused", is_main_process=False)
    hub.put("alice/new", {**hub.files("alice/new"), "models/model.safetensors": b"of another artefact"})
    model.push_to_hub("alice/new")
    kept = sorted(n for n in hub.files("alice/new") if n.startswith("model"))
    assert kept == ["model.safetensors", "modeling_hf_stitch.py", "models/model.safetensors"]


@pytest.mark.parametrize(
    ("word", "how", "error", "message"),
    [
        ("PUT /upload", {"cut": 100}, ConnectionError, "the connection broke.*try again, nothing was changed"),
        ("/commit/", {"cut": 10}, ConnectionError, "the connection broke"),
        ("/commit/", {"status": 412}, OSError, "it changed during the upload.*push again"),
        ("/commit/", {"status": 403}, PermissionError, "the token does not permit this.*log in .* or pass token="),
        ("/preupload/", {"status": 503}, ConnectionError, "the Hub returned status 503.*try again later"),
    ],
)
def test_a_push_that_fails_changes_nothing(
    word: str, how: Any, error: type[Exception], message: str, hub: Hub, model: StitchedModel
) -> None:
    before = model.stitcher.push_to_hub("alice/new").oid
    other = model.stitch.body.weight.clone()
    with torch.no_grad():
        model.stitch.body.weight += 1
    try:
        hub.fail(word, **how)
        with pytest.raises(error, match=f"(?s)alice/new could not be uploaded: .*{message}"):
            model.stitcher.push_to_hub("alice/new")
        assert hub.models["alice/new"].refs["main"] == before
        hub.heal()
        hub.fail("PUT /upload", cut=100, times=1)  # which is tried again
        model.stitcher.push_to_hub("alice/new")
        assert same(model.stitcher, Stitcher.from_pretrained("alice/new"))
    finally:
        with torch.no_grad():
            model.stitch.body.weight.copy_(other)


def test_a_push_without_permission_or_overtaken_by_another_is_refused(
    hub: Hub, model: StitchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.stitcher.push_to_hub("alice/new")
    own, theirs = HfApi.create_commit, {**hub.files("alice/new"), "README.md": b"by another"}

    def overtaken(*given: Any, **options: Any) -> Any:
        hub.put("alice/new", theirs)
        return own(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", overtaken)
        with pytest.raises(OSError, match=r"alice/new could not be uploaded: it changed during the upload"):
            model.stitcher.push_to_hub("alice/new")
    assert hub.files("alice/new") == theirs
    with pytest.raises(PermissionError, match="could not be uploaded: the token does not permit this"):
        model.stitcher.push_to_hub("alice/new", token="bob-token")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="log in"):
        model.stitcher.push_to_hub("alice/newer")


# -- pulling -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "how", "error", "message"),
    [
        ("/revision/", {"status": 500}, ConnectionError, "the Hub returned status 500 .*; try again later"),
        ("/cdn/", {"cut": 100}, OSError, "could not be downloaded"),
        ("/cdn/", {"flip": True}, ValueError, r"was changed since \w+\.json was saved, or is damaged"),
    ],
)
def test_a_failed_pull_is_reported(
    word: str, how: Any, error: type[Exception], message: str, hub: Hub, model: StitchedModel
) -> None:
    model.stitcher.push_to_hub("alice/new")
    hub.fail(word, **how)
    with pytest.raises(error, match=message):
        Stitcher.from_pretrained("alice/new", revision="main")
    hub.heal()
    assert same(model.stitcher, Stitcher.from_pretrained("alice/new", force_download=True))


def test_missing_and_private_ids_are_reported(hub: Hub, model: StitchedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.stitcher.push_to_hub("alice/new")
    with pytest.raises(FileNotFoundError, match="alice/none could not be downloaded: the model does not exist on"):
        Stitcher.from_pretrained("alice/none")
    with pytest.raises(FileNotFoundError, match="alice/new@old could not be downloaded: the revision does not exist"):
        Stitcher.from_pretrained("alice/new", revision="old")
    with pytest.raises(FileNotFoundError, match="it is neither a local folder"):
        Stitcher.from_pretrained("./no/such/folder")
    with pytest.raises(FileNotFoundError, match=r"a stitcher; load it with hf_stitch.Stitcher.from_pretrained"):
        StitchedModel.from_pretrained("alice/new")
    model.push_to_hub("alice/whole")
    with pytest.raises(FileNotFoundError, match=r"load it with hf_stitch.StitchedModel.from_pretrained"):
        Stitcher.from_pretrained("alice/whole")
    model.stitcher.push_to_hub("alice/mine", private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(FileNotFoundError, match=r"or it is private and the token does not give access.*pass token="):
        Stitcher.from_pretrained("alice/mine")
    assert same(model.stitcher, Stitcher.from_pretrained("alice/mine", token="alice-token"))


def test_without_network_the_cache_is_used(hub: Hub, stitcher: Stitcher, tmp_path: Path) -> None:
    stitcher.push_to_hub("alice/new")
    Stitcher.from_pretrained("alice/new").attach()
    with pytest.raises(FileNotFoundError, match="alice/new could not be downloaded: it is not in the cache"):
        Stitcher.from_pretrained("alice/new", local_files_only=True, cache_dir=tmp_path / "cold")
    hub.fail("", status=503)
    assert same(stitcher, Stitcher.from_pretrained("alice/new"))
    Stitcher.from_pretrained("alice/new", local_files_only=True).attach(local_files_only=True)
    with pytest.raises(OSError, match=r"the source alice/vit@.* could not be loaded"):
        stitcher.attach(cache_dir=tmp_path / "cold")


def test_info_downloads_only_a_part(hub: Hub, model: StitchedModel) -> None:
    model.stitcher.push_to_hub("alice/link")
    model.push_to_hub("alice/whole")
    for id, load in (("alice/link", Stitcher.from_pretrained), ("alice/whole", StitchedModel.from_pretrained)):
        assert CliRunner().invoke(app, ["layers", id]).exit_code == 0
        if hasattr(errors, "IncompleteSnapshotError"):
            missing = f"{id} could not be downloaded: .*incomplete.*connect"
        else:  # before huggingface_hub 1.22, nobody knows which files a partly downloaded model has
            missing = r"does not contain (stitch|model)\.safetensors"
        with pytest.raises(FileNotFoundError, match=missing):
            load(id, local_files_only=True)


# -- networks ----------------------------------------------------------------------------------------------------------
def test_a_network_with_other_weights_is_rejected_with_its_current_revision(hub: Hub, stitcher: Stitcher) -> None:
    now = hub.put("alice/vit", files_of("vit", 7))
    assert stitcher.attach().parents[0].reference.revision == stitcher.source.revision  # that of the record
    with pytest.raises(ValueError, match=f"(?s)the source .* has other weights .*it is now at revision {now}"):
        stitcher.attach(source="alice/vit")


def test_a_deleted_commit_is_reported_and_the_same_weights_at_another_revision_are_accepted(
    hub: Hub, stitcher: Stitcher, tmp_path: Path
) -> None:
    files = files_of("vit", 0)
    hub.models["alice/vit"].commits.clear()
    hub.put("alice/vit", {**files, "NOTES.md": b"history rewritten"})
    with pytest.raises(OSError, match=r"(?s)the source .* could not be loaded.*attach\(source=…\)"):
        stitcher.attach(cache_dir=tmp_path / "cold")
    stitcher.attach(source="alice/vit", cache_dir=tmp_path / "cold")


def test_a_model_checks_its_networks(hub: Hub, stitcher: Stitcher) -> None:
    model = stitcher.attach()
    assert "changed_since_fit" not in model.config.recipe
    model.parents = None
    assert model.parent("source").pinned.weights_hash == stitcher.source.weights_hash
    preprocessing = json.dumps({**json.loads(files_of("vit", 0)["preprocessor_config.json"]), "image_mean": [0.1] * 3})
    other = {**files_of("vit", 0), "preprocessor_config.json": preprocessing.encode()}
    model.config.source["reference"]["revision"] = hub.put("alice/vit", other)
    with pytest.raises(ValueError, match=r"the source .* image_mean"):
        model.parent("source")
    assert [*model.parent("source", allow_changed=("processor",)).processor.image_mean] == [0.1] * 3
    model.config.source["reference"]["revision"] = hub.put("alice/vit", files_of("vit", 7))
    with pytest.raises(ValueError, match=r"the source .* has other weights"):
        model.parent("source")
    with pytest.raises(OSError, match=r"the target .* could not be loaded"):
        model.parent("target", cache_dir="nowhere", local_files_only=True)


def test_weights_are_checked_before_a_cast_also_under_another_name(hub: Hub, stitcher: Stitcher, images: Any) -> None:
    live = hf_stitch.load("alice/vit")
    for model in (stitcher.attach(dtype="bfloat16"), stitcher.attach(source=live, dtype=torch.bfloat16)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert next(live.model.parameters()).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be"):
        stitcher.attach(dtype="bf16")
    hub.put("alice/moved", files_of("vit", 0))
    a = hf_stitch.load("alice/vit", dtype="bfloat16")
    assert stitched(a, a, images, (LAYERS["vit"],) * 2).stitcher.attach(source="alice/moved").dtype == torch.bfloat16
