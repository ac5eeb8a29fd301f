"""Activations in memory or in files, recorded from networks that ran earlier or elsewhere."""

from __future__ import annotations

import hashlib
import json
import zipfile
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
from hf_stitch.options import did_you_mean
from hf_stitch.representation import POOLINGS, Pooling, Representation
from hf_stitch.resources import sized
from hf_stitch.running import Processes
from hf_stitch.storage.files import decoding, digest, load_whole, replacing, write_whole

STATE = "state.json"
"""File where ``datasets`` lists the files of a dataset."""

ABOUT = "activations.json"  # file in a folder of Arrow files: pooling, grids and a digest
RESERVED = ("ids", "mask", "about")  # entries of a file that are not layers
UNPACKED = 200
"""Largest ratio of activations to the compressed file that contains them."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations of one or more layers for the same samples in the same order.

    Attributes:
        values: Name of a layer -> floating-point tensor of shape ``(n, d)``, one vector per sample, or
            ``(n, positions, d)``.
        ids: The ``n`` unique ids of the samples.
        pooling: Pooling that was applied to the activations of the network; ``None`` if it is not known.
        mask: ``(n, positions)`` bool, true for real tokens; ``None`` if all tokens are real.
        grids: Name of a layer -> (height, width) of the grid that its positions form, for layers with a grid.

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
        """Validate the fields."""
        if not self.values:
            raise ValueError("values must contain at least one layer, got none")
        for name, values in self.values.items():
            if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() not in (2, 3):
                shape = f" of {tuple(values.shape)}" if isinstance(values, Tensor) else ""
                got = f"{getattr(values, 'dtype', type(values).__name__)}{shape}"
                raise ValueError(
                    f"activations of layer {name!r} must be real floating-point tensors of shape (n, d) or "
                    f"(n, positions, d), got {got}"
                )
            if len(values) != len(self.ids):
                raise ValueError(f"layer {name!r} has {len(values)} samples, but there are {len(self.ids)} ids")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids must be unique, got repeated ids")
        if self.pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling must be None or one of {', '.join(POOLINGS)}, got {self.pooling!r}")

    @property
    def layers(self) -> Sequence[str]:
        """The names of the layers."""
        return tuple(self.values)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of ids, layer names and values, as ``"sha256:…"``."""
        digest = hashlib.sha256(repr((tuple(self.ids), self.pooling, dict(self.grids))).encode())
        parts = {**self.values, **({} if self.mask is None else {"mask": self.mask})}
        for name, values in parts.items():
            digest.update(repr((name, str(values.dtype), tuple(values.shape))).encode())
            digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return f"sha256:{digest.hexdigest()}"

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Call ``callback`` with the activations of the samples from ``start`` to ``stop`` at each layer.

        Args:
            start: Index of the first sample.
            stop: Index after the last sample.
            layers: Names of the layers.
            callback: Receives the name of a layer and its :class:`Representation`.
        """
        for name in layers:
            if name not in self.values:
                hint = did_you_mean(name, self.values)
                raise ValueError(
                    f"layers must be among {', '.join(self.values)}, got {name!r}"
                    + (f"; did you mean {hint!r}?" if hint else "")
                )
            values = self.values[name][start:stop]
            tokens = values.dim() == 3
            mask = self.mask[start:stop] if tokens and self.mask is not None and name not in self.grids else None
            callback(name, Representation(values, "bnd" if tokens else "bd", mask=mask, grid=self.grids.get(name)))

    def describe(self) -> dict[str, Any]:
        """Return the fingerprint as a JSON-serialisable record."""
        return {"activations": self.fingerprint}

    def __repr__(self) -> str:
        """Return the number of samples and layers."""
        return f"Activations({len(self.ids)} samples, {len(self.values)} layers)"

    # -- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> None:
        """Save the activations to a file, or to a folder of Arrow files that ``datasets.load_from_disk`` reads.

        With several processes, only the first one writes; the rest do not wait for it.

        Args:
            path: A file ``….npz`` or ``….safetensors``, or any other path for a folder of Arrow files.

        Raises:
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        path = Path(path)
        if reserved := [name for name in RESERVED if name in self.values]:
            raise ValueError(f"the file format reserves the name of layer {reserved[0]!r}; rename the layer")
        if len({isinstance(id_, str) for id_ in self.ids}) > 1:
            raise ValueError("save requires ids that are all integers or all strings, got both")
        if Processes.of(None).rank:
            return
        tensors = {name: values.detach().cpu().contiguous() for name, values in self.values.items()}
        if self.mask is not None:
            tensors["mask"] = self.mask.cpu().contiguous()
        grids = {name: list(grid) for name, grid in self.grids.items()}
        about: dict[str, Any] = {"pooling": self.pooling, "grids": grids}
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            metadata = {"about": json.dumps(about | {"ids": list(self.ids)})}
            write_whole(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
            return
        if narrow := [name for name, values in tensors.items() if values.dtype == torch.bfloat16]:
            raise ValueError(f"layer {narrow[0]!r} is bfloat16, which requires a .safetensors file; use this suffix")
        arrays = {name: values.numpy() for name, values in tensors.items()}
        if path.suffix == ".npz":
            named: Any = {"ids": np.asarray(self.ids), "about": json.dumps(about), **arrays}
            write_whole(path, lambda temporary: _savez(temporary, named))
            return
        from datasets import Dataset

        with replacing(path, _data_files) as folder:
            Dataset.from_dict({"ids": list(self.ids), **arrays}).save_to_disk(folder)
            about["digest"] = digest(*(folder / name for name in _data_files(folder)))
            (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, ids: Sequence[Id] | None = None) -> Activations:
        """Load activations written by :meth:`save`, or by other tools in the same layout.

        The layout is one array per layer, and ``ids``.

        Args:
            path: A file ``….npz`` or ``….safetensors``, or a folder of Arrow files.
            ids: The ids of the samples; ``None`` reads them from the file.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"no activations at {path}: the file does not exist")
        read_file = {".npz": _read_npz, ".safetensors": _read_safetensors}.get(path.suffix, _read_arrow)
        with decoding(path):
            values, about = read_file(path)
            sample_ids = ids if ids is not None else about.get("ids")
            if sample_ids is None:
                raise ValueError(f"{path} does not contain ids; pass the ids of the samples as ids=")
            mask = values.pop("mask", None)
            grids = {name: (int(h), int(w)) for name, (h, w) in about.get("grids", {}).items()}
            return cls(values, tuple(sample_ids), about.get("pooling"), None if mask is None else mask.bool(), grids)


def _savez(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as file:  # np.savez would add a suffix to a path
        np.savez(file, **arrays)


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > max(UNPACKED * path.stat().st_size, 2**28):
        raise ValueError(f"it unpacks to {sized(size)}, too much for activations")
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

    @decoding(path)
    def load() -> tuple[dict[str, Tensor], dict[str, Any]]:
        stored = Dataset.load_from_disk(str(path))
        about = json.loads((path / ABOUT).read_text(encoding="utf-8")) if (path / ABOUT).is_file() else {}
        if "ids" in stored.column_names:
            about["ids"] = stored.with_format("arrow")["ids"][:].to_pylist()  # images would be fetched by address
        values = {n: torch.from_numpy(_column(stored, n)) for n in stored.column_names if n != "ids"}
        expected = about.pop("digest", None)  # absent in files of other tools
        if expected not in (None, digest(*(path / name for name in _data_files(path)))):
            raise ValueError(f"the data in {path} does not match its {ABOUT}; save the activations again")
        return values, about

    return load_whole(path, STATE, load)


def _data_files(folder: Path) -> list[str]:
    """Return the files that the dataset in a folder lists."""
    if not (folder / STATE).is_file():
        return []
    listed = json.loads((folder / STATE).read_text(encoding="utf-8")).get("_data_files", ())
    return [file["filename"] for file in listed]


def _column(stored: Any, name: str) -> NDArray[Any]:
    """Read a column in its stored dtype, because ``datasets`` converts float64 to float32 by default."""
    feature = stored.features[name]
    while hasattr(feature, "feature"):
        feature = feature.feature
    return np.stack(stored.with_format("numpy", dtype=np.dtype(feature.dtype))[name][:])
