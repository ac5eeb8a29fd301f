"""Network converted to OpenVINO, computed on the CPU in float32. Modules are inferred from names of operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from worker import Call, Seen

ROOT = "__module."
"""Prefix of the names of operations: the converter writes it before the name of a module."""

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
"""Some processors otherwise compute in bfloat16."""

SILENT = {"Constant", "Parameter", "Result", "Convert"}
"""Operations that do not belong to the computation of a module."""


class Runtime:
    """Graph of OpenVINO. Values of operations become outputs of the graph; constants replace them."""

    def __init__(self, path: str, trust: bool) -> None:
        if Path(path).is_dir():
            raise FileNotFoundError(f"expected the .xml file of a model, got the folder {path}")
        self._core = openvino.Core()
        self._model = self._core.read_model(path)
        constants = [op for op in self._model.get_ordered_ops() if op.get_type_name() == "Constant"]
        kinds = {op.get_element_type().get_type_name() for op in constants}
        dtypes = {"f16": "float16", "bf16": "bfloat16"}
        integers = sorted(kinds & {"i4", "u4", "i8", "u8", "nf4"})
        self._calls = dict(self._modules())
        self._compiled: tuple[Any, Any] | None = None
        unnamed = ["the graph does not contain the names of modules: only its outputs are compared"]
        self.about = {
            "runtime": f"OpenVINO {openvino.__version__.partition('-')[0]}", "config": {}, "padded": True,
            "dtype": [dtypes[kind] for kind in sorted(kinds) if kind in dtypes],
            "inputs": [self._name(each) for each in self._model.inputs],
            "shapes": {self._name(each): axes(each.partial_shape) for each in self._model.inputs
                       if each.partial_shape.rank.is_static},
            "quantized": f"some weights are integers ({', '.join(integers)})" if integers else "",
            "unseen": ["the CPU plugin computed in float32, also where it would choose a coarser dtype",
                       *([] if self._calls else unnamed)],
        }  # fmt: skip

    @staticmethod
    def _name(port: Any) -> str:
        return str(min(port.get_names(), key=len))

    def _modules(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each module with the operations that leave it, in the order in which modules end."""
        inside: dict[str, list[Any]] = {}
        places = {op.get_friendly_name(): place for place, op in enumerate(self._model.get_ordered_ops())}
        for op in self._model.get_ordered_ops():
            name = op.get_friendly_name()
            if name.startswith(ROOT) and op.get_type_name() not in SILENT:
                parts = name.removeprefix(ROOT).partition("/")[0].split(".")
                for length in range(1, len(parts) + 1):
                    inside.setdefault(".".join(parts[:length]), []).append(op)
        found = {}
        for module, ops in inside.items():
            own = {op.get_friendly_name() for op in ops}
            leaving = [
                op.get_friendly_name() for op in ops
                if op.get_output_size() == 1 and op.get_output_element_type(0).is_real()
                and any(each.get_node().get_friendly_name() not in own for each in op.output(0).get_target_inputs())
            ]  # fmt: skip
            if leaving:
                found[module] = leaving
        yield from sorted(found.items(), key=lambda each: (places[each[1][-1]], -each[0].count(".")))

    def run(
        self, inputs: Mapping[str, Any], put: Mapping[Call, Mapping[str, Any]], with_inputs: Sequence[Call]
    ) -> list[Seen]:
        """Run the graph."""
        values, final = self._values(inputs, {})
        constants: dict[str, Any] = {}
        for (module, _), new in put.items():
            free = [name for name in self._calls.get(module, []) if name in values]
            for array in new.values():
                fitting = [name for name in free if values[name].size == array.size]
                nearest = min(fitting, key=lambda name: gap(values[name], array), default=None)
                if nearest is not None:
                    constants[nearest] = array.reshape(values[nearest].shape).astype(values[nearest].dtype)
                    free.remove(nearest)
        if constants:
            values, final = self._values(inputs, constants)
        calls = [
            Seen((module, 0), "operations", None, {name: values[name] for name in names}, {})
            for module, names in self._calls.items()
        ]
        return [*calls, Seen(("", 0), "graph", None, put.get(("", 0)) or final, {})]

    def _values(self, inputs: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of operations and the outputs of the graph, by name."""
        watched = list(dict.fromkeys(name for names in self._calls.values() for name in names))
        compiled = None if constants else self._compiled
        if compiled is None:
            model = self._model.clone()
            ops = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
            for name, array in constants.items():
                new = openvino.opset13.constant(array)
                for reader in list(ops[name].output(0).get_target_inputs()):
                    reader.replace_source_output(new.output(0))
            returned = {source(port).get_friendly_name() for port in model.outputs}
            model.add_outputs([ops[name].output(0) for name in watched if name not in returned])
            compiled = model, self._core.compile_model(model, "CPU", EXACT)
            if not constants:
                self._compiled = compiled
        model, network = compiled
        arrays = network(dict(inputs))
        outputs = [np.array(arrays[place]) for place in range(len(model.outputs))]
        values = {source(port).get_friendly_name(): value for port, value in zip(model.outputs, outputs, strict=True)}
        names = [min(port.get_names(), key=len, default=str(place)) for place, port in enumerate(self._model.outputs)]
        return values | dict(constants), dict(zip(names, outputs, strict=False))


def axes(shape: Any) -> list[int | None]:
    """Return the fixed length of every axis; ``None`` for the others."""
    return [axis.get_length() if axis.is_static else None for axis in shape]


def source(port: Any) -> Any:
    """Return the operation that computes an output of a graph."""
    return port.get_node().input_value(0).get_node()


def gap(one: Any, two: Any) -> float:
    """Return the distance of two arrays of the same size."""
    return float(np.linalg.norm(one.ravel().astype(float) - two.ravel().astype(float)))
