"""Networks in other runtimes as the second network: equal ones, faults with their causes, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_versions import DifferentError, PortError, assert_same, same
from hf_stitch_versions.ports.port import FOLDER, Port
from hf_stitch_versions.ports.prefixes import prefixed
from hf_stitch_versions.sameness.causes import changed
from hf_stitch_versions.sameness.proposals import proposals
from hf_stitch_versions.sources import Feed
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Adapter

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import ports

from tests.tiny_networks import plain_tokenizer  # isort: skip

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # of torch and transformers, while OpenVINO traces

BASE = {"rope_theta": 500000.0, "rope_type": "default"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Adapter, str]]:
    """``saved(runtime, family, **config)``: a tiny network, and the name of its port."""

    def make(runtime: str, family: str, **config: Any) -> tuple[Adapter, str]:
        pytest.importorskip({"mlx": "mlx_lm"}.get(runtime, runtime))
        model = ports.built(family, config)
        return ports.adapter_of(model), ports.converted(runtime, model, tmp_path_factory.mktemp(family))

    return make


@pytest.mark.parametrize(
    ("runtime", "family"),
    [("mlx", "qwen3"), ("mlx", "gemma2"), ("openvino", "llama"), ("gguf", "llama"), ("ctranslate2", "llama")],
)
def test_an_honest_port_is_the_same(saved: Any, runtime: str, family: str) -> None:
    sameness = same(*saved(runtime, family), progress=False)
    assert sameness.is_same, sameness.verdict
    assert sameness.runtime or runtime == "gguf"
    assert len(sameness.modules) > 10 or runtime == "ctranslate2"


@pytest.mark.parametrize(
    ("family", "config", "module", "kind", "text"),
    [
        ("llama", {"rope_parameters": BASE}, "model.layers.0.self_attn", "RoPE base",
         "rope_theta 10000 instead of 500000"),
        ("gemma", {}, "model.layers.0.mlp", "activation", "hidden_act gelu instead of gelu_pytorch_tanh"),
        ("mistral", {"sliding_window": 8, "rope_parameters": {**BASE, "rope_theta": 10000.0}},
         "model.layers.0.self_attn", "window", "no sliding window instead of 8"),
        ("gemma2", {"sliding_window": 64, "num_hidden_layers": 1},  # only the longest text shows it
         "model.layers.0.self_attn", "window", "no sliding window instead of 64"),
    ],
)  # fmt: skip
def test_the_cause_of_a_silent_fault(
    saved: Any, family: str, config: dict[str, Any], module: str, kind: str, text: str
) -> None:
    sameness = same(*saved("mlx", family, **config), progress=False)
    assert sameness.findings[0].module == module
    assert [(cause.kind, cause.text) for cause in sameness.causes] == [(kind, f"with {text}")]
    assert sameness.explained
    assert kind in sameness.verdict


def test_several_causes_come_out_one_after_the_other(saved: Any, tmp_path: Path) -> None:
    first, name = saved("mlx", "qwen3")
    config = json.loads((Path(name.partition(":")[2]) / "config.json").read_text("utf-8"))
    config |= {"rms_norm_eps": 1e-3, "rope_theta": 500000.0, "rope_parameters": {**BASE}}
    (Path(name.partition(":")[2]) / "config.json").write_text(json.dumps(config), "utf-8")
    sameness = same(first, name, progress=False)
    assert sorted(cause.kind for cause in sameness.causes) == ["RoPE base", "norm epsilon"]
    assert sameness.explained


def test_a_head_that_a_port_ties_to_the_embedding(saved: Any) -> None:
    first, name = saved("mlx", "llama", tie_word_embeddings=False)
    config = Path(name.partition(":")[2]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "tie_word_embeddings": True}), "utf-8")
    sameness = same(first, name, progress=False)
    assert [cause.text for cause in sameness.causes] == ["with tie_word_embeddings True instead of False"]
    assert sameness.explained


def test_the_scale_of_attention_in_a_config_of_integers(saved: Any) -> None:
    """Gemma's config refuses 8.0."""
    sameness = same(*saved("ctranslate2", "gemma3_text", num_hidden_layers=2), progress=False)
    assert [cause.text for cause in sameness.causes] == ["with query_pre_attn_scalar 8 instead of 256"]
    assert sameness.explained


