"""What networks say at their layers, live or saved, and the rows of both sides of a comparison that follow from it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.base import See
from hf_stitch.data import Id, Samples
from hf_stitch.processes import Processes
from hf_stitch.registry import did_you_mean
from hf_stitch.representation import ROWS_POLICIES, Form, Representation, RowsPolicy
from hf_stitch.stitches.layer import check_forms

if TYPE_CHECKING:
    from accelerate import Accelerator

ABOUT = "activations.json"
RESERVED = ("ids", "mask", "about")


class Side(Protocol):
    """What can be compared: representations of samples in order, layer by layer."""

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""

    @property
    def layers(self) -> Sequence[str]:
        """The layers that are compared unless others are named."""

    def observe(self, start: int, stop: int, layers: Sequence[str], see: See) -> None:
        """Tell what is said of the samples from ``start`` to ``stop`` at some layers, each once."""

    def describe(self) -> dict[str, Any]:
        """What identifies this side, as JSON values."""


class Reader:
    """Reads raw samples; a batch that both sides ask for is read once.

    Args:
        samples: What is read.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self._place: tuple[int, int] | None = None
        self._batch: list[Any] = []

    def read(self, start: int, stop: int) -> list[Any]:
        """The raw samples from ``start`` to ``stop``."""
        if self._place != (start, stop):
            (batch,) = self.samples.select(range(start, stop)).batches(stop - start)
            self._place, self._batch = (start, stop), batch.samples
        return self._batch


