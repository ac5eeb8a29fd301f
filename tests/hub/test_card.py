"""Model cards: metadata, text, and merging with text that a person added."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import CardData, ModelCard, RepoCard
from parents import serve
from server import Hub

import hf_stitch
from hf_stitch import ModelReference, StitchedModel, Stitcher
from hf_stitch.artefacts.card import BEGIN, END, card, merge_cards

from tiny_networks import LAYERS, build, network, stitched  # isort: skip

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def stitcher(images: Any) -> Stitcher:
    a, b = network("cnn"), network("vit", 1)
    made = stitched(a, b, images, (LAYERS["cnn"], LAYERS["vit"]), matcher="low_rank", rank=4).stitcher
    made.source = ModelReference("timm/cnn", "timm", revision=SHA, weights_hash=made.source.weights_hash)
    made.target = ModelReference("alice/vit", "transformers", revision=SHA, weights_hash=made.target.weights_hash)
    return made


@pytest.mark.parametrize(("whole", "relation"), [(False, "adapter"), (True, "merge")])
def test_the_metadata_describe_the_artefact(whole: bool, relation: str, stitcher: Stitcher) -> None:
    data = ModelCard(card(replace(stitcher.describe(), whole=whole), name="alice/link")).data
    assert data.library_name == "hf_stitch"
    assert data.pipeline_tag == "image-classification"
    assert data.base_model == ["timm/cnn", "alice/vit"]
    assert data["base_model_relation"] == relation
    assert {"hf_stitch", "model-stitching", "low_rank"} <= set(data.tags)
    measured = {(r.metric_type, r.metric_name): r.metric_value for r in data.eval_results}
    scores = stitcher.scores["scores"]
    assert measured["accuracy", "accuracy"] == pytest.approx(scores["stitched"]["accuracy"]["value"], abs=1e-6)
    for who in ("identity", "mean_only", "target", "chance"):
        value = scores[who]["accuracy"]["value"]
        assert measured["accuracy", f"accuracy of the baseline: {who}"] == pytest.approx(value, abs=1e-6)
    assert {r.task_type for r in data.eval_results} == {"image-classification"}


def test_the_text_contains_the_recipe(stitcher: Stitcher) -> None:
    text = card(stitcher.describe(), name="alice/link")
    for word in (
        f"https://huggingface.co/timm/cnn/tree/{SHA}", "layer2.0", "vit.layers.1", "`low_rank`", "rank = 4",
        "64 samples", stitcher.recipe["data"], stitcher.source.weights_hash, "20% of the samples", "| seed | 0 |",
        "torch 2.",
        "| **stitched** |", "| chance |", "arxiv.org/abs/2110.14633",
        'hf_stitch.Stitcher.from_pretrained("alice/link").attach()',
    ):  # fmt: skip
        assert word in text, word


@pytest.mark.parametrize(
    ("figure", "task", "low", "high", "identity", "warned"),
    [
        ("accuracy", "image-classification", 0.6, 0.8, 0.5, False),
        ("accuracy", "image-classification", 0.4, 0.8, 0.5, True),
        ("perplexity", "text-generation", 4.0, 6.0, 7.0, False),
        ("perplexity", "text-generation", 4.0, 8.0, 7.0, True),
    ],
)
def test_the_card_warns_if_a_baseline_is_not_exceeded(
    figure: str, task: str, low: float, high: float, identity: float, warned: bool, stitcher: Stitcher
) -> None:
    rows = {"stitched": {figure: {"value": (low + high) / 2, "low": low, "high": high}}}
    rows["identity"] = rows["target"] = {figure: {"value": identity, "low": identity, "high": identity}}
    text = card(replace(stitcher.describe(), scores={**stitcher.scores, "scores": rows, "task": task}))
    assert ("**It is not shown to be better than: no map.**" in text) is warned


def test_audits_undefined_figures_and_the_text_of_others_in_a_card(stitcher: Stitcher, tmp_path: Path) -> None:
    described = stitcher.describe()
    assert "Audit" not in card(described)
    for audit in ("Nothing found.", {"verdict": "Nothing found.", "seed": 0}):
        assert "**Audit**: Nothing found." in card(replace(described, recipe={**stitcher.recipe, "audit": audit}))
    scores = json.loads(json.dumps(stitcher.scores))
    scores["scores"]["identity"]["relative_accuracy"] = {"value": "nan", "low": "nan", "high": "nan"}
    text = card(replace(described, scores=scores))
    assert "nan" not in text and " – |" in text
    text = card(described, name="alice/link", present="# Mine\n\nWords.\n")
    assert re.search(r"# Mine\n\nWords\.\n\n<!-- hf-stitch", text)
    assert ModelCard(text).data.library_name == "hf_stitch"
    assert card(described, name="alice/link", present=text) == text
    pushed = metadata(card(described, name="alice/link", present=card(described)))
    assert [entry["name"] for entry in pushed["model-index"]] == ["link"]  # a push after saving adds no second one
    with pytest.raises(ValueError, match="the metadata of the existing card cannot be read"):
        card(described, present="---\n- a\n- list\n---\n")
    stitcher.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(path.read_text() + "\nMine.\n")
    Stitcher.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert path.read_text().endswith("\nMine.\n") and path.read_text().count(BEGIN) == 1


HARM = f"x\x1b[2J\x9b\u202e\ud800` | <img src=x onerror=owned()> [a](b) {END}\n# Title"


def places(value: Any, within: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], bool]]:
    """Return the places of all texts in nested JSON values, and of all keys (True)."""
    if isinstance(value, dict):
        keys = [((*within, key), True) for key in value]
        return keys + [found for key, item in value.items() for found in places(item, (*within, key))]
    if isinstance(value, list):
        return [found for place, item in enumerate(value) for found in places(item, (*within, place))]
    return [(within, False)] if isinstance(value, str) else []


@pytest.mark.filterwarnings("ignore")  # they contain the text, half of a character too
@pytest.mark.parametrize("whole", [False, True])
def test_no_text_of_a_record_is_markup_in_the_card(whole: bool, stitcher: Stitcher) -> None:
    described = replace(stitcher.describe(), whole=whole)
    audit = {"verdict": "Nothing found.", "seed": 0}
    recipe = {**described.recipe, "audit": audit, "test_data": "x", "paired_data": "y"}
    ends = {side: replace(getattr(described, side), summary="Net, 2 layers") for side in ("source", "target")}
    described = replace(described, **ends, recipe=recipe)
    tried = 0
    for name in ("source_layer", "target_layer", "stitch", "task", "recipe", "scores", "source", "target"):
        value = getattr(described, name)
        record = json.loads(json.dumps(value.to_dict() if isinstance(value, ModelReference) else value))
        for place, is_key in places({"": record}):
            changed = {"": json.loads(json.dumps(record))}
            inner: Any = changed
            for key in place[:-1]:
                inner = inner[key]
            item = inner.pop(place[-1]) if is_key else inner[place[-1]]
            inner[f"{place[-1]}{HARM}" if is_key else place[-1]] = item if is_key else item + HARM
            try:
                of = ModelReference.from_dict if isinstance(value, ModelReference) else lambda record: record
                text = card(replace(described, **{name: of(changed[""])}))
            except (KeyError, TypeError, ValueError):  # a name on which the card relies; records are checked before
                continue
            tried += 1
            body = text.split("---\n", 2)[2]
            assert "<img" not in text and text.count(END) == 1 and "\n# Title" not in text, place
            assert "[a]" not in body and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", text), place
            text.encode()
    assert tried > 60


def test_a_second_push_keeps_added_text(hub: Hub, images: Any) -> None:
    model = stitched(network("vit"), network("vit", 1), images, (LAYERS["vit"],) * 2)
    model.evaluation = None  # each push would draw its pictures
    for push in (model.stitcher.push_to_hub, model.push_to_hub):
        push("alice/link")
        files = dict(hub.files("alice/link"))
        text = files["README.md"].decode()
        text = text.replace("tags:\n", "license: mit\ndatasets:\n- mnist\ntags:\n- mine\n")
        text = text.replace("# link\n", "# A better title\n\nMy \\1 words.\n").replace("| seed | 0 |", "| seed | 99 |")
        hub.put("alice/link", {**files, "README.md": (text + "\n\nMy last words.\n").encode()})
        push("alice/link")
        text = hub.files("alice/link")["README.md"].decode()
        assert "My \\1 words." in text.split(BEGIN)[0]
        assert text.rstrip().endswith("My last words.")
        assert "| seed | 0 |" in text and "| seed | 99 |" not in text
        assert text.count(BEGIN) == text.count(END) == text.count("## Use") == 1
        data = ModelCard(text).data
        assert data.license == "mit" and data.datasets == ["mnist"]
        assert {"mine", "hf_stitch"} <= set(data.tags)
        before = hub.models["alice/link"].refs["main"]
        assert push("alice/link").oid == before  # without changes there is no commit
        del hub.models["alice/link"]


def metadata(text: str) -> Any:
    return RepoCard(text).data.to_dict()


def test_generated_metadata_of_a_past_push_are_replaced(stitcher: Stitcher, caplog: pytest.LogCaptureFixture) -> None:
    """Of tags and results, those that a person added are kept, and all metadata of other keys."""
    first = card(stitcher.describe(), name="alice/link", tags=["mine"])
    theirs = {"name": "link", "results": [{"task": {"type": "x"}, "dataset": {"type": "y", "name": "Y"},
                                           "metrics": [{"type": "accuracy", "value": 0.5}]}]}  # fmt: skip
    head = {**metadata(first), "license": "mit"}
    head["model-index"].append(theirs)
    first = f"---\n{CardData(**head).to_yaml()}\n---\n{RepoCard(first).text}"
    parts = stitcher.stitch, ModelReference(None, "torch"), "a", ModelReference(None, "torch"), "b"
    bare = Stitcher(*parts, recipe={"matcher": {"name": "ridge"}})
    found = metadata(card(replace(bare.describe(), whole=True), name="alice/link", present=first))
    assert not {"pipeline_tag", "base_model", "base_model_relation"} & found.keys()
    assert found["tags"] == ["mine", "hf_stitch", "model-stitching", "stitched-model", "ridge"]
    assert found["model-index"] == [theirs]
    assert found["license"] == "mit"
    again = metadata(card(stitcher.describe(), name="bob/renamed", present=first))
    assert [entry["name"] for entry in again["model-index"]] == ["renamed", "link"]
    assert not caplog.records


def test_the_local_text_is_kept_and_metadata_are_merged(stitcher: Stitcher) -> None:
    plain = card(stitcher.describe())
    there = plain.replace("# Stitcher", "# Link").replace("tags:\n", "license: mit\ntags:\n- theirs\n") + "\nTheirs.\n"
    here = plain.replace("tags:\n", "language: de\ntags:\n- ours\n")
    assert merge_cards(there, None) == merge_cards(None, there) == there
    assert merge_cards(None, None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = merge_cards(there, here)
        assert kept is not None and kept.endswith("\nTheirs.\n")
        assert metadata(kept) == {"license": "mit", "language": "de", "tags": ["theirs", "ours"]}
        assert str(merge_cards(plain, here + "\nOurs.\n")).endswith("\nOurs.\n")
    with pytest.warns(UserWarning, match="the local card replaces text that was added"):
        assert str(merge_cards(there, here + "\nOurs.\n")).endswith("\nOurs.\n")


@pytest.mark.parametrize(
    ("theirs", "own", "whole", "warned"),
    [
        ("cc-by-nc-4.0", "mit", True, "does not allow commercial use, but the licence of this model, mit"),
        ("cc-by-nc-4.0", None, True, ""),
        ("cc-by-nc-4.0", "mit", False, ""),
        ("cc-by-nd-4.0", None, True, "cc-by-nd-4.0, does not allow derivatives, but this model contains a part"),
        ("agpl-3.0", "mit", True, "agpl-3.0, requires the same licence, but this model has mit"),
        ("apache-2.0", "mit", True, ""),
    ],
)
def test_the_card_warns_of_licences(theirs: str, own: str | None, whole: bool, warned: str, stitcher: Stitcher) -> None:
    described = replace(stitcher.describe(), whole=whole, target=replace(stitcher.target, license=theirs))
    present = None if own is None else f"---\nlicense: {own}\n---\n# Mine\n"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = card(described, present=present)
    assert f"| target licence | `{theirs}` |" in text and "source licence" not in text
    assert [warned in str(each.message) for each in told] == [True] * bool(warned)
    assert (f"**The licence of the target, {theirs}" in text) is bool(warned)


def test_licences_come_from_the_cards_of_both_networks(hub: Hub, images: Any, tmp_path: Path) -> None:
    build("vit", 1).save_pretrained(tmp_path / "parent")
    (tmp_path / "parent" / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# Parent\n")
    serve(hub, "alice/vit")
    hub.put("alice/vit", {**hub.files("alice/vit"), "README.md": b"---\nlicense: apache-2.0\n---\n# On the Hub\n"})
    a, b = hf_stitch.load("alice/vit"), hf_stitch.load(str(tmp_path / "parent"))
    model = stitched(a, b, images, (LAYERS["vit"],) * 2)
    model.save_pretrained(tmp_path / "model")  # asks nobody
    saved = (tmp_path / "model" / "README.md").read_text()
    assert "| target licence | `cc-by-nc-4.0` |" in saved and "source licence" not in saved
    model.push_to_hub("alice/link")
    shown = hub.files("alice/link")["README.md"].decode()
    assert "| source licence | `apache-2.0` |" in shown and "| target licence | `cc-by-nc-4.0` |" in shown
    pulled = StitchedModel.from_pretrained("alice/link").describe()
    assert (pulled.source.license, pulled.target.license) == ("apache-2.0", "cc-by-nc-4.0")


def test_a_card_of_a_trainer_has_the_tags_that_tell_how_to_load(hub: Hub, images: Any, tmp_path: Path) -> None:
    """The Hub shows how to load a model with ``custom_code``; what we push next is our card, with code."""
    model = stitched(network("cnn"), network("vit", 1), images, (LAYERS["cnn"], LAYERS["vit"]))
    arguments = transformers.TrainingArguments(
        str(tmp_path), hub_model_id="alice/trained", hub_token="alice-token", report_to=[], use_cpu=True
    )
    transformers.Trainer(model, arguments).push_to_hub()
    files = hub.models["alice/trained"].commits[hub.models["alice/trained"].refs["main"]]
    assert {"hf_stitch", "custom_code"} <= set(RepoCard(files["README.md"].decode()).data.tags)
    assert "modeling_hf_stitch.py" in files
    model.push_to_hub("alice/trained")
    files = hub.models["alice/trained"].commits[hub.models["alice/trained"].refs["main"]]
    assert 'StitchedModel.from_pretrained("alice/trained")' in files["README.md"].decode()
    assert "trust_remote_code=True" in files["README.md"].decode()
    assert "## Training procedure" in files["README.md"].decode()
