"""References to models: names, records, and the hash of the weights."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from hypothesis import given, strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from hf_stitch.reference import ModelReference, Settings, weights_hash


@pytest.mark.parametrize(
    ("text", "id", "library", "revision"),
    [
        ("gpt2", "gpt2", "transformers", None),
        ("openai-community/gpt2", "openai-community/gpt2", "transformers", None),
        (" openai-community/gpt2@main ", "openai-community/gpt2", "transformers", "main"),
        ("owner/name@refs/pr/1", "owner/name", "transformers", "refs/pr/1"),
        ("timm/rexnet_100.nav_in1k", "timm/rexnet_100.nav_in1k", "timm", None),
        ("timm/rexnet_100.nav_in1k@607a30d", "timm/rexnet_100.nav_in1k", "timm", "607a30d"),
        ("timm:rexnet_100", "timm:rexnet_100", "timm", None),
    ],
)
def test_parse(text, id, library, revision):
    reference = ModelReference.parse(text, task="image-classification")
    assert reference == ModelReference(id, library, revision=revision, task="image-classification")
    assert not reference.is_local
    assert str(reference) == text.strip()
    assert ModelReference.parse(str(reference), task="image-classification") == reference


@pytest.mark.parametrize(
    ("config", "library"),
    [
        ({"model_type": "bert"}, "transformers"),
        ({"architecture": "resnet18", "pretrained_cfg": {}}, "timm"),
        ({"model_type": "timm_wrapper", "architecture": "resnet18"}, "transformers"),
    ],
)
def test_the_config_of_a_local_folder_determines_its_library(tmp_path, monkeypatch, config, library):
    folder = tmp_path / "my@model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    for text in (str(folder), "my@model", "./my@model"):
        reference = ModelReference.parse(text)
        assert reference == ModelReference(str(folder.resolve()), library)
        assert reference.is_local and reference.revision is None
    with pytest.raises(ValueError, match="without revisions; remove '@main'"):
        ModelReference.parse("my@model@main")


def test_a_local_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"does not contain config\.json.*it contains nothing"):
        ModelReference.parse(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2}')
    with pytest.raises(ValueError, match=r"no adapter .* can read .*looks for 'model_type'.*it contains a, b"):
        ModelReference.parse(str(tmp_path))


def test_relative_paths_of_live_models_are_local_too(tmp_path, monkeypatch):
    (tmp_path / "runs" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ModelReference("runs/out", "transformers").is_local
    assert ModelReference(f"..{os.sep}gone", "transformers").is_local
    assert not ModelReference("owner/name", "transformers").is_local
    (tmp_path / "net.npz").write_bytes(b"")
    assert ModelReference("timm:net.npz", "timm").is_local and not ModelReference("timm:other.npz", "timm").is_local
    assert ModelReference(f"timm:{tmp_path / 'other.npz'}", "timm").is_local
    assert ModelReference("timm:net.npz", "timm").public.id is None
    assert not ModelReference(None, "torch").is_local
    assert str(ModelReference(None, "torch")) == "live torch module"
    assert str(ModelReference(None, "torch", weights_hash="sha256:0123456789")) == "live torch module sha256:01234567"


def test_record_round_trip_through_json():
    options = {"task": "text-generation", "dtype": torch.bfloat16, "num_labels": 3, "size": (2, 3)}
    reference = ModelReference.parse("owner/name@main", **options)
    record = json.loads(json.dumps(reference.to_dict()))
    assert record["kwargs"] == {"dtype": "bfloat16", "num_labels": 3, "size": [2, 3]}
    assert ModelReference.from_dict(record) == reference
    assert hash(ModelReference.from_dict(record)) == hash(reference)


def test_pins_round_trip_through_json():
    config, vocabulary = Settings.of({"size": (2, 3)}, {"act": "gelu"}), Settings.of({"vocab": list(range(99))})
    reference = ModelReference("owner/name", "timm", weights_hash="sha256:0", config=config, processor=vocabulary)
    record = json.loads(json.dumps(reference.to_dict()))
    assert record["config"] == {"chosen": {"size": [2, 3]}, "defaults": {"act": "gelu"}}
    assert ModelReference.from_dict(record) == reference
    assert hash(ModelReference.from_dict(record)) == hash(reference)
    del record["config"], record["processor"]  # a record of version 0.2.0
    assert reference.changes(ModelReference.from_dict(record)) == {}
    assert ModelReference.from_dict(record).changes(reference) == {}
    assert reference != ModelReference.from_dict(record)


def test_settings_are_compared_by_name_and_value():
    before = Settings({"width": 8, "extra": 1}, {"act": "gelu", "gone": 0})
    assert before.changes(before) == []
    assert before.changes(Settings({"width": 8, "extra": 1}, {"act": "gelu", "new": "x"})) == []  # of other versions
    assert before.changes(Settings({"width": 8, "extra": 1, "act": "relu"})) == ["act 'gelu', now 'relu'"]
    assert before.changes(Settings({"width": 8, "extra": 1}, {"act": "relu"})) == ["act 'gelu', now 'relu'"]
    assert before.changes(Settings({"width": 8}, {"act": "gelu"})) == ["extra 1, now not set"]
    assert before.changes(Settings({"width": 8, "extra": 1, "more": None})) == ["more not set, now None"]
    many = Settings({f"key{i:02}": i for i in range(12)})
    assert many.changes(Settings()) == [*(f"key{i:02} {i}, now not set" for i in range(8)), "4 more"]


def test_settings_are_flat_and_short():
    found = Settings.of(
        {
            "a": {"b": {"c": (1, 2)}, "empty": {}}, "long": "x" * 200, "bytes": b"1", "set": {"b", "a"},
            "dtype": torch.float16, "act": torch.nn.ReLU, "object": object(),
            "norm": functools.partial(torch.nn.LayerNorm, eps=1e-6),
        }
    ).chosen  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in ("a.b.c", "a.empty", "set", "dtype", "act", "norm", "object")} == {
        "a.b.c": [1, 2], "a.empty": {}, "set": ["a", "b"], "dtype": "torch.float16",
        "act": "torch.nn.modules.activation.ReLU",
        "norm": ["torch.nn.modules.normalization.LayerNorm", [], {"eps": 1e-6}], "object": "builtins.object",
    }  # fmt: skip
    assert found["long"].startswith("sha256:") and len(found["bytes"]) == 64
    (told,) = Settings.of({"long": "x" * 200}).changes(Settings.of({"long": "y" * 200}))
    assert told.startswith("long sha256:") and len(told) < 60


def holding(**buffers: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


def test_weights_hash_is_stable():
    """The hash is a literal, because later versions must reproduce the hashes in published artefacts."""
    module = holding(b=torch.arange(6, dtype=torch.float32).reshape(2, 3), a=torch.tensor(True))
    assert weights_hash(module) == "sha256:1ba7efcfa4e48eadb9c8d0b1ad1ed3093963a05cecdef4251642d401727f3669"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
)
def test_weights_hash_of_any_dtype(dtype):
    value = torch.tensor([[0, 1], [0, 0]], dtype=torch.float32).to(dtype)
    hashes = {weights_hash(holding(a=v)) for v in (value, value.T[:, :1], value.flatten(), value[0, 0], value[:0])}
    assert len(hashes) == 5
    assert weights_hash(holding(a=value.clone())) == weights_hash(holding(a=value))


def test_weights_hash_depends_on_names_dtypes_and_persistent_buffers_only():
    zeros = torch.zeros(4)
    buffers = [{"a": zeros}, {"b": zeros}, {"a": zeros.int()}, {"a": zeros, "b": zeros}]
    hashes = [weights_hash(holding(**each)) for each in buffers]
    assert len(set(hashes)) == 4
    module = holding(a=zeros)
    module.register_buffer("cache", torch.ones(3), persistent=False)
    assert weights_hash(module) == hashes[0]


@given(st.permutations(["a", "b", "c"]))
def test_weights_hash_does_not_depend_on_order_or_memory_layout(names):
    tensors = {name: torch.arange(6.0).reshape(2, 3) + ord(name) for name in "abc"}
    shuffled = holding(**{name: tensors[name].t().contiguous().t() for name in names})
    assert weights_hash(shuffled) == weights_hash(holding(**tensors))


def test_weights_hash_refuses_entries_without_bytes():
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias of Linear is on the meta device"):
        weights_hash(module)

    class Extra(torch.nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="_extra_state of Extra must be a tensor to be hashed, got dict"):
        weights_hash(Extra())


@pytest.mark.filterwarnings("ignore:torch:UserWarning")  # torch deprecates its quantised tensors
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_weights_hash_of_quantised_weights():
    """Linear layers of torch.ao save a tuple, torchao tensors that consist of several."""
    values = torch.linspace(-1, 1, 8).view(2, 4)
    scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int64)

    def linear(weight):
        made = torch.nn.Linear(4, 2, bias=False)
        made.weight.data = weight
        return torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(made))

    makes = [
        lambda: {"a": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)},
        lambda: {"a": torch.quantize_per_tensor(values, 0.2, 0, torch.qint8)},
        lambda: {"a": torch.quantize_per_tensor(values, 0.1, 1, torch.quint8)},
        lambda: {"a": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)},
        lambda: {"a": torch.quantize_per_channel(values, 2 * scales, zeros, 0, torch.qint8)},
        lambda: {"a": TwoTensor(values, values)},
        lambda: {"a": TwoTensor(values, 2 * values)},
        lambda: linear(values),
        lambda: linear(-values),
    ]
    hashes = [weights_hash(make()) for make in makes]
    assert len(set(hashes)) == len(makes)
    assert hashes == [weights_hash(make()) for make in makes]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_weights_hash_does_not_depend_on_the_device():
    module = torch.nn.Linear(3, 4)
    assert weights_hash(module.cuda()) == weights_hash(module.cpu())


RECORD = ModelReference("owner/name", "timm").to_dict()
REFUSALS = [
    (lambda: ModelReference.parse(""), ValueError, "empty"),
    (lambda: ModelReference.parse("  \n"), ValueError, "empty"),
    (lambda: ModelReference.parse("owner/name@"), ValueError, "nothing after '@'"),
    (lambda: ModelReference.parse("@main"), ValueError, "nothing before '@'"),
    (
        lambda: ModelReference.parse("timm:resnet18@main"),
        ValueError,
        "is a name of timm, which does not support revisions",
    ),
    (lambda: ModelReference.parse("owner/name", revision="main"), ValueError, "after the id: owner/name@main"),
    (lambda: ModelReference.parse("./nowhere"), FileNotFoundError, "does not exist"),
    (lambda: ModelReference.parse("/no/where"), FileNotFoundError, "does not exist"),
    (lambda: ModelReference.parse("~/nowhere-at-all"), FileNotFoundError, "does not exist"),
    (lambda: ModelReference.parse("a/b/c"), FileNotFoundError, "does not exist"),
    (lambda: ModelReference.from_dict({"task": "x"}), ValueError, r"an object with id and library, got \['task'\]"),
    (lambda: ModelReference.from_dict({**RECORD, "config": "gelu"}), ValueError, "damaged: config must be an object"),
    (lambda: ModelReference.from_dict({**RECORD, "config": {}}), ValueError, "damaged: config must be an object with"),
    (
        lambda: ModelReference.from_dict({**RECORD, "config": {"chosen": {}, "defaults": []}}),
        ValueError,
        r"damaged: config\.defaults must be an object, got",
    ),
    (lambda: ModelReference.parse("owner/name", config=object()), TypeError, "loading option config=.* cannot be rec"),
    (lambda: ModelReference.parse("owner/name", max_memory={0: "10GB"}), TypeError, "max_memory"),
    (lambda: ModelReference("x", "keras"), ValueError, r"one of hf_stitch, .*torch.*, got 'keras'"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_refers_to_no_model_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
