"""Every field of a record is checked; errors name the file, the field, what was expected and what came."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hf_stitch
from hf_stitch import StitchedModel
from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.artefacts.record import check_counts, read_model, read_record, read_stitcher
from hf_stitch.representation import RepresentationSpec

from records import rewrite  # isort: skip
from tiny_networks import LAYERS, network  # isort: skip


@pytest.fixture(scope="module")
def records(texts: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of a stitched model of a BERT and of its stitcher, and the folder of the model."""
    folder = tmp_path_factory.mktemp("schema")
    made = hf_stitch.stitch(
        network("bert"), network("bert", 1), texts, source_layer=LAYERS["bert"], target_layer=LAYERS["bert"],
        progress=False,
    )  # fmt: skip
    made.save_pretrained(folder / "model")
    made.stitcher.save_pretrained(folder / "stitcher")
    files = {"model": folder / "model" / "config.json", "stitcher": folder / "stitcher" / "stitcher.json"}
    return {name: read_record(path) for name, path in files.items()} | {"folder": folder / "model"}


READ: dict[str, Callable[..., dict[str, Any]]] = {"model": read_model, "stitcher": read_stitcher}


@pytest.mark.parametrize("kind", READ)
def test_a_saved_record_is_read_unchanged(kind: str, records: dict[str, Any]) -> None:
    """A field that a class gains must be added to the schema, or this warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert READ[kind](records[kind], "a file") == records[kind]


def test_a_record_has_all_fields_of_its_classes(records: dict[str, Any]) -> None:
    half = records["model"]["source"]
    for kind, record in ((Cut, half["cut"]), (CutPlan, half["plan"]), (Interface, half["interface"])):
        assert {each.name for each in dataclasses.fields(kind)} == record.keys()
    assert {each.name for each in dataclasses.fields(RepresentationSpec)} == half["cut"]["spec"].keys()


WRONG: list[tuple[str, str, Any, str]] = [
    ("model", "task", 5, "a text, got 5"),
    ("model", "source", [], "an object"),
    ("model", "source.blueprint", "x", "an object"),
    ("model", "source.blueprint.library", None, "a text, got None"),
    ("model", "source.cut.layer", 7, "a text, got 7"),
    ("model", "source.cut.path", 0, "a list, got 0"),
    ("model", "source.cut.path", [None], "an integer or a text, got None"),
    ("model", "source.cut.path", [3], "the way to a tensor of 3 axes in plan.entry"),
    ("model", "source.cut.path", ["x"], "the way to a tensor of 3 axes in plan.entry"),
    ("model", "source.cut.spec.layout", "dbn", "one of 'bd', 'bnd', 'bchw', 'bhwc', got 'dbn'"),
    ("model", "source.cut.spec.width", 0, "an integer >= 1, got 0"),
    ("model", "source.cut.spec.width", True, "an integer >= 1, got True"),
    ("model", "source.cut.spec.width", 1.5, "an integer >= 1, got 1.5"),
    ("model", "source.cut.spec.grid", [2], "a list of 2, got [2]"),
    ("model", "source.cut.spec.prefix_tokens", -1, "an integer >= 0, got -1"),
    ("model", "source.cut.dtype", "__loader__", "a dtype of torch, got '__loader__'"),
    ("model", "source.cut.cost", float("nan"), "a number >= 0 and <= 1, got nan"),
    ("model", "source.cut.axes", [0, 0, 1], "an order of the 3 axes of bnd, got [0, 0, 1]"),
    ("model", "source.cut.padding", "none", "one of 'masked', 'behind', 'absent', 'unknown', got 'none'"),
    ("model", "target.plan.kind", "x", "one of 'stubs', 'full', got 'x'"),
    ("model", "target.plan.stubs", None, "an object, got None"),
    ("model", "target.plan.entry", {"tensor": {}}, "an object with dims and dtype, got []"),
    ("model", "target.plan.entry", {"x": 1}, "an object with one of tensor, argument, value, tuple, list, dict"),
    ("model", "target.plan.entry", {"tuple": [{"tensor": {"dims": [[1, 0, 0]], "dtype": "cut"}}]}, "a list of 4"),
    ("model", "target.plan.entry", {"tensor": {"dims": [], "dtype": "x"}}, "a dtype of torch, got 'x'"),
    ("model", "target.plan.materialise", "yes", "True or False, got 'yes'"),
    ("model", "source.interface.content", [], "a list of one text or more, got []"),
    ("model", "source.interface.modality", "sound", "one of 'image', 'text', 'tensor'"),
    ("model", "source.interface.special_ids", ["x"], "an integer, got 'x'"),
    ("model", "source.interface.max_tokens", 0, "an integer >= 1, got 0"),
    ("model", "source.reference.id", 5, "a text, got 5"),
    ("model", "source.reference.kwargs", [], "an object, got []"),
    ("model", "stitch.pooling", "max", "one of 'none', 'flatten', 'mean', 'cls', 'last'"),
    ("model", "stitch.body", None, "an object, got None"),
    ("model", "stitch.body.in_features", -1, "an integer >= 1"),
    ("model", "recipe", "x", "an object, got 'x'"),
    ("model", "recipe.matcher", "x", "an object, got 'x'"),
    ("model", "recipe.matcher.name", [], "a text, got []"),
    ("model", "recipe.versions", [1], "an object, got [1]"),
    ("model", "recipe.changed_since_fit", 5, "a list, got 5"),
    ("model", "scores", [1], "an object, got [1]"),
    ("model", "scores", {"scores": {}}, "an object with task and n and data, got ['scores']"),
    ("model", "scores.n", "x", "an integer >= 0, got 'x'"),
    ("model", "scores.fitted_share", "x", "a number, got 'x'"),
    ("model", "scores.scores", [], "an object, got []"),
    ("model", "scores.scores.stitched", 5, "an object, got 5"),
    ("model", "scores.scores.stitched.accuracy", 0.5, "an object, got 0.5"),
    ("model", "scores.scores.stitched.accuracy", {"value": 1}, "an object with low and high, got ['value']"),
    ("model", "scores.scores.stitched.accuracy.low", [], "a number, got []"),
    ("model", "scores.scores.stitched.accuracy.value", 10**400, "a number, got 1"),
    ("model", "requires", [{}], "an object with registry and name and distribution and version"),
    ("model", "num_hidden_layers", "x", "an integer >= 0, got 'x'"),
    ("model", "id2label", {"0": 5}, "a text, got 5"),
    ("model", "manifest", [], "an object, got []"),
    ("model", "manifest", {"x": 5}, "a text, got 5"),
    ("stitcher", "source", None, "an object, got None"),
    ("stitcher", "source.layer", 1, "a text, got 1"),
    ("stitcher", "target.reference.library", 1, "a text, got 1"),
    ("stitcher", "stitch.source.width", "8", "an integer >= 1, got '8'"),
    ("stitcher", "recipe", 1, "an object, got 1"),
    ("stitcher", "manifest", None, "an object, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value", "message"), WRONG)
def test_a_wrong_field_is_named(kind: str, field: str, value: Any, message: str, records: dict[str, Any]) -> None:
    record = copy.deepcopy(records[kind])
    *way, last = field.split(".")
    holder = record
    for key in way:
        holder = holder[key]
    holder[last] = value
    with pytest.raises(ValueError, match=rf"a file is damaged: {field}.* must be .*{re.escape(message)}"):
        READ[kind](record, "a file")


def test_fields_must_fit_together(records: dict[str, Any]) -> None:
    other = copy.deepcopy(records["model"])
    other["source"]["interface"]["modality"] = "image"
    with pytest.raises(ValueError, match=r"source\.interface\.shapes must be an object with input_ids, got {}"):
        read_model(other, "a file")
    other = copy.deepcopy(records["model"])
    other["stitch"]["target"]["width"] = 33
    with pytest.raises(ValueError, match=r"stitch\.target must be the spec of the cut of the target, .*, got .*33"):
        read_model(other, "a file")


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("key", ["source", "stitch"])
def test_a_missing_field_is_named(kind: str, key: str, records: dict[str, Any]) -> None:
    """A config without parts is that of a model not built yet."""
    record = {name: value for name, value in records[kind].items() if name != key}
    if kind == "model":
        record["target"] = {"cut": record["target"]["cut"]}
    expected = "blueprint and plan and interface and reference" if kind == "model" else key
    with pytest.raises(ValueError, match=f"must be an object with {expected}"):
        READ[kind](record, "a file")


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(("number", "advice"), [(None, "save it with hf-stitch 0.2"), (4, "update hf-stitch")])
def test_a_record_of_another_format_is_refused(
    kind: str, number: int | None, advice: str, records: dict[str, Any]
) -> None:
    record = {name: value for name, value in records[kind].items() if name != "format_version"}
    if number is not None:
        record["format_version"] = number
    with pytest.raises(ValueError, match=f"a file has format {number or 1}, and this version reads 2 to 3; .*{advice}"):
        READ[kind](record, "a file")


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("num_hidden_layers", 1001),
        ("num_labels", 2**17 + 1),
        ("depths", [2, 10**9]),
        ("depths", [1000] * 1000),
        ("depths", [[1000] * 100] * 10),
        ("stages", [{"num_layers": 1000}] * 1000),
    ],
)
def test_more_layers_or_classes_than_any_network_has_are_refused(
    key: str, number: Any, records: dict[str, Any]
) -> None:
    record = copy.deepcopy(records["model"])
    record["target"]["blueprint"]["config"][key] = number
    with pytest.raises(ValueError, match=r"a file is damaged: .* is .*, and no network has more than 1"):
        read_model(record, "a file")


def test_numbers_of_layers_in_a_list_are_no_counts() -> None:
    check_counts({side: {"text_config": {"mlp_only_layers": [*range(100)]}} for side in ("source", "target")}, "a file")


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("key", ["requires", "recipe"])
def test_a_list_that_no_record_has_is_refused_at_once(kind: str, key: str, records: dict[str, Any]) -> None:
    record = {**records[kind], key: [{}] * 10**7}
    start = time.process_time()
    with pytest.raises(ValueError, match="a file is damaged: it has more values than any record"):
        READ[kind](record, "a file")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", READ)
def test_values_that_are_nested_deeper_than_any_are_refused(kind: str, records: dict[str, Any]) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="a file has values nested more than 100 deep"):
        READ[kind]({**records[kind], "recipe": deep}, "a file")


def test_unknown_fields_are_named_with_their_place(records: dict[str, Any]) -> None:
    record = copy.deepcopy(records["model"])
    record["source"]["cut"]["spec"]["new"] = 1
    with pytest.warns(UserWarning, match=r"source\.cut\.spec in a file has new, which this version does not know"):
        assert "new" not in read_model(record, "a file")["source"]["cut"]["spec"]


def test_names_of_many_classes_fit_into_a_record(tmp_path: Any) -> None:
    """ImageNet-21k, in both networks and in the model."""
    labels = {str(place): f"a name of a class, {place}" for place in range(21_843)}
    config = {"id2label": labels, "label2id": {name: int(place) for place, name in labels.items()}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"source": config, "target": config, **config}))
    check_counts(read_record(path), "the record")


def test_an_error_in_the_first_forward_names_the_half(records: dict[str, Any], tmp_path: Any, texts: Any) -> None:
    folder = shutil.copytree(records["folder"], tmp_path / "model")

    def change(record: dict[str, Any]) -> None:
        record["source"]["interface"]["options"] = {"no_such_argument": 1}
        record["target"]["plan"]["stubs"] = {name: {"argument": [99]} for name in record["target"]["plan"]["stubs"]}

    rewrite(folder / "config.json", change)
    model = StitchedModel.from_pretrained(folder)
    words = model.preprocess([texts[0]["text"]])
    with pytest.raises(HalfError, match=r"the part of BertForSequenceClassification .* cannot run on these inputs"):
        model(**words)


def test_memory_that_runs_out_is_no_error_of_a_record(records: dict[str, Any], texts: Any) -> None:
    """Trainer halves the batch when it sees this error."""
    model = StitchedModel.from_pretrained(records["folder"])
    words = model.preprocess([texts[0]["text"]])

    def run_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for half in (model.source, model.target):
        original, half.model.forward = half.model.forward, run_out
        with pytest.raises(torch.OutOfMemoryError):
            model(**words)
        half.model.forward = original


def test_a_file_of_weights_that_is_no_safetensors_is_named(records: dict[str, Any], tmp_path: Any) -> None:
    folder = shutil.copytree(records["folder"], tmp_path / "model")
    for data in (b"", b"x" * 100, (2**60).to_bytes(8, "little")):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
            StitchedModel.from_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        StitchedModel.from_pretrained(folder)
