"""Networks with weights offloaded by accelerate to the disk or the CPU.

Offloaded weights are on the meta device until a hook of accelerate loads them for the forward of their module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def is_offloaded(model: nn.Module) -> bool:
    """Return whether weights are offloaded and loaded by hooks."""
    state = State(model)
    return any(state.is_meta(name) and not state.lacks(name) for name in state)


class State(Mapping[str, Tensor]):
    """The ``state_dict`` of a model; reading an offloaded entry loads it without caching."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.entries = model, model.state_dict()
        self.described = {name: value.to("meta") for name, value in self.entries.items() if isinstance(value, Tensor)}

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.entries)

    def __getitem__(self, name: str) -> Tensor:
        """Return an entry; entries without stored values stay on the meta device."""
        value: Tensor = self.entries[name]
        source = self._source(name)
        return value if source is None else source[name.rpartition(".")[2]].to(value.dtype)

    def lacks(self, name: str) -> bool:
        """Return whether an entry is on the meta device without stored values."""
        return self.is_meta(name) and self._source(name) is None

    def is_meta(self, name: str) -> bool:
        """Return whether an entry of the ``state_dict`` is a tensor on the meta device."""
        return bool(getattr(self.entries[name], "is_meta", False))

    def _source(self, name: str) -> Mapping[str, Tensor] | None:
        """Return the storage of an offloaded entry; ``None`` for other entries."""
        path, _, local = name.rpartition(".")
        if not self.is_meta(name):
            return None
        for hook in hooks_of(self._model.get_submodule(path)):
            if hook.weights_map is not None and local in hook.weights_map:
                weights: Mapping[str, Tensor] = hook.weights_map
                return weights
        return None


def shared(model: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``, so that a copy of an offloaded model shares weights and their storage."""
    objects: list[Any] = list(model.parameters())
    for module in model.modules():
        for hook in hooks_of(module):
            objects += [hook.weights_map, hook.tied_params_map]
    return {id(value): value for value in objects if value is not None}


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the accelerate hooks that load weights of a module, or move its inputs to their device."""
    outer = getattr(module, "_hf_hook", None)
    return [hook for hook in getattr(outer, "hooks", (outer,)) if hasattr(hook, "weights_map")]
