"""Exports to ONNX as the second network: honest ones, wrong operators, lost names, and what cannot be read."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_stitch_versions import Sameness, same
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from exported import (  # noqa: E402
    Change,
    Logits,
    attributes,
    changed,
    export,
    network,
    operator,
    reads,
    trained,
    weight,
    without_names,
)

from tests.tiny_networks import SIZE, plain_tokenizer  # noqa: E402  isort: skip

FAMILIES = ("vit", "cnn", "bert", "deit", "swin", "convnext", "gpt2", "llama", "roberta", "t5")
BY_EXPORTER = [True, pytest.param(False, id="torchscript")]
HONEST = [(family, dynamo) for family, dynamo in zip(FAMILIES, (True, False) * 5, strict=True)]
OLD = "/bert/encoder/layer.1/"
LAYER, BLOCK, DECODER = "bert.encoder.layer.1.", "transformer.h.1", "model.layers.1."
FEWER, NONE = weight(lambda w: 0.9 * w), weight(lambda w: 0 * w)
FLAT, TANH, ACROSS = attributes(epsilon=0.05), attributes(approximate="tanh"), attributes(axis=2)
WRONG: list[tuple[str, bool, str, str, Change, str]] = [
    ("vit", False, "Add", "/vit/layers.1", reads(1, 0), "vit.layers.1"),
    ("cnn", False, "Relu", "/layer2/layer2.0/act1", operator("Softplus"), "layer2.0.act1"),
    ("bert", True, "Gelu", f"{LAYER}intermediate.intermediate_act_fn", TANH, ""),
    ("bert", False, "Mul", f"{OLD}attention/self", FEWER, f"{LAYER}attention.self"),
    ("bert", True, "MatMul", f"{LAYER}attention.self.query", weight(lambda w: w.T), ""),
    ("bert", True, "Where", "bert.encoder.layer.0.attention.self", weight(lambda w: 0 * w, 2), ""),
    ("bert", False, "LayerNormalization", f"{OLD}output/LayerNorm", FLAT, f"{LAYER}output.LayerNorm"),
    ("vit", True, "Add", "vit.embeddings", weight(lambda w: w[:, ::-1]), ""),
    ("gpt2", True, "Gemm", f"{BLOCK}.attn.c_attn", weight(lambda w: 0 * w, 2), ""),
    ("gpt2", True, "Tanh", f"{BLOCK}.mlp.act", operator("Erf"), ""),
    ("llama", True, "Add", f"{DECODER}input_layernorm", weight(lambda w: w + 0.05), ""),
    ("llama", True, "Neg", f"{DECODER}self_attn", operator("Identity"), ""),
    ("llama", True, "Sin", "model.rotary_emb", operator("Cos"), ""),
    ("llama", True, "Sigmoid", f"{DECODER}mlp.act_fn", operator("Tanh"), ""),
    ("cnn", True, "AveragePool", "layer2.0.downsample.0", attributes(kernel_shape=[1, 1]), ""),
    ("cnn", False, "Conv", "/layer2/layer2.0/conv1", weight(lambda w: 0 * w, 2), "layer2.0"),  # it has no batch norm
    ("swin", True, "Softmax", "layers.0.blocks.1.attn.softmax", ACROSS, ""),
    ("swin", False, "Gelu", "/layers/layers.0/blocks/blocks.1/mlp/act", TANH, "layers.0.blocks.1.mlp.act"),
    ("t5", False, "Softmax", "/encoder/block.1/layer.0/SelfAttention", ACROSS,
     "encoder.block.1.layer.0.SelfAttention"),
]  # fmt: skip
"""Family, exporter, the operator and the module that it is in, what is made wrong, and the module to be named."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("exports")

    @cache
    def get(family: str, dynamo: bool) -> tuple[Adapter, Path]:
        a = network(family)
        needed = Logits if family in ("gpt2", "llama") and not dynamo else None
        return a, export(family, a, place / f"{family}_{dynamo}.onnx", dynamo=dynamo, wrap=needed)

    return get


def compared(a: Any, b: Any, data: Any = None, **options: Any) -> Sameness:
    return same(a, b, data, progress=False, **options)


def check_honest(found: Sameness) -> None:
    assert found.is_same and found.modules[-1].name == "", found.verdict
    assert max(row.ratio for row in found.modules) < found.tolerance


# -- honest exports ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "dynamo"), HONEST)
def test_an_honest_export_is_the_same(family: str, dynamo: bool, exports: Any) -> None:
    found = compared(*exports(family, dynamo))
    check_honest(found)
    assert found.by_names and len(found.modules) > 30