class Network:
    """A side that runs: a network and the samples that it is shown.

    Args:
        adapter: The network.
        reader: Of the raw samples.
    """

    def __init__(self, adapter: Adapter, reader: Reader) -> None:
        self.adapter, self.reader = adapter, reader

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""
        return self.reader.samples.ids

    @property
    def layers(self) -> Sequence[str]:
        """The cuts of the network."""
        return self.adapter.layers

    def observe(self, start: int, stop: int, layers: Sequence[str], see: See) -> None:
        """Run the network once."""
        self.adapter.observe(self.adapter.preprocess(self.reader.read(start, stop)), layers, see)

    def describe(self) -> dict[str, Any]:
        """The endpoint with the hash of the weights, and the fingerprint of the samples."""
        return {"endpoint": self.adapter.pinned.to_dict(), "data": self.reader.samples.fingerprint}


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations at hand: of every layer those of the same samples, in the same order.

    Attributes:
        values: By layer ``(n, d)``, a vector for each sample, or ``(n, positions, d)``.
        ids: The id of every sample.
        rows: The rows policy by which vectors were made of what the network said; ``None`` if that is not known.
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
    rows: RowsPolicy | None = None
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
        if self.rows not in (None, *ROWS_POLICIES):
            raise ValueError(f"rows must be None or one of {', '.join(ROWS_POLICIES)}, got {self.rows!r}")

    @property
    def layers(self) -> Sequence[str]:
        """The names of the layers."""
        return tuple(self.values)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of ids, names and values: ``"sha256:…"``."""
        digest = hashlib.sha256(repr((tuple(self.ids), self.rows, dict(self.grids))).encode())
        parts = {**self.values, **({} if self.mask is None else {"mask": self.mask})}
        for name, values in parts.items():
            digest.update(repr((name, str(values.dtype), tuple(values.shape))).encode())
            digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return f"sha256:{digest.hexdigest()}"

    def observe(self, start: int, stop: int, layers: Sequence[str], see: See) -> None:
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
            see(name, Representation(values, "bnd" if tokens else "bd", mask=mask, grid=self.grids.get(name)))

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
        about = {"rows": self.rows, "grids": {name: list(grid) for name, grid in self.grids.items()}}
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
        found = ids if ids is not None else about.get("ids")
        if found is None:
            raise ValueError(f"{path} has no ids, so that nobody knows which samples these are; pass ids=")
        mask = values.pop("mask", None)
        grids = {name: (int(h), int(w)) for name, (h, w) in about.get("grids", {}).items()}
        return cls(values, tuple(found), about.get("rows"), None if mask is None else mask.bool(), grids)


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


@torch.no_grad()
def record(
    model: str | nn.Module | Adapter,
    layers: Iterable[str] | None,
    data: Any,
    rows: RowsPolicy = "mean",
    *,
    batch_size: int = 64,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> Activations:
    """Keep what a network says of some samples, to compare it later or elsewhere.

    Under ``accelerate launch`` every process runs a part of the samples and all get the same activations.

    Args:
        model: The network: an adapter, a live module, or a name for :func:`hf_stitch.load`.
        layers: Names of modules; ``None``: the cuts.
        data: Raw samples: what :meth:`hf_stitch.Samples.of` takes.
        rows: Which vectors are kept: ``positions`` keeps those of all positions, the others one for each sample.
        batch_size: Samples per forward.
        accelerator: The ``accelerate.Accelerator`` that knows the processes; default: found where there are several.
        progress: Show a progress bar.

    Returns:
        The activations, on the CPU, in the dtype of the network.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.
        ValueError: If there are fewer samples than processes.

    Example:
        >>> import hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> record(adapter, ["0"], torch.randn(20, 4)).values["0"].shape
        torch.Size([20, 8])
    """
    processes = Processes.of(accelerator)
    adapter = processes.load(model)
    names = list(adapter.layers if layers is None else layers)
    samples = Samples.of(data)
    share = samples if processes.count == 1 else samples.select(range(*processes.part(len(samples))))
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    masks: dict[str, list[Tensor]] = {}  # by the first layer that has one
    grids: dict[str, tuple[int, int]] = {}

    def keep(name: str, representation: Representation) -> None:
        if rows != "positions" or representation.layout == "bd":
            parts[name].append(representation.rows(rows).to("cpu", copy=True))
            return
        representation.check_sharp(rows)
        parts[name].append(representation.positions().to("cpu", copy=True))
        if representation.grid is not None:
            grids[name] = representation.grid
        if representation.mask is not None and name == next(iter(masks), name):
            masks.setdefault(name, []).append(representation.mask[:, representation.prefix_tokens :].cpu())

    for batch in share.batches(batch_size, progress="recording" if progress and processes.rank == 0 else None):
        adapter.observe(adapter.preprocess(batch.samples), names, keep)
    values = {name: _joined([part for own in processes.gather(layer) for part in own]) for name, layer in parts.items()}
    real = [mask for own in processes.gather(next(iter(masks.values()), [])) for mask in own]
    return Activations(values, samples.ids, rows, _joined(real) if real else None, grids)


def _joined(parts: list[Tensor]) -> Tensor:
    """Batches of one layer, or of masks; shorter texts are filled up with what the mask leaves out."""
    positions, features = max(part.shape[1] for part in parts), [0, 0] * (parts[0].dim() - 2)
    return torch.cat([functional.pad(part, [*features, 0, positions - part.shape[1]]) for part in parts])


# -- rows of both sides ------------------------------------------------------------------------------------------------
Grid = tuple[int, int] | None
Key = tuple[int, str, Grid]
"""A matrix of rows: the number of its side, its layer, and the grid that positions were brought to."""
PROBE = 2
"""Samples that are looked at before the others."""

Observe = Callable[[Sequence[str], See], None]
"""Tells what is said of some samples at some layers, each once."""
Take = Callable[[Key, Tensor], bool]
"""Is given the rows of a matrix, which last no longer than the call, and says whether they are finite."""


@dataclass(frozen=True)
class Group:
    """Matrices that share their rows: layers of b on one grid, and all layers of a brought to it.

    Attributes:
        x: The distinct matrices of a.
        y: Those of b; the very same where b is a.
        of_a: For each layer of a its place in ``x``.
        of_b: For each of these layers of b its place in ``y``.
        places: For each of these layers of b its place among all.
    """

    x: tuple[Key, ...]
    y: tuple[Key, ...]
    of_a: tuple[int, ...]
    of_b: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether both sides are the same matrices."""
        return self.x == self.y

    @property
    def keys(self) -> tuple[Key, ...]:
        """All distinct matrices."""
        return tuple(dict.fromkeys((*self.x, *self.y)))