def test_embeddings_that_a_port_drops(saved: Any, tmp_path: Path) -> None:
    """As keras-hub drops the token types of RoBERTa, whose embeddings are one module there."""
    model = ports.built("bert", {})
    first = ports.adapter_of(model)
    without = changed(first, [change for change in proposals(model, {}) if change.kind == "missing embedding"])
    assert without is not None
    sameness = same(first, ports.converted("openvino", without.model, tmp_path), progress=False)
    assert [cause.text for cause in sameness.causes] == ["with no embeddings of token types"]
    assert sameness.explained


def test_a_cause_names_its_first_module_where_outputs_alone_are_known(saved: Any, tmp_path: Path) -> None:
    model = ports.built("llama", {})
    first = ports.adapter_of(model)
    state = model.state_dict()
    exchanged = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    port = ports.built("llama", {})
    port.load_state_dict(
        {name: state[re.sub("gate_proj|up_proj", lambda part: exchanged[part[0]], name)] for name in state}
    )
    sameness = same(first, ports.converted("ctranslate2", port, tmp_path), progress=False)
    (cause,) = sameness.causes
    assert (cause.kind, cause.module) == ("weights", "model.layers.0.mlp.gate_proj") and sameness.explained
    assert "The change begins at `model.layers.0.mlp.gate_proj`." in sameness.verdict


def test_without_a_cause_the_last_module_that_agrees_is_named() -> None:
    """As in Keras, whose modules are paired by values: none after the fault has a pair."""
    different = same(
        ports.adapter_of(ports.built("llama", {})), ports.adapter_of(ports.built("llama", {}, seed=1)), progress=False
    )
    agree, end = (replace(different.modules[0], name=part, difference=1e-7, null=1e-7) for part in ("block", ""))
    finding = replace(different.findings[0], module="", seen_at="")
    sameness = replace(different, findings=(finding,), modules=(agree, replace(end, difference=1.0)), causes=())
    assert sameness.agreed == "block" and "The last module that agrees is `block`." in sameness.verdict


def test_weights_that_differ_are_named(saved: Any) -> None:
    first, name = saved("mlx", "qwen3")
    file = Path(name.partition(":")[2]) / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(state, file, metadata={"format": "pt"})
    finding = same(first, name, progress=False).findings[0]
    assert finding.module == "model.layers.1.mlp.up_proj"
    assert finding.weights
    assert "weight" in finding.weights[0]