@pytest.mark.parametrize("dynamo", BY_EXPORTER)
def test_a_layer_that_is_called_several_times(dynamo: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.AlbertConfig(vocab_size=80, embedding_size=16, **sizes)
    model = trained(transformers.AlbertForSequenceClassification(config))
    a = hf_stitch.load(model, processor=plain_tokenizer())
    check_honest(compared(a, export("bert", a, tmp_path / "albert.onnx", dynamo=dynamo)))


def test_calls_are_numbered(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.one, self.two = nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.act(self.two(self.act(self.one(x)))))

    a = hf_stitch.load(trained(Twice()), example_inputs=torch.randn(2, 6))
    for dynamo in (True, False):
        found = compared(a, export("", a, tmp_path / "twice.onnx", dynamo=dynamo))
        check_honest(found)
        assert [(row.name, row.call) for row in found.modules] == [
            ("one", 0), ("act", 0), ("two", 0), ("act", 1), ("one", 1), ("", 0)
        ]  # fmt: skip


# -- wrong operators ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "dynamo", "kind", "scope", "change", "named"),
    [pytest.param(*each, id="-".join((*map(str, each[:4]),))) for each in WRONG],
)  # fmt: skip
def test_the_module_of_a_wrong_operator_is_named(
    family: str, dynamo: bool, kind: str, scope: str, change: Change, named: str, exports: Any, tmp_path: Path
) -> None:
    a, place = exports(family, dynamo)
    found = compared(a, changed(place, tmp_path / "wrong.onnx", kind, scope, change))
    assert not found.is_same and found.complete
    assert found.findings[0].module == (named or scope)
    assert found.findings[-1].restored


def test_two_wrong_operators_are_both_found(exports: Any, tmp_path: Path) -> None:
    a, place = exports("vit", True)
    wrong = changed(place, tmp_path / "wrong.onnx", "LayerNormalization", "vit.layers.0.layernorm_after", FLAT)
    wrong = changed(wrong, wrong, "Add", "vit.layers.2", reads(1, 0))
    found = compared(a, wrong)
    assert [each.module for each in found.findings] == ["vit.layers.0.layernorm_after", "vit.layers.2"]
    assert [each.restored for each in found.findings] == [False, True]


# -- quantised files ---------------------------------------------------------------------------------------------------
def in_blocks_of_4_bits(source: Path, target: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    made = MatMulNBitsQuantizer(onnx.load(source), block_size=32)
    made.process()
    onnx.save(made.model.model, target)


def dynamic(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QInt8)


def in_pairs_of_nodes(source: Path, target: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"pixel_values": np.float32(torch.randn(2, 3, SIZE, SIZE).numpy())}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    quantize_static(source, target, Reader(), quant_format=QuantFormat.QDQ)


QUANTISED = {
    "int8": ("bert", False, dynamic), "int8, dynamo": ("bert", True, dynamic),
    "int8 of kernels": ("vit", False, dynamic), "int4": ("bert", True, in_blocks_of_4_bits),
    "int8 in pairs of nodes": ("vit", True, in_pairs_of_nodes),
}  # fmt: skip
"""Format -> family, exporter and what quantises a file."""


@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_file_is_told_with_its_share_and_its_effect(form: str, exports: Any, tmp_path: Path) -> None:
    family, dynamo, quantise = QUANTISED[form]
    a, place = exports(family, dynamo)
    quantise(place, tmp_path / "integers.onnx")
    found = compared(a, tmp_path / "integers.onnx")
    assert not found.is_same and not found.findings
    share = int(found.quantized.partition(": ")[2].partition("%")[0])
    assert 50 < share <= 100 and f"are integers ({form[:4]}" in found.quantized, found.quantized
    assert found.verdict.startswith("The second network is quantized: ")
    end = found.modules[-1]
    assert 1e-3 < end.difference < 0.5 and f"differ by {end.difference:.2g} of their norm" in found.verdict
    assert not [row.name for row in found.modules if not np.isfinite(row.difference)]
    assert "not found" not in found.verdict and "repaired" not in found.verdict
    found.to_html(tmp_path / "page.html")


def test_floats_are_not_quantised(exports: Any, tmp_path: Path) -> None:
    a, place = exports("vit", True)
    wrong = changed(place, tmp_path / "wrong.onnx", "LayerNormalization", "vit.layers.0.layernorm_after", FLAT)
    assert not compared(a, wrong).quantized and not compared(a, place).quantized


# -- lost names --------------------------------------------------------------------------------------------------------
def test_values_pair_what_has_lost_its_names(exports: Any, tmp_path: Path) -> None:
    a, place = exports("vit", True)
    found = compared(a, without_names(place, tmp_path / "lost.onnx"))
    check_honest(found)
    assert not found.by_names and len(found.modules) > 20
    wrong = changed(place, tmp_path / "wrong.onnx", "LayerNormalization", "vit.layers.1.layernorm_after", FLAT)
    assert compared(a, without_names(wrong, wrong)).findings[0].module == "vit.layers.1.layernorm_after"


@pytest.mark.parametrize("names", ["of weights", "of all"])
def test_weights_without_names(names: str, exports: Any, tmp_path: Path) -> None:
    a, place = exports("vit", True)
    norm = "vit.layers.1.layernorm_after"
    for source in (place, changed(place, tmp_path / "wrong.onnx", "LayerNormalization", norm, FLAT)):
        model = onnx.load(without_names(source, tmp_path / "lost.onnx") if names == "of all" else source)
        new = {each.name: str(number) for number, each in enumerate(model.graph.initializer)}
        for each in model.graph.initializer:
            each.name = new[each.name]
        for node in model.graph.node:
            node.input[:] = [new.get(name, name) for name in node.input]
        onnx.save(model, tmp_path / "nameless.onnx")
        found = compared(a, tmp_path / "nameless.onnx")
        if source == place:
            check_honest(found)
        else:
            assert [finding.module for finding in found.findings] == [norm]


@pytest.mark.parametrize("dynamo", BY_EXPORTER)
@pytest.mark.parametrize("family", ["bert", "cnn", "deit"])
def test_a_graph_that_was_optimised_before_is_the_same(family: str, dynamo: bool, exports: Any) -> None:
    import onnxruntime

    a, place = exports(family, dynamo)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(place.with_stem("optimised"))  # next to the weights
    onnxruntime.InferenceSession(place, options, ["CPUExecutionProvider"])
    check_honest(compared(a, place.with_stem("optimised")))


# -- dtypes and files --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Adapter, Path]:
    """A network that is exported in no time."""
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 300))
    a = hf_stitch.load(trained(net), example_inputs=torch.randn(2, 6))
    return a, export("", a, tmp_path_factory.mktemp("line") / "line.onnx", dynamo=False)


