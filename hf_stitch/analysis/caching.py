"""What is known of networks in a cache: their cuts, and activations on samples, one entry for each layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_stitch.adapters import Adapter, CutInfo
from hf_stitch.adapters.cutting.surgery import alone
from hf_stitch.adapters.pinning import USER_CODE
from hf_stitch.adapters.pins import Pins
from hf_stitch.data import Samples
from hf_stitch.printing import warn
from hf_stitch.provenance import versions
from hf_stitch.records import encode, read
from hf_stitch.reference import ModelReference
from hf_stitch.representation import Pooling
from hf_stitch.storage.cache import Cache

READERS = ("pillow", "tokenizers", "torchvision")
"""Packages that turn raw samples into inputs, beside those of every result."""

OF_ADAPTERS = (
    *("model", "_library", "reference", "processor", "_given", "interface", "override", "_example", "_surveys"),
    "_padding_is_tried",
)
"""Attributes of every adapter, of which each is pinned in its own way, or has no influence."""

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded:
    """The activations of a layer on all samples."""

    values: Tensor  # (samples, d), or (samples, positions, d)
    mask: Tensor | None  # (samples, positions) bool, true at real tokens; None if the layer has no mask
    grid: tuple[int, int] | None  # height and width of the grid that the positions form; None if they form none


class NetworkCache:
    """What is known of a network, in a cache.

    A key covers everything that changes a bit of its values: weights, modules and code of the network, its processor,
    versions of packages, the kind of the device, its precision and its number of threads. Weights are read once for it.
    """

    def __init__(self, cache: Cache, adapter: Adapter) -> None:
        reference, self._network = _pinned(adapter)
        self._cache, self._adapter = cache, adapter
        weights = str(reference.weights_hash)
        name = str(reference)
        if reference.public.id is None:  # an entry may be shared, a path may not
            name = f"{PurePath(reference.id or type(adapter.model).__name__).name} {weights[7:15]}"
        self._about = {"network": name, "weights": weights, "device": adapter.device.type}
        self._about["versions"] = self._network["versions"]

    def candidates(self) -> list[str]:
        """Return the candidates of the adapter, which a network that has run before does not run again to find."""
        return self._listed(str, "candidates", lambda: self._adapter.candidates)

    def cuts(self) -> list[CutInfo]:
        """Return the verified cuts, which a network that was listed before does not run again to find and verify."""
        return self._listed(CutInfo, "cuts", lambda: map(self._adapter.cut_info, self._adapter.layers))

    def _listed(self, kind: type[T], name: str, find: Callable[[], Iterable[T]]) -> list[T]:
        key = _key({"network": self._network, "list": name})
        if (entry := self._cache.read(key)) is not None:
            return list(read(list[kind], entry[1][name], f"the entry {key[:8]} of the cache"))  # type: ignore[valid-type]
        found = list(find())
        self._write(key, {}, {**self._about, name: encode(found)})
        return found

    def _write(self, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        try:
            self._cache.write(key, tensors, about)
        except OSError as error:
            warn(f"{about.get('layer', 'the list of layers')} was not cached: {error}")


class LayerCache(NetworkCache):
    """The activations of a network on samples in a cache; keys also cover samples, layer, pooling and batches."""

    def __init__(self, cache: Cache, adapter: Adapter, samples: Samples, pooling: Pooling, batches: str) -> None:
        super().__init__(cache, adapter)
        self._recipe = {"data": samples.fingerprint, "pooling": pooling, "batches": batches}
        self._about_data = {**self._recipe, "modality": samples.modality, "samples": len(samples)}

    def read(self, layers: Iterable[str]) -> dict[str, Recorded]:
        """Read the activations of layers."""
        found = {}
        for layer in layers:
            if (entry := self._cache.read(self._key_of(layer))) is not None:
                tensors, grid = entry[0], entry[1]["grid"]
                found[layer] = Recorded(tensors["values"], tensors.get("mask"), grid and (grid[0], grid[1]))
        return found

    def write(self, recorded: Mapping[str, Recorded]) -> None:
        """Write the activations of layers. Where this is impossible, a warning gives the reason."""
        for layer, each in recorded.items():
            tensors = {"values": each.values} | ({} if each.mask is None else {"mask": each.mask})
            dtype = str(each.values.dtype).removeprefix("torch.")
            about = {**self._about, "layer": layer, **self._about_data, "dtype": dtype, "grid": each.grid}
            self._write(self._key_of(layer), tensors, about)

    def _key_of(self, layer: str) -> str:
        return _key({"network": self._network, **self._recipe, "layer": layer})


def _key(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _pinned(adapter: Adapter) -> tuple[ModelReference, dict[str, Any]]:
    """Return the reference of a network, and all that decides the values of its activations beside the samples."""
    pins = Pins(without_weights=adapter.model)
    with alone(adapter.model):
        reference = adapter.pinned
        modules = pins.hash(adapter.model)
    own = {name: value for name, value in vars(adapter).items() if name not in OF_ADAPTERS}
    known = replace(adapter.interface, sides=(), arguments=())  # which the network itself decides, in a trial
    kinds = type(adapter), type(adapter._library), type(adapter.override)
    processor = adapter.processor
    written = reference.processor is not None and reference.processor.chosen.get("class") == USER_CODE
    readers = {}
    for name in READERS:
        with suppress(PackageNotFoundError):
            readers[name] = version(name)
    found = {
        "weights": reference.weights_hash,
        "config": None if reference.config is None else asdict(reference.config),
        "modules": modules,
        "adapter": pins.hash([*kinds, own, known.to_dict()]),
        "processor": None if reference.processor is None else asdict(reference.processor),
        "processor_code": pins.hash(processor if written else type(processor)),
        "example": {  # in which cuts are found: the values of tensors may be random
            name: [str(value.dtype), str(tuple(value.shape))] if isinstance(value, Tensor) else [Pins().hash(value)]
            for name, value in adapter.example.items()
        },
        "machine": _machine(adapter.device),
    }
    return reference, {**found, "versions": {**versions(), **readers, **pins.versions()}}


def _machine(device: torch.device) -> list[Any]:
    """Return the kind of a device and the settings of torch, which decide the order of sums and with it rounding."""
    cast = str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else None
    exact = torch.are_deterministic_algorithms_enabled()
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    if hasattr(cudnn, "conv"):  # since torch 2.9, where reading the old settings is an error once the new ones are set
        places = (backends, backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
        precision = [place.fp32_precision for place in places]
    else:
        precision = [torch.get_float32_matmul_precision(), str(cudnn.allow_tf32)]
    found = [device.type, cast, exact, *precision]
    if device.type == "cuda":
        return [*found, torch.cuda.get_device_name(device)]
    return [*found, backends.cpu.get_cpu_capability(), torch.get_num_threads()]
