"""Network exported to ONNX, computed by ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch_versions.recording import Event, Key, Values, is_value, values_of
from hf_stitch_versions.sameness.distances import partners
from hf_stitch_versions.sameness.graphs import calls_of, integers_of, read
from hf_stitch_versions.sources import Feed, Source, check_shape, told_as

DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64}
"""ONNX number of a dtype -> dtype, for all dtypes that ONNX Runtime computes in on the CPU."""

FLOATS = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(double)": 11}
"""ONNX Runtime name of a dtype -> its ONNX number."""

FOLDER = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime option: folder of external weights."""

DYNAMIC = (
    "Export it with dynamic axes for samples and tokens (dynamic_shapes, or dynamic_axes with dynamo=False), or pass "
    "data of this shape, and its first axis as batch_size"
)


class Onnx(Source):
    """ONNX file with modules inferred from the names or the metadata of its nodes.

    The outputs of a module are the values that leave its nodes. In files without these names, every value counts as a
    module. Inner values are computed without graph optimisations. The outputs of the network come from a session with
    the default optimisations, as users run it. If only the outputs differ, the optimisations are the cause.

    Args:
        path: The file. External weights are read from its folder.

    Raises:
        ImportError: If onnx or onnxruntime are not installed.
        OSError: If the file or a file of its weights is missing.
        ValueError: If it is not an ONNX file.
    """

    inferred: ClassVar[bool] = True
    quantized: str = ""

    def __init__(self, path: Path) -> None:
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise ImportError('ONNX files require more packages: pip install "hf-stitch-versions[onnx]"') from error
        self.path, self._runtime = path, onnxruntime
        self.modules: Mapping[str, nn.Module] = {}
        self._sessions = dict[tuple[frozenset[str], bool], Any]()
        self._numpy = onnx.helper.tensor_dtype_to_np_dtype
        self._model = read(path)
        graph = self._model.graph
        weights = {proto.name for proto in graph.initializer}
        self._inputs = {proto.name: proto.type.tensor_type for proto in graph.input if proto.name not in weights}
        self._outputs = [proto.name for proto in graph.output]
        self._calls = calls_of(graph)
        self.quantized = told_as(*integers_of(graph))
        kinds = [*(w.data_type for w in graph.initializer), *(o.type.tensor_type.elem_type for o in graph.output)]
        dtypes = {DTYPES[kind] for kind in kinds if kind in DTYPES}
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def __str__(self) -> str:
        return self.path.name

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Run the graph. Values in ``put`` replace values of the graph, by becoming its inputs."""
        arguments, new_values = self._given(feed), dict[str, Tensor]()
        replaced_output = (put or {}).get(("", 0), {})
        if put:
            computed = self._run(arguments, {})
            for call in self._calls:
                values = put.get(call.key, {})
                pairs = partners(values, {name: computed[name] for name in call.outputs if name in computed})
                new_values |= {name: values[place].to(computed[name]) for place, name in pairs.items()
                        if values[place].numel() == computed[name].numel()}  # fmt: skip
        values = self._run(arguments, {name: new.reshape(computed[name].shape) for name, new in new_values.items()})
        for call in self._calls:
            outputs, inputs = ({n: values[n] for n in names if n in values} for names in (call.outputs, call.inputs))
            if outputs := values_of(outputs):
                see(Event(call.key, call.kind, outputs, None, values_of(inputs) if call.key in with_inputs else {}))
        final = values if new_values else self._run(arguments, {}, watched=False)
        outputs = values_of({name: final[name] for name in self._outputs if name in final})
        see(Event(("", 0), "graph", replaced_output or outputs))

    def _given(self, feed: Feed) -> dict[str, Tensor]:
        """Return the inputs of the graph, by name."""
        inputs = {name: value for name, value in feed.arguments.items() if isinstance(value, Tensor)}
        missing = [name for name in self._inputs if name not in inputs]
        unused = [name for name in inputs if name not in self._inputs and "mask" not in name]
        if len(missing) == len(unused) == 1:
            inputs[missing.pop()] = inputs[unused[0]]
        if missing:
            raise ValueError(
                f"{self} requires the inputs {', '.join(missing)}, but the first network has only {', '.join(inputs)}. "
                "Export it with these input names"
            )
        for name, kind in self._inputs.items():
            if kind.HasField("shape"):
                axes = [axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim]
                check_shape(self, name, inputs[name], axes, DYNAMIC)
        return {
            name: torch.from_numpy(inputs[name].cpu().numpy().astype(self._numpy(kind.elem_type)))
            for name, kind in self._inputs.items()
        }

    def _run(
        self, arguments: Mapping[str, Tensor], new_values: Mapping[str, Tensor], *, watched: bool = True
    ) -> dict[str, Tensor]:
        """Return floating-point values of the graph by name: inputs and outputs of modules, or of the graph only."""
        session = self._session(frozenset(new_values), watched)
        arrays = {name: value.numpy() for name, value in {**arguments, **new_values}.items()}
        names = [
            output.name for output in session.get_outputs() if output.type in FLOATS and output.name not in new_values
        ]
        try:
            computed = session.run(names, arrays) if names else []
        except Exception as error:  # exceptions of the runtime have no common class
            raise ValueError(f"{self} does not run on the inputs of the first network: {error}. {DYNAMIC}") from error
        values = {name: torch.from_numpy(value) for name, value in zip(names, computed, strict=True)}
        return {name: value for name, value in {**arguments, **values, **new_values}.items() if is_value(value)}

    def _session(self, replaced: frozenset[str], watched: bool) -> Any:
        """Return a session of the graph with some values turned into inputs."""
        if (replaced, watched) in self._sessions:
            return self._sessions[replaced, watched]
        model = type(self._model)()
        model.CopyFrom(self._model)
        kinds = (
            {output.name: output.type for output in self._session(frozenset(), watched=True).get_outputs()}
            if replaced
            else {}
        )
        for node in model.graph.node:
            node.output[:] = [f"{name} (cut)" if name in replaced else name for name in node.output]
        for name in replaced:
            model.graph.input.add(name=name).type.tensor_type.elem_type = FLOATS[kinds[name]]
        watched_names = {name for call in self._calls for name in (*call.outputs, *call.inputs)} if watched else set()
        for name in sorted(watched_names - {*self._inputs, *self._outputs}):
            model.graph.output.add(name=name)
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(FOLDER, str(self.path.parent.resolve()))
        if watched:
            options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = self._runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"ONNX Runtime cannot load {self}: {error}") from error
        self._sessions = {key: output for key, output in self._sessions.items() if not key[0]} | {
            (replaced, watched): session
        }
        return session
