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

from hf_stitch import StitchedModel
from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.artefacts.record import check_counts, read_model, read_record, read_stitcher
from hf_stitch.representation import RepresentationSpec

from records import rewrite  # isort: skip
from tiny_networks import LAYERS, network, stitched  # isort: skip


@pytest.fixture(scope="module")
def records(texts: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of a stitched model of a BERT and of its stitcher, and the folder of the model."""
    folder = tmp_path_factory.mktemp("schema")
    made = stitched(network("bert"), network("bert", 1), texts, (LAYERS["bert"],) * 2)
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
    ("model", "source.cut.path", 0, "a list, got 0"),
    ("model", "source.cut.path", [None], "an integer or a text, got None"),
    ("model", "source.cut.path", [3], "the way to a tensor of 3 axes in plan.entry"),
    ("model", "source.cut.spec.layout", "dbn", "one of 'bd', 'bnd', 'bchw', 'bhwc', got 'dbn'"),
    ("model", "source.cut.spec.width", 1.5, "an integer >= 1, got 1.5"),
    ("model", "source.cut.spec.grid", [2], "a list of 2, got [2]"),
    ("model", "source.cut.spec.prefix_tokens", -1, "an integer >= 0, got -1"),
    ("model", "source.cut.dtype", "__loader__", "a torch dtype, got '__loader__'"),
    ("model", "source.cut.cost", float("nan"), "a number >= 0 and <= 1, got nan"),
    ("model", "source.cut.axes", [0, 0, 1], "an order of the 3 axes of bnd, got [0, 0, 1]"),
    ("model", "source.cut.padding", "none", "one of 'masked', 'behind', 'absent', 'unknown', got 'none'"),
    ("model", "target.plan.kind", "x", "one of 'stubs', 'full', got 'x'"),
    ("model", "target.plan.entry", {"tensor": {}}, "an object with dims and dtype, got []"),
    ("model", "target.plan.entry", {"x": 1}, "an object with one of tensor, argument, value, tuple, list, dict"),
    ("model", "target.plan.entry", {"tuple": [{"tensor": {"dims": [[1, 0, 0]], "dtype": "cut"}}]}, "a list of 4"),
    ("model", "target.plan.materialise", "yes", "True or False, got 'yes'"),
    ("model", "source.interface.content", [], "a list of one text or more, got []"),
    ("model", "source.interface.modality", "sound", "one of 'image', 'text', 'tensor'"),
    ("model", "source.interface.special_ids", ["x"], "an integer, got 'x'"),
    ("model", "source.interface.prompt", {"input_ids": [[1, None]]}, "nested lists of numbers, got [[1, None]]"),
    ("model", "stitch.pooling", "max", "one of 'none', 'flatten', 'mean', 'cls', 'last'"),
    ("model", "recipe.changed_since_fit", 5, "a list, got 5"),
    ("model", "scores", {"scores": {}}, "an object with task and n and data, got ['scores']"),
    ("model", "scores.n", "x", "an integer >= 0, got 'x'"),
    ("model", "scores.scores.stitched.accuracy", {"value": 1}, "an object with low and high, got ['value']"),
    ("model", "scores.scores.stitched.accuracy.low", [], "a number, got []"),
    ("model", "scores.scores.stitched.accuracy.value", 10**400, "a number, got 1"),
    ("model", "requires", [{}], "an object with registry and name and distribution and version"),
    ("model", "id2label", {"0": 5}, "a text, got 5"),
    ("model", "manifest", {"x": 5}, "a text, got 5"),
    ("stitcher", "source", None, "an object, got None"),
    ("stitcher", "manifest", None, "an object, got None"),
]  # fmt: skip


def changed(record: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    record = holder = copy.deepcopy(record)
    *way, last = field.split(".")
    for key in way:
        holder = holder[key]
    holder[last] = value
    return record


@pytest.mark.parametrize(("kind", "field", "value", "message"), WRONG)
def test_a_wrong_field_is_named(kind: str, field: str, value: Any, message: str, records: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"a file is damaged: {field}.* must be .*{re.escape(message)}"):
        READ[kind](changed(records[kind], field, value), "a file")


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


MANY = "a file is damaged: .* is .*, and no network has more than 1"
LONG = "a file is damaged: it has more values than any record"
COUNTS = "target.blueprint.config."
UNFIT: list[tuple[str, str, Any, str]] = [
    ("model", "source.interface.modality", "image", r"source\.interface\.shapes must be an object with input_ids"),
    ("model", "stitch.target.width", 33, r"stitch\.target must be the spec of the cut of the target, .*, got .*33"),
    *((kind, "format_version", 4, "has format 4, .* reads 2 to 3; .*update hf-stitch") for kind in READ),
    *((kind, "format_version", 1, "has format 1, .* reads 2 to 3; .*save it with hf-stitch 0.2") for kind in READ),
    ("model", COUNTS + "num_hidden_layers", 1001, MANY),
    ("model", COUNTS + "num_labels", 2**17 + 1, MANY),
    ("model", COUNTS + "depths", [2, 10**9], MANY),
    ("model", COUNTS + "depths", [1000] * 1000, MANY),
    ("model", COUNTS + "stages", [{"num_layers": 1000}] * 1000, MANY),
    *((kind, key, [{}] * 10**7, LONG) for kind, key in (("model", "requires"), ("stitcher", "recipe"))),
    *((kind, "recipe", nested(500), "it has values nested more than 100 deep") for kind in READ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value", "message"), UNFIT, ids=range(len(UNFIT)))
def test_a_record_that_fits_no_network_is_refused_at_once(
    kind: str, field: str, value: Any, message: str, records: dict[str, Any]
) -> None:
    record = changed(records[kind], field, value)
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        READ[kind](record, "a file")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("key", ["source", "stitch", "format_version"])
def test_a_missing_field_is_named(kind: str, key: str, records: dict[str, Any]) -> None:
    """A config without parts is that of a model not built yet."""
    record = {name: value for name, value in records[kind].items() if name != key}
    if kind == "model":
        record["target"] = {"cut": record["target"]["cut"]}
    expected = f"must be an object with {'blueprint and plan and interface and reference' if kind == 'model' else key}"
    with pytest.raises(ValueError, match="a file has format 1, " if key == "format_version" else expected):
        READ[kind](record, "a file")


def test_what_large_networks_have_is_read(records: dict[str, Any], tmp_path: Any) -> None:
    """Numbers of layers in a list are no counts; the names of ImageNet-21k are in both networks and in the model."""
    record = changed(records["model"], COUNTS + "label2id", {"bricklayer": 12_000, "LABEL_0": 0})
    record["recipe"]["blocks"] = 10**6  # a name of a label and an entry of the recipe are no counts of layers
    assert read_model(record, "a file") == record
    check_counts({side: {"text_config": {"mlp_only_layers": [*range(100)]}} for side in ("source", "target")}, "a file")
    labels = {str(place): f"a name of a class, {place}" for place in range(21_843)}
    config = {"id2label": labels, "label2id": {name: int(place) for place, name in labels.items()}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"source": config, "target": config, **config}))
    check_counts(read_record(path), "the record")


def test_unknown_fields_are_named_with_their_place(records: dict[str, Any]) -> None:
    record = changed(records["model"], "source.cut.spec.new", 1)
    with pytest.warns(UserWarning, match=r"source\.cut\.spec in a file contains unknown keys, which are ignored: new"):
        assert "new" not in read_model(record, "a file")["source"]["cut"]["spec"]


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