def test_half_precision_has_its_own_null(line: Any, tmp_path: Path) -> None:
    a, _ = line
    half = hf_stitch.load(
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 300)).half(),
        example_inputs=torch.randn(2, 6).half(),
    )
    half.model.load_state_dict(a.model.state_dict())
    found = compared(a, export("", half, tmp_path / "half.onnx", dynamo=False))
    check_honest(found)
    assert found.null == "float16"


def test_inputs_of_other_names(line: Any, tmp_path: Path) -> None:
    a, place = line
    model = onnx.load(place)
    model.graph.node[0].input[0] = model.graph.input[0].name = "x"
    onnx.save(model, tmp_path / "x.onnx")
    check_honest(compared(a, tmp_path / "x.onnx"))


def test_fixed_shapes(line: Any, tmp_path: Path) -> None:
    a, place = line
    model = onnx.load(place)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "one.onnx")
    with pytest.raises(ValueError, match=r"one.onnx requires input of shape \(1, 6\), got \(8, 6\). Export it with"):
        compared(a, tmp_path / "one.onnx")
    check_honest(compared(a, tmp_path / "one.onnx", torch.randn(3, 6), batch_size=1))


def test_weights_in_files_of_their_own(line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, place = line
    onnx.save(
        onnx.load(place), tmp_path / "line.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    monkeypatch.chdir(tmp_path)
    found = compared(a, "line.onnx")
    check_honest(found)
    assert found.b == "line.onnx"
    (tmp_path / "weights").unlink()
    with pytest.raises(FileNotFoundError, match=r"line.onnx stores weights in weights, which must be"):
        compared(a, "line.onnx")


def test_what_cannot_be_read(line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, place = line
    with pytest.raises(FileNotFoundError, match=r"none\.onnx"):
        compared(a, tmp_path / "none.onnx")
    for content in (b"no graph", b""):
        (tmp_path / "no.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=r"no\.onnx is not an ONNX file"):
            compared(a, tmp_path / "no.onnx")
    model = onnx.load(place)
    model.graph.node[0].op_type = "Unknown"
    onnx.save(model, tmp_path / "unknown.onnx")
    with pytest.raises(ValueError, match=r"ONNX Runtime cannot load unknown\.onnx: .*Unknown"):
        compared(a, tmp_path / "unknown.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install \"hf-stitch-versions\[onnx\]\""):
        compared(a, place)


def test_an_input_that_the_first_network_lacks(line: Any, tmp_path: Path) -> None:
    a, place = line
    model = onnx.load(place)
    model.graph.input.add(name="position_ids").CopyFrom(
        onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["n"])
    )
    onnx.save(model, tmp_path / "more.onnx")
    with pytest.raises(ValueError, match=r"more\.onnx requires the inputs position_ids, .* has only input"):
        compared(a, tmp_path / "more.onnx")
