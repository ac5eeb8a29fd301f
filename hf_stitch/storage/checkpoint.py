"""What a long job has done so far, in a folder, such that an interrupted one goes on to the same bits."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_stitch.storage.files import write_whole

T = TypeVar("T")

SAVING = 0.05
"""Share of the time that saving may take."""


class Checkpoint:
    """The state of a job in a folder, so that an interrupted one goes on.

    ``job.json`` says what the job is and what was decided when it began, ``state-<rank>.safetensors`` holds what a
    process has done and up to where, ``rows-<rank>`` rows that it keeps in files.

    Attributes:
        folder: Where.
        lasting: Whether anything is saved.

    Args:
        folder: Where; made if needed.
        rank: Of the process.
        lasting: Whether anything is saved; a job that keeps rows needs a folder anyway.
    """

    def __init__(self, folder: Path, rank: int, lasting: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lasting = folder, lasting
        self.rows = folder / f"rows-{rank}"
        self._about, self._path = folder / "job.json", folder / f"state-{rank}.safetensors"
        self._writes = rank == 0
        self._took, self._saved = 0.0, -math.inf
        if not self._path.exists():
            shutil.rmtree(self.rows, ignore_errors=True)

    def begin(self, recipe: Mapping[str, Any], decide: Callable[[], T]) -> T:
        """What was decided when the job that was interrupted began, or what is decided for a new one; JSON values.

        Raises:
            ValueError: If the folder holds another job; the message says what differs.
        """
        if self._about.is_file():
            held = json.loads(self._about.read_text(encoding="utf-8"))
            before, now = _flat(held["recipe"]), _flat(recipe)
            differences = [
                f"{key} ({_short(before.get(key))}, now {_short(now.get(key))})"
                for key in {**before, **now}
                if before.get(key) != now.get(key)
            ]
            if differences:
                raise ValueError(
                    f"{self._about.parent} holds the state of another job, which differs in {'; '.join(differences)}. "
                    "Use another folder, or empty this one"
                )
            return held["decided"]
        decided = decide()
        if self._writes and self.lasting:
            text = json.dumps({"recipe": recipe, "decided": decided}, indent=2)
            write_whole(self._about, lambda path: path.write_text(text, encoding="utf-8"))
        return decided

    def load(self, device: torch.device) -> tuple[int, dict[str, Tensor]] | None:
        """The position that was reached, and what had been collected until there."""
        if not self._path.is_file():
            return None
        from safetensors.torch import load_file

        tensors = load_file(self._path, str(device))
        return int(tensors.pop("position")), tensors

    def due(self, done: bool) -> bool:
        """Whether to save now: at the end, and as often as takes little of the time."""
        return self.lasting and (done or time.monotonic() - self._saved > self._took / SAVING)

    def save(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state; a process killed meanwhile leaves the one before."""
        from safetensors.torch import save_file

        start = time.monotonic()
        state = {"position": torch.tensor(position), **{key: part.cpu().contiguous() for key, part in tensors.items()}}
        write_whole(self._path, lambda path: save_file(state, path))
        self._saved = time.monotonic()
        self._took = self._saved - start


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options inside options by dotted names."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