def test_a_pair_by_name_whose_difference_arrives_nowhere(saved: Any) -> None:
    """In transformers, the embedding of Gemma scales its output; in MLX, the network does. A second fault hides it."""
    first, name = saved("mlx", "gemma2", num_hidden_layers=1)
    file = Path(name.partition(":")[2]) / "model.safetensors"
    state = {key: value + 1 if "norm" in key else value for key, value in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    sameness = same(first, name, progress=False)
    assert sameness.findings[0].module == "model.layers.0.input_layernorm"
    assert [cause.text for cause in sameness.causes] == ["with +1 added to the weights of norms"]


def test_assert_same(saved: Any) -> None:
    first, name = saved("ctranslate2", "llama")
    assert_same(first, name)
    other = hf_stitch.load(ports.built("llama", {}, seed=1), example_inputs=dict(first.example))
    with pytest.raises(DifferentError, match="First difference") as error:
        assert_same(other, name)
    assert not error.value.report.is_same


@pytest.mark.parametrize(("theta", "status"), [(10000.0, 0), (500000.0, 1)])
def test_the_command(saved: Any, theta: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_stitch.cli import app

    monkeypatch.chdir(tmp_path)
    _, name = saved("mlx", "llama", rope_parameters={**BASE, "rope_theta": theta})
    plain_tokenizer().save_pretrained(name.partition(":")[2])
    result = CliRunner().invoke(app, ["same", name.partition(":")[2], name], prog_name="hf-stitch")
    assert result.exit_code == status, result.output
    assert ("RoPE base" in result.output) == bool(status)


# -- names and trust -------------------------------------------------------------------------------------------
def test_names() -> None:
    assert prefixed("mlx:./port") == ("mlx", "./port")
    assert prefixed(Path("model.xml")) == ("openvino", "model.xml")
    assert prefixed("org/model") is prefixed("mine.py:small") is prefixed(torch.nn.Linear(1, 1)) is None
    with pytest.raises(ValueError, match=r"mlx, .* got 'tensorrt'.*\.npz"):
        prefixed("tensorrt:engine")
    with pytest.raises(ValueError, match=r"mlx, .* got 'MLX'"):
        prefixed("MLX:./port")
    with pytest.raises(ValueError, match=r"reference; pass 'mlx:\./port' as the second"):
        same("mlx:./port", "org/model")


@pytest.mark.parametrize(
    ("runtime", "python", "error"),
    [
        ("openvino", None, r"FileNotFoundError: expected the \.xml file of a model, got the folder"),
        ("ctranslate2", None, r"FileNotFoundError: expected a folder with model\.bin"),
        ("mlx", "no/python", "expected an interpreter for mlx, but no/python"),
    ],
    ids=["openvino", "ctranslate2", "mlx"],
)
def test_what_is_not_the_file_of_a_runtime(tmp_path: Path, runtime: str, python: str | None, error: str) -> None:
    pytest.importorskip({"mlx": "mlx_lm"}.get(runtime, runtime))
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        Port(runtime, tmp_path, python=python)


def test_a_folder_of_mlx_that_transformers_reads(saved: Any) -> None:
    first, name = saved("mlx", "llama")
    file = next(Path(name.removeprefix("mlx:")).glob("*.safetensors"))
    save_file(load_file(file), file, metadata={"format": "mlx"})
    with pytest.warns(UserWarning, match=re.escape(f"pass {name}")):
        assert same(first, str(file.parent), progress=False).is_same
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Exception) as of_loading:
        hf_stitch.load(str(file.parent))
    with pytest.raises(type(of_loading.value), match=re.escape(str(of_loading.value))):  # not an error of the check
        same(first, str(file.parent), progress=False)


def test_code_in_a_folder_runs_with_trust_only(saved: Any) -> None:
    first, name = saved("mlx", "llama")
    folder = Path(name.partition(":")[2])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "code.py"}), "utf-8")
    marker = folder / "marker"
    (folder / "code.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n", "utf-8"
    )
    with pytest.raises(ValueError, match=r"code\.py"):
        same(first, name, progress=False)
    assert not marker.exists()
    assert same(first, name, trust=True, progress=False).is_same
    assert marker.exists()


@pytest.fixture
def keras() -> dict[str, str]:
    """Environment with keras-hub, which brings TensorFlow."""
    if "HF_STITCH_KERAS" not in os.environ:
        pytest.skip("needs HF_STITCH_KERAS, the interpreter of an environment with keras-hub")
    return {"keras": os.environ["HF_STITCH_KERAS"]}


def test_an_honest_port_to_keras_is_the_same(keras: dict[str, str], tmp_path: Path) -> None:
    model = ports.built("qwen2", {"num_hidden_layers": 1})
    sameness = same(ports.adapter_of(model), ports.converted("keras", model, tmp_path), python=keras, progress=False)
    assert sameness.is_same, sameness.verdict
    assert len(sameness.modules) > 10
    assert sameness.runtime.startswith("keras-hub")


def test_lambda_layers_run_with_trust_only(keras: dict[str, str], tmp_path: Path) -> None:
    marker, file = tmp_path / "marker", tmp_path / "model.keras"
    code = (
        "import keras\n"
        f"layer = keras.layers.Lambda(lambda x: (open({str(marker)!r}, 'w').close(), x)[1], output_shape=(4,))\n"
        f"keras.Sequential([keras.Input((4,), name='x'), layer]).save({str(file)!r})\n"
    )
    subprocess.run([keras["keras"], "-c", code], check=True, capture_output=True)
    marker.unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"model\.keras failed while loading: ValueError: .*Lambda"):
        Port("keras", file, python=keras["keras"])
    assert not marker.exists()
    trusted = Port("keras", file, python=keras["keras"], trust=True)
    trusted.watch(Feed((0,), {"x": torch.zeros(1, 4)}), lambda event: None)
    assert marker.exists()


