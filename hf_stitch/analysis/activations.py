"""Activations at hand, of networks that ran before or elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters.base import LayerCallback
from hf_stitch.data import Id
from hf_stitch.registry import did_you_mean
from hf_stitch.representation import POOLINGS, Pooling, Representation, pooling_from_1

ABOUT = "activations.json"
RESERVED = ("ids", "mask", "about")


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations at hand: of every layer those of the same samples, in the same order.

    Attributes:
        values: By layer ``(n, d)``, a vector for each sample, or ``(n, positions, d)``.
        ids: The id of every sample.
        pooling: The pooling by which vectors were made of what the network said; ``None`` if that is not known.
        mask: ``(n, positions)`` bool, true where a token is real; ``None``: all are.
        grids: Height and width of the grid that the positions of a layer form, where they do.

    Raises:
        ValueError: If there are no layers, shapes do not fit, values are no real floating-point numbers or ids repeat.

    Example:
        >>> saved = Activations({"layer1": torch.randn(3, 8), "layer2": torch.randn(3, 5)}, ids=("a", "b", "c"))
        >>> saved
        Activations(3 samples, 2 layers)
    """

    values: Mapping[str, Tensor]
    ids: Sequence[Id]
    pooling: Pooling | None = None
    mask: Tensor | None = None
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        if not self.values:
            raise ValueError("activations need at least one layer, got none")
        for name, values in self.values.items():
            if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() not in (2, 3):
                shape = f" of {tuple(values.shape)}" if isinstance(values, Tensor) else ""
                got = f"{getattr(values, 'dtype', type(values).__name__)}{shape}"
                raise ValueError(
                    f"activations of layer {name!r} must be real floating-point tensors of shape (n, d) or "
                    f"(n, positions, d), got {got}"
                )
            if len(values) != len(self.ids):
                raise ValueError(f"layer {name!r} has {len(values)} samples, and there are {len(self.ids)} ids")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids must be unique, but some repeat")
        if self.pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling must be None or one of {', '.join(POOLINGS)}, got {self.pooling!r}")

    @property
    def layers(self) -> Sequence[str]:
        """The names of the layers."""
        return tuple(self.values)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of ids, names and values: ``"sha256:…"``."""
        digest = hashlib.sha256(repr((tuple(self.ids), self.pooling, dict(self.grids))).encode())
        parts = {**self.values, **({} if self.mask is None else {"mask": self.mask})}
        for name, values in parts.items():
            digest.update(repr((name, str(values.dtype), tuple(values.shape))).encode())
            digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return f"sha256:{digest.hexdigest()}"

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Tell what was said of some samples."""
        for name in layers:
            if name not in self.values:
                hint = did_you_mean(name, self.values)
                raise ValueError(
                    f"these activations have no layer {name!r}{f'; did you mean {hint!r}?' if hint else '.'} "
                    f"Layers: {', '.join(self.values)}"
                )
            values = self.values[name][start:stop]
            tokens = values.dim() == 3
            mask = self.mask[start:stop] if tokens and self.mask is not None and name not in self.grids else None
            callback(name, Representation(values, "bnd" if tokens else "bd", mask=mask, grid=self.grids.get(name)))

    def describe(self) -> dict[str, Any]:
        """The fingerprint."""
        return {"activations": self.fingerprint}

    def __repr__(self) -> str:
        """Samples and layers."""
        return f"Activations({len(self.ids)} samples, {len(self.values)} layers)"

    # -- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> None:
        """Write a file ``….npz`` or ``….safetensors``, or a folder of Arrow files (``datasets.load_from_disk``).

        Raises:
            ValueError: If a layer is called ``ids``, ``mask`` or ``about``, ids are integers and texts mixed, or the
                format has no bfloat16.
        """
        path = Path(path)
        if taken := [name for name in RESERVED if name in self.values]:
            raise ValueError(f"no layer of saved activations may be called {taken[0]!r}: the file uses that name")
        if len({isinstance(id_, str) for id_ in self.ids}) > 1:
            raise ValueError("ids must all be integers or all be texts to be saved")
        tensors = {name: values.detach().cpu().contiguous() for name, values in self.values.items()}
        if self.mask is not None:
            tensors["mask"] = self.mask.cpu().contiguous()
        about = {"pooling": self.pooling, "grids": {name: list(grid) for name, grid in self.grids.items()}}
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(tensors, path, metadata={"about": json.dumps(about | {"ids": list(self.ids)})})
            return
        if narrow := [name for name, values in tensors.items() if values.dtype == torch.bfloat16]:
            raise ValueError(f"layer {narrow[0]!r} is bfloat16, which only a .safetensors file can hold")
        arrays = {name: values.numpy() for name, values in tensors.items()}
        if path.suffix == ".npz":
            np.savez(path, ids=np.asarray(self.ids), about=json.dumps(about), **arrays)  # type: ignore[arg-type]
            return
        from datasets import Dataset

        Dataset.from_dict({"ids": list(self.ids), **arrays}).save_to_disk(path)
        (path / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, ids: Sequence[Id] | None = None) -> Activations:
        """Read what :meth:`save` wrote, or what others wrote alike: an array for each layer, and ``ids``.

        Args:
            path: A file ``….npz`` or ``….safetensors``, or a folder of Arrow files.
            ids: The ids of the samples, where the file has none.

        Raises:
            ValueError: If there are no ids, or what is there are no activations.
            FileNotFoundError: If there is no such file.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"there are no activations at {path}")
        read = {".npz": _read_npz, ".safetensors": _read_safetensors}.get(path.suffix, _read_arrow)
        values, about = read(path)
        about = pooling_from_1(about)
        found = ids if ids is not None else about.get("ids")
        if found is None:
            raise ValueError(f"{path} has no ids, so that nobody knows which samples these are; pass ids=")
        mask = values.pop("mask", None)
        grids = {name: (int(h), int(w)) for name, (h, w) in about.get("grids", {}).items()}
        return cls(values, tuple(found), about.get("pooling"), None if mask is None else mask.bool(), grids)


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with np.load(path) as arrays:
        about = json.loads(str(arrays["about"])) if "about" in arrays else {}
        if "ids" in arrays:
            about["ids"] = arrays["ids"].tolist()
        return {name: torch.from_numpy(arrays[name]) for name in arrays if name not in ("ids", "about")}, about


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "ids" in tensors:
        about["ids"] = tensors.pop("ids").tolist()
    return tensors, about


def _read_arrow(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from datasets import Dataset

    stored = Dataset.load_from_disk(str(path))
    about = json.loads((path / ABOUT).read_text(encoding="utf-8")) if (path / ABOUT).is_file() else {}
    if "ids" in stored.column_names:
        about["ids"] = stored["ids"][:]
    names = [name for name in stored.column_names if name != "ids"]
    return {name: torch.from_numpy(_column(stored, name)) for name in names}, about


def _column(stored: Any, name: str) -> NDArray[Any]:
    """A column in its own dtype: unless told, ``datasets`` makes float32 of float64."""
    feature = stored.features[name]
    while hasattr(feature, "feature"):
        feature = feature.feature
    return np.stack(stored.with_format("numpy", dtype=np.dtype(feature.dtype))[name][:])
