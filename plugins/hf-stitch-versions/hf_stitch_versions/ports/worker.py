"""Run a network of another runtime: ``python worker.py RUNTIME.py PATH FOLDER TRUST``.

This file runs in a child process, in the environment of the runtime: it imports NumPy and the runtime only. Requests
and answers are lines of JSON on stdin and stdout, and arrays are in ``.npz`` files in FOLDER. The first answer contains
what is known about the network. Each request is then a batch of samples; its answer names the file of all events.

A file ``RUNTIME.py`` defines ``Runtime(path, trust)`` with

- ``about``: a dict of ``runtime`` (name and version), ``dtype``, ``config`` (the values that the network was built
  with), ``unseen`` (what the runtime does not show, in sentences), ``padded`` (whether it takes masks), ``inputs``
  (names; empty if it takes token ids only) and optionally ``shapes`` (input -> axes, with ``None`` for any length);
- optionally ``weights(name)``: the weights inside a module as NumPy arrays, by their names in it;
- ``run(inputs, put, with_inputs)``, which returns the events of a batch in order of completion, at last the whole
  network under the name ``""``. ``inputs`` and the values of ``put`` (call -> place -> array) are NumPy arrays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Call = tuple[str, int]
"""Name of a module, and the number of its call, from 0."""


class Seen(NamedTuple):
    """One call of a module."""

    call: Call
    kind: str
    parent: Call | None
    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any]


class Taps:
    """Calls of the modules of a network, recorded by subclasses of their classes.

    Args:
        modules: Name -> module. Calling it runs ``__call__`` of its class.
        is_array: Returns whether a value is an array of the runtime.
        put: Call -> place -> array that replaces an output of the call.
        with_inputs: Calls with inputs in their events.
        to_numpy: Converts an array of the runtime.
        like: Converts a NumPy array to the runtime, in the shape and the dtype of a second array.
    """

    def __init__(self, modules: Mapping[str, Any], is_array: Any, put: Mapping[Call, Mapping[str, Any]],
                 with_inputs: Sequence[Call], to_numpy: Any, like: Any) -> None:  # fmt: skip
        self.seen: list[Seen] = []
        self._is_array, self._put, self._with_inputs = is_array, put, set(with_inputs)
        self._to_numpy, self._like = to_numpy, like
        self._running: list[Call] = []
        self._calls: dict[str, int] = {}
        self._modules = dict(modules)
        self._classes = {name: type(module) for name, module in self._modules.items()}

    def __enter__(self) -> Taps:
        for name, module in self._modules.items():
            original = self._classes[name]

            def tapped(this: Any, *args: Any, _name: str = name, _original: type = original, **kwargs: Any) -> Any:
                return self._tapped(_name, _original, this, args, kwargs)

            module.__class__ = type(original.__name__, (original,), {"__call__": tapped})
        return self

    def __exit__(self, *_: object) -> None:
        for name, module in self._modules.items():
            module.__class__ = self._classes[name]

    def _tapped(self, name: str, original: type, module: Any, args: Any, kwargs: Any) -> Any:
        call = name, self._calls.get(name, 0)
        self._calls[name] = call[1] + 1
        parent = self._running[-1] if self._running else None
        self._running.append(call)
        inputs = self._found((args, kwargs)) if call in self._with_inputs else {}
        try:
            output = original.__call__(module, *args, **kwargs)
        finally:
            self._running.pop()
        if call in self._put:
            output = self._replaced(output, self._put[call])
        self.seen.append(Seen(call, original.__name__, parent, self._found(output), inputs))
        return output

    def _found(self, value: Any, place: str = "") -> dict[str, Any]:
        """Return the arrays in nested tuples, lists and mappings as NumPy arrays, by place."""
        if self._is_array(value):
            return {place: self._to_numpy(value)}
        if not isinstance(value, (tuple, list, Mapping)):
            return {}
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        found = {}
        for key, item in items:
            found.update(self._found(item, f"{place}.{key}".strip(".")))
        return found

    def _replaced(self, value: Any, new: Mapping[str, Any], place: str = "") -> Any:
        """Return a value with some of its arrays replaced; a single array takes the first array of the same size."""
        if self._is_array(value):
            size = int(np.prod(value.shape))
            single = (array for array in new.values() if array.size == size)
            array = new.get(place) if place else next(single, None)
            return value if array is None or array.size != size else self._like(array, value)
        if type(value) in (tuple, list):
            parts = (self._replaced(item, new, f"{place}.{key}".strip(".")) for key, item in enumerate(value))
            return type(value)(parts)
        return value


def main(runtime: str, path: str, folder: str, trust: str) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    def failed(error: BaseException) -> dict[str, str]:
        traceback.print_exc()
        return {"error": type(error).__name__, "message": str(error)}

    try:
        spec = importlib.util.spec_from_file_location("hf_stitch_runtime", runtime)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            answer({**failed(error), "error": "not installed"})
            return
        network = module.Runtime(path, trust == "True")
        answer({"about": network.about})
    except BaseException as error:  # whatever a runtime raises is an answer
        answer(failed(error))
        return
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        file = str(Path(folder, f"{number}.npz"))
        try:
            if "weights" in request:
                weights = network.weights(request["weights"]) if hasattr(network, "weights") else {}
                np.savez(file, **weights)
                answer({"names": list(weights), "arrays": file})
                continue
            with np.load(request["arrays"], allow_pickle=False) as arrays:
                inputs = {name: arrays[f"inputs/{name}"] for name in request["inputs"]}
                put = {
                    (name, call): {place: arrays[key] for place, key in places.items()}
                    for name, call, places in request["put"]
                }
            with_inputs = [(name, call) for name, call in request["with_inputs"]]
            events, kept = list[Any](), dict[str, Any]()
            for seen in network.run(inputs, put, with_inputs):
                sides = []
                for values in (seen.outputs, seen.inputs):
                    sides.append({place: f"{len(kept) + i}" for i, place in enumerate(values)})
                    kept |= dict(zip(sides[-1].values(), values.values(), strict=True))
                events.append([*seen.call, seen.kind, seen.parent, *sides])
            np.savez(file, **kept)
            answer({"events": events, "arrays": file})
        except BaseException as error:
            answer(failed(error))


if __name__ == "__main__":
    sys.path.pop(0)  # runtimes are named as the packages that they import
    sys.modules["worker"] = sys.modules["__main__"]  # runtimes import what is shared from here
    main(*sys.argv[1:])
