"""Source of the values of a network in another runtime, which runs in a child process."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch_versions.recording import Event, Key, Values, values_of
from hf_stitch_versions.sources import Facts, Feed, Source, check_shape

FOLDER = Path(__file__).parent

SECONDS = 600.0
"""Time limit of loading a network, and of each batch."""

PACKAGES = {"mlx": "mlx[cpu] mlx-lm", "openvino": "openvino", "keras": "keras-hub", "ctranslate2": "ctranslate2"}
"""Runtime -> packages that it requires."""

FIXED = "Convert it with dynamic shapes, or pass data of this shape, and its first axis as batch_size"
"""Advice for a network with fixed shapes."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


class PortError(RuntimeError):
    """The process of another runtime died or exceeded its time limit, or the files of its network changed."""


class Port(Source):
    """Network in another runtime.

    Args:
        runtime: ``"mlx"``, ``"openvino"``, ``"keras"`` or ``"ctranslate2"``.
        path: Its file or folder.
        python: Interpreter of the environment of the runtime; default: the running one.
        trust: Whether code inside the file may run.
        seconds: Time limit of loading, and of each batch.

    Raises:
        FileNotFoundError: If the interpreter does not exist.
        ImportError: If the runtime is not installed.
        PortError: If the process dies or exceeds the time limit, or the files change later.
        ValueError: If the runtime cannot load the network.
    """

    inferred: ClassVar[bool] = True  # without masks, and modules may be inferred from names
    quantized: str = ""

    def __init__(
        self, runtime: str, path: Path, *, python: str | None = None, trust: bool = False, seconds: float = SECONDS
    ) -> None:
        self.runtime, self.path, self.seconds = runtime, path, seconds
        self.modules: Mapping[str, nn.Module] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hf-stitch-")
        self._errors = Path(self._folder.name, "errors.txt")
        source = FOLDER / "runtimes" / f"{runtime}.py"
        command = [python or sys.executable, FOLDER / "worker.py", source, path, self._folder.name, str(trust)]
        if python and shutil.which(python) is None:
            raise FileNotFoundError(f"expected an interpreter for {runtime}, but {python} does not exist or run")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, encoding="utf-8",
            )  # fmt: skip
        weakref.finalize(self, _end, self._process)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        about = self._answer("loading")["about"]
        self._files = _stamps(path)
        self._inputs = about["inputs"]
        self._shapes: Mapping[str, list[int | None]] = about.get("shapes", {})
        self.facts = Facts(about["runtime"], about["config"], tuple(about["unseen"]), about["padded"])
        self.quantized = about.get("quantized", "")
        found = [DTYPES[name] for name in about["dtype"] if name in DTYPES]
        self.dtype = max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def __str__(self) -> str:
        return f"{self.runtime}:{self.path.name}"

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Run the network."""
        for key, kind, parent, outputs, inputs in self._run(self._given(feed), put or {}, with_inputs):
            see(Event(key, kind, values_of(outputs), parent, values_of(inputs)))

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights inside a module, by their names in it; empty if the runtime does not show them."""
        answer = self._ask({"weights": name})
        with np.load(answer["arrays"], allow_pickle=False) as kept:
            weights = {each: torch.from_numpy(kept[each]) for each in answer["names"]}
        Path(answer["arrays"]).unlink()
        return weights

    def _given(self, feed: Feed) -> dict[str, Tensor]:
        """Return the inputs of the network, by name."""
        tensors = {name: value.cpu() for name, value in feed.arguments.items() if isinstance(value, Tensor)}
        names = self._inputs or [name for name in tensors if "mask" not in name][:1]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(
                f"{self} requires the inputs {', '.join(missing)}, but the first network has only {', '.join(tensors)}"
            )
        for name, axes in self._shapes.items():
            check_shape(self, name, tensors[name], axes, FIXED)
        return {name: tensors[name] for name in names}

    def _run(
        self, inputs: Mapping[str, Tensor], put: Mapping[Key, Values], with_inputs: Collection[Key]
    ) -> list[_Call]:
        """Run a batch in the process."""
        arrays = {f"inputs/{name}": _array(value) for name, value in inputs.items()}
        wanted = []
        for number, ((name, call), values) in enumerate(put.items()):
            keys = {place: f"put/{number}/{place}" for place in values}
            arrays |= {keys[place]: _array(value) for place, value in values.items()}
            wanted.append([name, call, keys])
        file = Path(self._folder.name, "request.npz")
        np.savez(file, **arrays)
        request = {"inputs": list(inputs), "put": wanted, "with_inputs": list(with_inputs), "arrays": str(file)}
        answer = self._ask(request)
        with np.load(answer["arrays"], allow_pickle=False) as kept:

            def tensors(places: Mapping[str, str]) -> dict[str, Tensor]:
                return {place: torch.from_numpy(kept[key]) for place, key in places.items()}

            calls = [
                ((name, call), kind, None if parent is None else (parent[0], parent[1]), tensors(out), tensors(into))
                for name, call, kind, parent, out, into in answer["events"]
            ]
        Path(answer["arrays"]).unlink()
        return calls

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for the answer."""
        if _stamps(self.path) != self._files:
            raise PortError(f"the files of {self} changed during the comparison; compare it again")
        assert self._process.stdin is not None
        with suppress(OSError):  # of a process that has ended: the missing answer is the error
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer("running")

    def _answer(self, doing: str) -> dict[str, Any]:
        """Wait for an answer of the process."""
        try:
            line = self._lines.get(timeout=self.seconds)
        except queue.Empty:
            self._process.kill()
            raise PortError(f"{self} exceeded its limit of {self.seconds:g} s while {doing}") from None
        if not line:
            status = self._process.wait()
            last = "".join(self._errors.read_text("utf-8", "replace").strip().splitlines()[-1:])
            raise PortError(f"the process of {self} ended with status {status} while {doing}{f': {last}' * bool(last)}")
        content: dict[str, Any] = json.loads(line)
        if content.get("error") == "not installed":
            raise ImportError(
                f"{self} requires more packages: pip install {PACKAGES[self.runtime]} ({content['message']}). They may "
                f"be in another environment: python={{{self.runtime!r}: '…/bin/python'}}, or --python "
                f"{self.runtime}=…/bin/python"
            )
        if "error" in content:
            raise ValueError(f"{self} failed while {doing}: {content['error']}: {content['message']}")
        return content


_Call = tuple[Key, str, Key | None, dict[str, Tensor], dict[str, Tensor]]
"""Call, class, parent, outputs and inputs."""


def _stamps(path: Path) -> list[tuple[Path, int, int]]:
    """Return names, sizes and times of the files in a folder, or of a file and the weights of OpenVINO beside it."""
    files = path.iterdir() if path.is_dir() else [path, path.with_suffix(".bin")]
    return sorted((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


def _end(process: subprocess.Popen[str]) -> None:
    """End the process of a network that is no longer used."""
    process.kill()
    process.wait()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Pass the answers of a process on, and an empty line at the end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _array(value: Tensor) -> Any:
    """Return a tensor as a NumPy array; NumPy has no bfloat16."""
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()
