"""Read ONNX files, and map their values to the inputs and outputs of modules."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_stitch_versions.recording import Key

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata key for the modules around a node, written by ``torch.onnx.export(dynamo=True)``."""

FOLDED = "onnx::Conv_"
"""Name prefix of weights with a folded batch norm, from ``torch.onnx.export(dynamo=False)``."""

PACKED = "MatMulNBits"
"""ONNX Runtime operator with several integers in a byte of its matrix."""

WHOLE = ("int32", "int64", "bool")
"""Formats of positions and masks, not of weights."""

SMALL = 1024
"""External weights of at least this many bytes are not loaded."""


def read(path: Path) -> Any:
    """Return the model in a file, without large external weights.

    Raises:
        OSError: If the file or a file of its weights is missing.
        ValueError: If it is not an ONNX file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{path.name} is not an ONNX file: {error}") from error
    if not model.graph.node:
        raise ValueError(f"{path.name} is not an ONNX file: it does not contain a graph")
    for weight in model.graph.initializer:
        outside = {location.key: location.value for location in weight.external_data}
        if outside and not (path.parent / outside["location"]).is_file():
            raise FileNotFoundError(
                f"{path.name} stores weights in {outside['location']}, which must be in the same folder"
            )
        if int(outside.get("length", SMALL)) < SMALL:  # shapes, required by the runtime before it reads weights
            onnx.external_data_helper.load_external_data_for_tensor(weight, str(path.parent))
            weight.ClearField("external_data")
            weight.data_location = onnx.TensorProto.DEFAULT
    return model


def integers_of(graph: Any) -> tuple[float, list[str]]:
    """Return the share of the matrices and kernels of a graph that are integers, and their formats."""
    import onnx

    sizes: dict[str, int] = {}
    packed = {node.input[1]: node for node in graph.node if node.op_type == PACKED}
    scales = {name for node in packed.values() for name in node.input[2:]}
    for weight in (proto for proto in graph.initializer if proto.name not in scales):
        kind, size = onnx.TensorProto.DataType.Name(weight.data_type).lower(), math.prod(weight.dims)
        if node := packed.get(weight.name):
            attributes = {proto.name: proto.i for proto in node.attribute}
            kind, size = f"int{attributes.get('bits', 4)}", attributes["K"] * attributes["N"]
        if len(weight.dims) > 1 and kind not in WHOLE:
            sizes[kind] = sizes.get(kind, 0) + size
    integers = {kind: size for kind, size in sizes.items() if "int" in kind}
    return (sum(integers.values()) / sum(sizes.values()) if sizes else 0.0), list(integers)


@dataclass
class Call:
    """The nodes of one call of a module.

    Attributes:
        key: The module, and the number of the call.
        kind: Operator that computes its output.
        outputs: Names of the values that leave it, in their order.
        inputs: Names of the values that enter it.
    """

    key: Key
    kind: str = ""
    outputs: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)


def calls_of(graph: Any) -> list[Call]:
    """Return the calls of modules in a graph, in order of completion, without the whole network.

    Consecutive nodes of a module are one call, also with nodes outside of all modules in between. In graphs without
    module names, every node is a call with the name of its value.
    """
    weights = {proto.name for proto in graph.initializer}
    live = {proto.name for proto in graph.input} - weights  # values that depend on the inputs
    readers: dict[str, set[int]] = {proto.name: {-1} for proto in graph.output}
    for number, node in enumerate(graph.node):
        inputs = _read(node)
        if not live.isdisjoint(inputs):
            live |= set(node.output)
        for name in inputs:
            readers.setdefault(name, set()).add(number)
    scoped = _scoped(graph, weights)
    calls = scoped or [
        Call((node.output[0], 0), nodes={number}) for number, node in enumerate(graph.node) if node.output
    ]
    owners = {name.rpartition(".")[0] for name in weights if scoped} - {""}
    ends = dict[Key, tuple[int, int]]()
    for call in calls:
        internal = {name for number in call.nodes for name in graph.node[number].output}
        for number in sorted(call.nodes):
            node = graph.node[number]
            if not _fused(node, call.key[0], owners):
                call.inputs += [name for name in _read(node) if name in live and name not in (*internal, *call.inputs)]
            if leaving := [name for name in node.output if name in live and readers.get(name, set()) - call.nodes]:
                call.outputs += leaving
                call.kind = node.op_type
                ends[call.key] = number, -call.key[0].count(".")
    return sorted((call for call in calls if call.outputs), key=lambda call: ends[call.key])


def _read(node: Any) -> list[str]:
    """Return the names of the values that a node reads, its branches and loops included."""
    graphs = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return [name for name in node.input if name] + [name for g in graphs for inner in g.node for name in _read(inner)]


def _fused(node: Any, name: str, owners: set[str]) -> bool:
    """Return whether a node is a batch norm with a fused convolution: its input is not the input of the module."""
    owner = node.input[1].rpartition(".")[0] if node.op_type == "Conv" else ""
    return owner in owners and owner != name and not owner.startswith(f"{name}.")


def _scoped(graph: Any, weights: set[str]) -> list[Call]:
    """Return the calls of a graph, if its nodes name their modules."""
    running, calls, counts = dict[str, Call](), list[Call](), dict[str, int]()
    seen: dict[str, str] = {}  # part of a name with the number of a call -> without it
    for number, node in enumerate(graph.node):
        names = _names(node, weights, seen)
        if not names:
            continue
        running = {name: call for name, call in running.items() if name in names}
        for name, written in names.items():
            if name not in running or running[name].kind != written:
                running[name] = Call((name, counts.get(name, 0)), written)
                counts[name] = counts.get(name, 0) + 1
                calls.append(running[name])
            running[name].nodes.add(number)
    return calls


def _names(node: Any, weights: set[str], seen: dict[str, str]) -> Mapping[str, str]:
    """Return the modules around a node, outermost first, and the part of the node name that separates their calls."""
    scopes = {metadata.key: metadata.value for metadata in node.metadata_props}.get(SCOPES)
    if scopes is not None:
        return {name: "" for name in ast.literal_eval(scopes)[:-1] if name and not name.startswith("_empty_nn_module")}
    if not node.name.startswith("/"):
        return {}
    names, name, last = dict[str, str](), "", ""
    for part in node.name.split("/")[1:-1]:
        inner = part.startswith(f"{last}.")  # "layer1", then "layer1.0": the parent and the module
        outer = name.removesuffix(last) if inner else f"{name}." if name else ""
        bare, _, call = part.rpartition("_")
        is_numbered = (
            call.isdigit() and f"{outer}{bare}" in seen and not any(w.startswith(f"{outer}{part}.") for w in weights)
        )
        name, last = outer + (bare if is_numbered else part), bare if is_numbered else part
        seen[name] = name
        names[name] = part
    if node.op_type == "Conv" and node.input[1].startswith(FOLDED):
        names.popitem()
    return names