class Watch:
    """The layers of both sides that are compared, and their rows, batch by batch.

    A few samples are looked at first, from which the shapes follow, and which layers return the very same tensor: that
    one is taken once.

    Attributes:
        layers_a: Layers of a.
        layers_b: Layers of b.
        n: Number of samples.
        groups: What is compared with what.
        probe: The rows of the first samples.
        seconds: For one sample, as measured.

    Args:
        sides: Both sides, or the one that stands on both.
        layers_a: Layers of a; ``None``: all that it offers.
        layers_b: Layers of b.
        rows: The rows policy.
        ordered: Whether the features of flattened rows must be in the order of positions at every layer; in that of
            memory they need not be moved.

    Raises:
        ValueError: If there are less than 2 samples, no layers, or layers that cannot be compared under the policy.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        layers_a: Iterable[str] | None,
        layers_b: Iterable[str] | None,
        rows: RowsPolicy,
        ordered: bool = True,
    ) -> None:
        self.sides, self.policy, self._ordered = sides, rows, ordered
        self.n = len(sides[0].ids)
        if self.n < PROBE:
            raise ValueError(f"a comparison takes at least {PROBE} samples, got {self.n}")
        self.layers_a, self.layers_b = _named("a", layers_a, sides[0]), _named("b", layers_b, sides[-1])
        last = len(sides) - 1
        wanted = [dict.fromkeys(self.layers_a)] if last else [dict.fromkeys((*self.layers_a, *self.layers_b))]
        wanted += [dict.fromkeys(self.layers_b)] if last else []
        start = time.perf_counter()
        looks = [_Look(side, list(names)) for side, names in zip(sides, wanted, strict=True)]
        self.seconds = (time.perf_counter() - start) / PROBE
        self.groups = self._grouped(looks[0], looks[-1])
        self._grids: dict[tuple[int, str], list[Grid]] = {}
        for number, name, grid in dict.fromkeys(key for group in self.groups for key in group.keys):
            self._grids.setdefault((number, name), []).append(grid)
        self._device: torch.device | None = None
        self.probe: dict[Key, Tensor] = {}
        self._tell(0, self._keep, [look.repeat for look in looks])
        device = self.probe[self.groups[0].y[0]].device
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.probe = {key: rows.to(self._device) for key, rows in self.probe.items()}

    def rows(self, start: int, stop: int, take: Take) -> None:
        """Tell the rows of the samples from ``start`` to ``stop``: of each matrix ``(rows, d)``, as it comes.

        Raises:
            ValueError: If a sample is masked entirely, an activation is NaN or infinite (the message says which), or
                the sides have different tokens.
        """
        self._tell(start, take, [partial(side.observe, start, stop) for side in self.sides])

    def _tell(self, start: int, take: Take, observers: Sequence[Observe]) -> None:
        counts: dict[Key, int] = {}
        owners: dict[int, Tensor] = {}

        def see_as(number: int) -> See:
            def see(name: str, representation: Representation) -> None:
                self._check_masks(representation, name, start)
                if self.policy == "positions" and number not in owners:
                    owners[number] = representation.row_samples("positions").cpu()
                for grid in self._grids[number, name]:
                    key, resized = (number, name, grid), representation if grid is None else representation.resize(grid)
                    rows = self._rows(resized)
                    counts[key] = len(rows)
                    if not take(key, rows if self._device is None else rows.to(self._device)):
                        self._refuse(rows, resized, name, start)

            return see

        for number, observe in enumerate(observers):
            observe([name for owner, name in self._grids if owner == number], see_as(number))
        for group in self.groups:
            tokens = [*owners.values()] if group.y[0][2] is None else []
            uneven = len({counts[key] for key in group.keys}) > 1
            if uneven or any(not torch.equal(tokens[0], other) for other in tokens):
                raise ValueError(
                    "rows policy 'positions' needs both sides to have the same tokens, and a sample of the batch from "
                    f"{self.sides[0].ids[start]!r} on has not; use rows='mean', 'cls' or 'last'"
                )

    def _keep(self, key: Key, rows: Tensor) -> bool:
        self.probe[key] = rows
        return all_finite(rows)

    def _rows(self, representation: Representation) -> Tensor:
        if self.policy == "flatten" and representation.layout == "bchw" and not self._ordered:
            return representation.values.flatten(1)
        return representation.rows(self.policy)

    def width(self, key: Key) -> int:
        """How wide a matrix is."""
        return self.probe[key].shape[1]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.probe[self.groups[0].y[0]].device if self._device is None else self._device

    def count(self, group: Group) -> int:
        """About how many rows the matrices of a group have: of texts it is not known before."""
        return round(len(self.probe[group.y[0]]) * self.n / PROBE)

    def _grouped(self, look_a: _Look, look_b: _Look) -> tuple[Group, ...]:
        by_grid: dict[Grid, list[int]] = {}
        for place, b in enumerate(self.layers_b):
            for a in self.layers_a:
                try:
                    check_forms(look_a.forms[a], look_b.forms[b], self.policy)
                except ValueError as error:
                    raise ValueError(f"layer {a!r} of a and layer {b!r} of b: {error}") from error
            by_grid.setdefault(look_b.forms[b].grid if self.policy == "positions" else None, []).append(place)
        groups = []
        for grid, places in by_grid.items():
            of_a = [(0, look_a.first[name], grid) for name in self.layers_a]
            of_b = [(len(self.sides) - 1, look_b.first[self.layers_b[place]], grid) for place in places]
            x, y = list(dict.fromkeys(of_a)), list(dict.fromkeys(of_b))
            if set(x) == set(y):
                y = x
            groups.append(
                Group(tuple(x), tuple(y), tuple(map(x.index, of_a)), tuple(map(y.index, of_b)), tuple(places))
            )
        return tuple(groups)

    def _check_masks(self, representation: Representation, name: str, start: int) -> None:
        if representation.mask is None:
            return
        empty = ~representation.mask[:, representation.prefix_tokens :].any(1)
        if bool(empty.any()):
            sample = self.sides[0].ids[start + int(empty.nonzero()[0])]
            raise ValueError(f"sample {sample!r} is masked entirely at layer {name!r}; leave it out by select")

    def _refuse(self, rows: Tensor, representation: Representation, name: str, start: int) -> NoReturn:
        """Say which sample of a layer is not finite."""
        finite = rows.isfinite().all(1)
        if bool(finite.all()):
            raise ValueError(f"products of layer {name!r} overflow {rows.dtype}; run the network in a wider dtype")
        place = int(representation.row_samples(self.policy)[int(finite.logical_not().nonzero()[0])])
        raise ValueError(
            f"layer {name!r} is NaN or infinite for sample {self.sides[0].ids[start + place]!r}; leave it out, or run "
            "the network in a wider dtype"
        )


def all_finite(rows: Tensor) -> bool:
    """Whether nothing is NaN or infinite; a sum shows it, unless it overflows."""
    total = rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32))
    return bool(total.isfinite()) or bool(rows.isfinite().all())


def _named(side: str, layers: Iterable[str] | None, offered: Side) -> tuple[str, ...]:
    if isinstance(layers, str):
        raise TypeError(f"layers_{side} must be a list of names, got {layers!r}; write [{layers!r}]")
    names = tuple(offered.layers if layers is None else layers)
    if not names:
        raise ValueError(f"layers_{side} must name at least one layer, got none")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"layers_{side} names {twice[0]!r} more than once")
    return names


class _Look:
    """What a side says of the first samples.

    Attributes:
        first: For each layer the first that returns the very same tensor.
        forms: Of each layer.
    """

    def __init__(self, side: Side, names: Sequence[str]) -> None:
        self.first: dict[str, str] = {}
        self.forms: dict[str, Form] = {}
        self._said: dict[str, Representation] = {}
        tensors: dict[Any, tuple[str, Tensor]] = {}  # they are held, so that no other takes their place in memory

        def see(name: str, representation: Representation) -> None:
            values = representation.values
            version = None if values.is_inference() else values._version
            what = (values.data_ptr(), representation.form, values.stride(), values.dtype, version)
            self.first[name] = tensors.setdefault(what, (name, values))[0]
            self.forms[name] = representation.form
            if self.first[name] == name:
                self._said[name] = representation.replace(values=values.clone())

        side.observe(0, PROBE, names, see)

    def repeat(self, layers: Sequence[str], see: See) -> None:
        """Tell it again."""
        for name in layers:
            see(name, self._said[name])
