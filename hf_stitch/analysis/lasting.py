"""A comparison over several processes, and one that survives an interruption."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..adapters import Adapter, load

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

SAVING = 0.05
"""Share of the time that saving the state of a comparison may take."""


@dataclass(frozen=True)
class Processes:
    """The processes that share the samples; one, if there is no accelerator."""

    accelerator: Accelerator | None

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> Processes:
        """Those that are given, or those that were launched."""
        if accelerator is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            accelerator = Accelerator()
        return cls(accelerator)

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which one this is."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def part(self, n: int) -> tuple[int, int]:
        """This process's share of n samples, from where to where: none is left out, none comes twice."""
        return n * self.rank // self.count, n * (self.rank + 1) // self.count

    def load(self, model: str | nn.Module | Adapter) -> Adapter:
        """An adapter; a model that is loaded here goes to the device of this process."""
        adapter = load(model)
        if isinstance(model, str) and self.accelerator is not None:
            adapter.model.to(self.accelerator.device)
        return adapter

    def agree(self, value: T) -> T:
        """What the first process says."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


class State:
    """The state of a comparison in a folder, so that an interrupted one goes on.

    ``comparison.json`` says what is compared and by which routes, ``state-<rank>.safetensors`` holds what a process
    has collected and up to where, ``rows-<rank>`` rows.

    Args:
        folder: Where.
        rank: Of the process.
        lasting: Whether anything is saved; a comparison that keeps rows needs a folder anyway.
    """

    def __init__(self, folder: Path, rank: int, lasting: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / f"rows-{rank}"
        self._about, self._path = folder / "comparison.json", folder / f"state-{rank}.safetensors"
        self._writes, self._lasting = rank == 0, lasting
        self._took, self._saved = 0.0, -math.inf
        if not self._path.exists():
            shutil.rmtree(self.rows, ignore_errors=True)

    def begin(self, recipe: Mapping[str, Any], routes: Callable[[], dict[str, str]]) -> dict[str, str]:
        """The routes of the comparison that was interrupted, or those of a new one.

        Raises:
            ValueError: If the folder holds another comparison; the message says what differs.
        """
        if self._about.is_file():
            held = json.loads(self._about.read_text(encoding="utf-8"))
            differences = [
                f"{key} ({_short(held['recipe'].get(key))}, now {_short(recipe.get(key))})"
                for key in {**held["recipe"], **recipe}
                if held["recipe"].get(key) != recipe.get(key)
            ]
            if differences:
                raise ValueError(
                    f"{self._about.parent} holds the state of another comparison, which differs in "
                    f"{'; '.join(differences)}. Use another folder, or empty this one"
                )
            return held["routes"]
        taken = routes()
        if self._writes and self._lasting:
            text = json.dumps({"recipe": recipe, "routes": taken}, indent=2)
            _replace(self._about, lambda path: path.write_text(text, encoding="utf-8"))
        return taken

    def load(self, device: torch.device) -> tuple[int, dict[str, Tensor]] | None:
        """The position that was reached, and what had been collected until there."""
        if not self._path.is_file():
            return None
        from safetensors.torch import load_file

        tensors = load_file(self._path, str(device))
        return int(tensors.pop("position")), tensors

    def due(self, done: bool) -> bool:
        """Whether to save now: at the end, and as often as takes little of the time."""
        return self._lasting and (done or time.monotonic() - self._saved > self._took / SAVING)

    def save(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state; a process killed meanwhile leaves the one before."""
        from safetensors.torch import save_file

        start = time.monotonic()
        state = {"position": torch.tensor(position), **{key: part.cpu().contiguous() for key, part in tensors.items()}}
        _replace(self._path, lambda path: save_file(state, path))
        self._saved = time.monotonic()
        self._took = self._saved - start


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file such that it is there whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    unfinished.replace(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
