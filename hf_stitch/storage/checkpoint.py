"""Checkpoints of long jobs in a folder: an interrupted job resumes with bit-identical results."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_stitch.storage.files import readable_errors, sweep, write_whole
from hf_stitch.storage.tensors import read_tensors, write_tensors

T = TypeVar("T")

SAVING = 0.05
"""Maximal share of the running time spent on saving."""


class Checkpoint:
    """State of a job in a folder, for resuming an interrupted job.

    ``job.json`` describes the job and contains the decisions made at its start. ``state-<rank>.safetensors`` contains
    the position and intermediate tensors of one process, ``rows-<rank>`` its rows. Each file has a digest; a file with
    another digest raises an error that names the folder to delete.
    """

    def __init__(self, folder: Path, rank: int, lasting: bool) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint_dir must be a folder, but {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        self.folder, self.lasting = folder, lasting
        self.rows = folder / f"rows-{rank}"
        self._job_file, self._path = folder / "job.json", folder / f"state-{rank}.safetensors"
        self._writes = rank == 0
        self._save_seconds, self._last_save = 0.0, -math.inf
        if not self._path.exists():
            shutil.rmtree(self.rows, ignore_errors=True)

    def begin(self, recipe: Mapping[str, Any], decide: Callable[[], T]) -> T:
        """Return the decisions of an interrupted job, or make and save the decisions of a new job."""
        if self._job_file.is_file():
            with self._readable(self._job_file):
                saved_job = json.loads(self._job_file.read_bytes())
                if saved_job.pop("digest", None) != _digest(saved_job):
                    raise ValueError("it is damaged, or was written by version 0.2 or earlier")
                saved_recipe, decisions = _flat(saved_job["recipe"]), saved_job["decided"]
            recipe_now = _flat(recipe)
            differences = [
                f"{key} ({_short(saved_recipe.get(key))}, now {_short(recipe_now.get(key))})"
                for key in {**saved_recipe, **recipe_now}
                if saved_recipe.get(key) != recipe_now.get(key)
            ]
            if differences:
                raise ValueError(
                    f"{self._job_file.parent} contains the state of a different job: {'; '.join(differences)}. Use "
                    "another folder, or empty this one"
                )
        else:
            decisions = decide()
        job = {"recipe": recipe, "decided": decisions}
        # Other processes may have begun before the first one wrote its decisions.
        self._key = f"{self._path.name} of {_digest(job if self._writes else recipe)}"
        if self._writes and self.lasting and not self._job_file.is_file():
            text = json.dumps({**job, "digest": _digest(job)}, indent=2)
            write_whole(self._job_file, lambda path: path.write_text(text, encoding="utf-8"))
        return decisions

    def load(
        self, device: torch.device, positions: range, restore: Callable[[int, dict[str, Tensor]], object]
    ) -> int | None:
        """Load the saved state of this process."""
        if not self._path.is_file():
            return None
        with self._readable(self._path):
            tensors, metadata = read_tensors(self._path, self._key)
            position: int = metadata["position"]
            if position not in positions:
                raise ValueError(f"its position must be from {positions[0]} to {positions[-1]}, got {position}")
            restore(position, {name: tensor.to(device, copy=True) for name, tensor in tensors.items()})
        return position

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        """Turn any error about a file into one that names the folder to delete."""
        remedy = f"delete the folder {self.folder} and run again"
        try:
            with readable_errors(f"{path} could not be read", f"make it readable, or {remedy}"):
                yield
        except OSError:
            raise
        except Exception as error:  # from JSON, torch, or the job, for contents it did not write
            raise ValueError(f"{path} was not saved by this job ({error}); {remedy}") from error

    def due(self, done: bool) -> bool:
        """Return whether to save now: at the end, and while saving takes less than :data:`SAVING` of the time."""
        return self.lasting and (done or time.monotonic() - self._last_save > self._save_seconds / SAVING)

    def save(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the state atomically; if the process is killed, the previous state stays."""
        start = time.monotonic()
        write_tensors(self._path, self._key, tensors, {"position": position})
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start


def _digest(values: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}"


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, setting in recipe.items():
        name = f"{prefix}{key}"
        flattened |= _flat(setting, f"{name}.") if isinstance(setting, Mapping) and setting else {name: setting}
    return flattened


def _short(setting: Any) -> str:
    text = json.dumps(setting)
    return text if len(text) <= 200 else f"{text[:200]}…"
