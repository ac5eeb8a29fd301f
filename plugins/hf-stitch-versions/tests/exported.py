"""Tiny networks with weights as if trained, their exports to ONNX, and operators of a graph that are made wrong."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from hf_stitch import Adapter
from tests.tiny_networks import LANGUAGE, adapted, build

SCOPES = "pkg.torch.onnx.name_scopes"
Change = Callable[[Any, Any], None]
"""Changes a node of a graph."""


class Logits(nn.Module):
    """What users wrap around a network to export it: only its inputs, and only its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.net(input_ids=input_ids, attention_mask=attention_mask).logits


def trained(model: nn.Module) -> nn.Module:
    """Draw weights for which attention is not uniform, and every operator matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("running_var"):
                value.copy_(0.5 + noise.abs())
            elif value.dim() > 1 and value.is_floating_point():
                value.copy_(noise * (1.5 / (4 if "embed" in name and value.dim() == 2 else value[0].numel()) ** 0.5))
            elif name.endswith(("bias", "running_mean")):
                value.copy_(0.3 * noise)
            elif name.endswith("weight"):
                value.copy_(1 + 0.3 * noise)
    return model.eval()


def network(family: str) -> Adapter:
    """Return a network as if trained."""
    return adapted(family, trained(build(family, 0)))


def export(family: str, a: Adapter, place: Path, *, dynamo: bool, wrap: Any = None) -> Path:
    """Export a network, or what wraps it, with dynamic axes."""
    model = wrap(a.model) if wrap else a.model
    inputs = {name: torch.cat([value, value]) for name, value in a.example.items() if isinstance(value, Tensor)}
    axes = {name: [0, 1] if family in LANGUAGE else [0] for name in inputs}
    if hasattr(a.model, "config"):
        a.model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        if dynamo:
            shapes = {name: dict.fromkeys(found, Dim.DYNAMIC) for name, found in axes.items()}
            torch.onnx.export(model, (), place, kwargs=inputs, dynamo=True, verbose=False, dynamic_shapes=shapes)
        else:
            named = {name: {axis: f"axis{axis}" for axis in found} for name, found in axes.items()}
            torch.onnx.export(model, (inputs,), place, dynamo=False, input_names=list(inputs), dynamic_axes=named)
    return place


def changed(source: Path, target: Path, operator: str, scope: str, change: Change, which: int = 0) -> Path:
    """Write a graph with one node changed."""
    model = onnx.load(source)
    found = [node for node in model.graph.node if node.op_type == operator and _scope(node) == scope]
    change(model.graph, found[which])
    onnx.save(model, target)
    return target


def without_names(source: Path, target: Path) -> Path:
    """Write a graph that tells no modules, as tools that simplify graphs leave it."""
    model = onnx.load(source)
    for node in model.graph.node:
        node.name = ""
        del node.metadata_props[:]
    onnx.save(model, target)
    return target


def _scope(node: Any) -> str:
    for each in node.metadata_props:
        if each.key == SCOPES:
            return str(each.value).split("', '")[-2].strip("[' ")
    return str(node.name).rpartition("/")[0]


# -- what is made wrong ------------------------------------------------------------------------------------------------
def attributes(**new: Any) -> Change:
    """Other attributes."""

    def change(graph: Any, node: Any) -> None:
        kept = [each for each in node.attribute if each.name not in new]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(name, value) for name, value in new.items())])

    return change


def operator(name: str) -> Change:
    """Another operator."""

    def change(graph: Any, node: Any) -> None:
        node.op_type = name

    return change


def reads(place: int, other: int) -> Change:
    """One input twice, instead of two."""

    def change(graph: Any, node: Any) -> None:
        node.input[place] = node.input[other]

    return change


def weight(of: Callable[[Any], Any], place: int | None = None) -> Change:
    """Another weight or constant; without a place the first one that the node reads."""

    def change(graph: Any, node: Any) -> None:
        places = range(len(node.input)) if place is None else [place]
        at = next(each for each in places if _constant(graph, node.input[each]) is not None)
        old = _constant(graph, node.input[at])
        name = f"{node.input[at]} (planted)"
        graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(of(old)).astype(old.dtype), name))
        node.input[at] = name

    return change


def _constant(graph: Any, name: str) -> Any:
    for each in graph.initializer:
        if each.name == name:
            return onnx.numpy_helper.to_array(each)
    for node in graph.node:
        if name in node.output and node.op_type == "Constant":
            return onnx.numpy_helper.to_array(node.attribute[0].t)
        if name in node.output and node.op_type == "Identity":
            return _constant(graph, node.input[0])
    return None
