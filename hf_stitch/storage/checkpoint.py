"""State of a long job in a folder, such that an interrupted job resumes with bit-identical results."""

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
"""Maximal share of the running time spent on saving."""


class Checkpoint:
    """The state of a job in a folder, from which an interrupted job resumes.

    ``job.json`` describes the job and contains the decisions made when it started. ``state-<rank>.safetensors``
    contains the position and intermediate tensors of one process, ``rows-<rank>`` the rows that it keeps in files.

    Attributes:
        folder: The folder.
        lasting: Whether state is saved.
        rows: Folder of the files with rows of this process.

    Args:
        folder: The folder; created if needed.
        rank: Rank of the process.
        lasting: Whether to save state. A job that keeps rows in files needs a folder even without saved state.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     job = Checkpoint(Path(name), rank=0, lasting=True)
        ...     decided = job.begin({"metric": "linear_cka"}, lambda: "minibatch route")
        ...     job.save(3, {"sum": torch.ones(2)})
        ...     again = Checkpoint(Path(name), rank=0, lasting=True)
        ...     again.begin({"metric": "linear_cka"}, lambda: "another route")
        ...     again.load(torch.device("cpu"))
        'minibatch route'
        (3, {'sum': tensor([1., 1.])})
    """

    def __init__(self, folder: Path, rank: int, lasting: bool) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint_dir must be a folder, and {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lasting = folder, lasting
        self.rows = folder / f"rows-{rank}"
        self._about, self._path = folder / "job.json", folder / f"state-{rank}.safetensors"
        self._writes = rank == 0
        self._took, self._saved = 0.0, -math.inf
        if not self._path.exists():
            shutil.rmtree(self.rows, ignore_errors=True)

    def begin(self, recipe: Mapping[str, Any], decide: Callable[[], T]) -> T:
        """Resume the decisions of an interrupted job, or make and save those of a new one.

        Args:
            recipe: Description of the job as JSON values; a job resumes only with the same recipe.
            decide: Makes the decisions of a new job, as JSON values.

        Returns:
            The saved decisions if the folder contains a job, otherwise the return value of ``decide``.

        Raises:
            ValueError: If the folder contains the state of a job with another recipe; the message lists the
                differences.
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
                    f"{self._about.parent} contains the state of another job, which differs in "
                    f"{'; '.join(differences)}. Use another folder, or empty this one"
                )
            return held["decided"]
        decided = decide()
        if self._writes and self.lasting:
            text = json.dumps({"recipe": recipe, "decided": decided}, indent=2)
            write_whole(self._about, lambda path: path.write_text(text, encoding="utf-8"))
        return decided

    def load(self, device: torch.device) -> tuple[int, dict[str, Tensor]] | None:
        """Load the saved state of this process.

        Args:
            device: Device of the tensors.

        Returns:
            The position reached and the tensors saved there; ``None`` if there is no saved state.
        """
        if not self._path.is_file():
            return None
        from safetensors.torch import load_file

        tensors = load_file(self._path, "cpu" if device.type == "cpu" else str(device))  # which knows no "cpu:0"
        return int(tensors.pop("position")), tensors

    def due(self, done: bool) -> bool:
        """Whether to save now.

        Args:
            done: Whether the job is finished.

        Returns:
            True at the end, and whenever saving keeps below :data:`SAVING` of the running time; always False if
            nothing is to be saved.
        """
        return self.lasting and (done or time.monotonic() - self._saved > self._took / SAVING)

    def save(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the state atomically; if the process is killed meanwhile, the previous state stays.

        Args:
            position: The position reached, for example the number of steps or samples.
            tensors: Intermediate results by name.
        """
        from safetensors.torch import save_file

        start = time.monotonic()
        state = {"position": torch.tensor(position), **{key: part.cpu().contiguous() for key, part in tensors.items()}}
        write_whole(self._path, lambda path: save_file(state, path))
        self._saved = time.monotonic()
        self._took = self._saved - start


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options to dotted names."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