# -- what goes wrong -------------------------------------------------------------------------------------------
@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Port]:
    """``runtime(code)``: a port in a runtime whose ``run`` executes the code."""

    def make(code: str, load: str = "pass", imports: str = "", **options: Any) -> Port:
        monkeypatch.setattr("hf_stitch_versions.ports.port.FOLDER", tmp_path)
        (tmp_path / "worker.py").write_text((FOLDER / "worker.py").read_text("utf-8"), "utf-8")
        (tmp_path / "runtimes").mkdir(exist_ok=True)
        (tmp_path / "runtimes" / "mlx.py").write_text(
            f"import os, time\n{imports}\nimport numpy as np\nfrom worker import Seen\n"
            "class Runtime:\n    def __init__(self, path, trust):\n"
            f"        {load}\n"
            "        self.about = dict(runtime='one', dtype=['float32'], config={}, unseen=[])\n"
            "        self.about |= dict(padded=False, inputs=[])\n"
            f"    def run(self, inputs, put, with_inputs):\n        {code}\n",
            "utf-8",
        )
        return Port("mlx", tmp_path, **options)

    return make


def feed() -> Feed:
    return Feed((0,), {"input_ids": torch.tensor([[3, 4]])})


def test_a_process_that_ends_and_one_that_hangs(runtime: Any) -> None:
    with pytest.raises(PortError, match="status 3 while running"):
        runtime("os._exit(3)").watch(feed(), lambda event: None)
    with pytest.raises(PortError, match=r"limit of 1 s while running"):
        runtime("time.sleep(60)", seconds=1.0).watch(feed(), lambda event: None)
    with pytest.raises(PortError, match="status 4 while loading"):
        runtime("pass", load="os._exit(4)")


def test_errors_of_a_runtime_name_it(runtime: Any) -> None:
    with pytest.raises(ValueError, match="failed while running: KeyError"):
        runtime("raise KeyError('wrong')").watch(feed(), lambda event: None)
    with pytest.raises(ImportError, match=r"pip install mlx\[cpu\] mlx-lm.*--python mlx="):
        runtime("pass", imports="import no_such_package_at_all")


def test_what_is_known_remains_when_the_process_ends(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ports.built("llama", {})
    first, second = ports.adapter_of(model), runtime(
        "if put: os._exit(5)\n        n = inputs['input_ids'].shape[1]\n        return ["
        "Seen(('model.embed_tokens', 0), 'E', None, {'': np.ones((1, n, 32), 'f4')}, {}), "
        "Seen(('', 0), 'M', None, {'logits': np.ones((1, n, 96), 'f4')}, {})]\n"
        "    def weights(self, name):\n        return {}"
    )  # fmt: skip
    ours = {"mlx:.": ("mlx", ".")}
    monkeypatch.setattr("hf_stitch_versions.sameness.workflow.prefixed", lambda name: ours.get(name))
    monkeypatch.setattr("hf_stitch_versions.sameness.workflow.opened", lambda *_: second)
    sameness = same(first, "mlx:.", progress=False)
    assert not sameness.is_same
    assert not sameness.complete
    assert any("ended early" in text and "status 5" in text for text in sameness.unseen)


def test_the_end_of_the_process_ends_the_search_for_causes() -> None:
    from hf_stitch_versions.sameness.causes import search

    def score(*_: Any) -> Any:
        raise PortError("it ended")

    with pytest.raises(PortError, match="it ended"):
        search(ports.adapter_of(ports.built("llama", {})), [], score)


def test_a_port_of_another_network(saved: Any) -> None:
    _, name = saved("mlx", "qwen3")
    other = ports.adapter_of(ports.built("qwen3", {"hidden_size": 64}))
    sameness = same(other, name, progress=False)
    assert not sameness.is_same
    assert not sameness.explained


def test_a_port_with_a_fixed_shape(saved: Any, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    first, name = saved("openvino", "llama", num_hidden_layers=1)
    graph = openvino.Core().read_model(name.partition(":")[2])
    graph.reshape({port.any_name: [1, 5] for port in graph.inputs})
    openvino.save_model(graph, tmp_path / "fixed.xml", compress_to_fp16=False)
    with pytest.raises(ValueError, match=r"fixed\.xml requires input_ids of shape \(1, 5\), got \(8, .*batch_size"):
        same(first, tmp_path / "fixed.xml", progress=False)


def test_a_folder_that_changes(runtime: Any) -> None:
    port = runtime("pass")
    (port.path / "weights").write_bytes(b"new")
    with pytest.raises(PortError, match=r"files of .* changed during the comparison"):
        port.weights("")


def test_a_missing_folder(saved: Any, tmp_path: Path) -> None:
    first, _ = saved("ctranslate2", "llama")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        same(first, f"mlx:{tmp_path}/nowhere", progress=False)
