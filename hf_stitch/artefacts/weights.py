"""The weights of an artefact in safetensors: written, read strictly, and loaded onto several devices.

Files may be untrusted. Sizes in a config are not used before they match the headers of the weights, and nothing is
unpickled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch.artefacts.files import INDEX
from hf_stitch.offloading import State
from hf_stitch.records import AGAIN

DeviceMap: TypeAlias = str | Mapping[str, int | str | torch.device]
"""``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or name of a module -> device, ``"cpu"`` or
``"disk"``, as in accelerate."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of weights that are another one, with the same memory, and the first name of that one."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in (weights.entries if isinstance(weights, State) else weights).items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if first.setdefault(memory, name) != name:
                found[name] = first[memory]
    return found


def share(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Let weights of a model be others of it, by their names, as :func:`ties` returns them."""
    for name, kept in tied.items():
        (place, _, key), (other, _, its) = name.rpartition("."), kept.rpartition(".")
        setattr(model.get_submodule(place), key, getattr(model.get_submodule(other), its))


def save_weights(
    weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int, tied: Mapping[str, str]
) -> None:
    """Write weights as safetensors, split into several files if they are large; one file is in memory at a time."""
    written = {name: tensor for name, tensor in described(weights).items() if name not in tied}
    plan = split_torch_state_dict_into_shards(written, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = _untied({name: weights[name].detach().cpu().contiguous() for name in names})
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def described(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without values, on the meta device."""
    if isinstance(weights, State):
        return weights.described
    return {name: tensor.to("meta") for name, tensor in weights.items()}


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy weights that share memory, because a file cannot hold them."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() and key in seen:
            weights[name] = tensor.clone()
        seen.add(key)
    return weights


def load_strictly(model: nn.Module, files: list[Path], tied: Mapping[str, str] | None = None) -> None:
    """Load safetensors into a model without weights. Names and shapes must match exactly; dtypes are as saved.

    Headers are compared before any weight is read.
    """
    state: dict[str, Tensor] = {}
    for file, names in check_headers(model, files, tied or {}).items():
        state |= read_weights(file, names, tied or {})
    model.load_state_dict(state, strict=True, assign=True)
    share(model, tied or {})


def check_headers(model: nn.Module, files: list[Path], tied: Mapping[str, str]) -> dict[Path, list[str]]:
    """Compare the headers of safetensors with a model; no weight is read."""
    expected = model.state_dict()
    place: dict[str, Path] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for name, kept in tied.items():
        others[kept].append(name)
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for kept in weights.keys():  # noqa: SIM118 - not a mapping
                    for name in (kept, *others[kept]):
                        if name in place:
                            raise ValueError(f"{file} and {place[name].name} both contain {name!r}; {AGAIN}")
                        place[name] = file
                        _check_header(file, name, expected.get(name), weights.get_slice(kept))
        except ValueError:
            raise
        except Exception as error:
            raise _unreadable(file, error) from error
    missing = sorted(expected.keys() - place.keys())
    if missing:
        raise ValueError(
            f"{files[0].parent} lacks {len(missing)} weights of the model in its config: {', '.join(missing[:5])}"
        )
    if lost := sorted(others.keys() - place.keys()):
        raise ValueError(
            f"{files[0].parent} has no weight {lost[0]!r}, which tied_weights in its config names; {AGAIN}"
        )
    return {file: [name for name in place if place[name] == file] for file in files}


def read_weights(file: Path, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Read weights of a file into memory."""
    try:
        with safe_open(file, framework="pt") as weights:
            # Copied: the alignment of memory-mapped weights varies, and the rounding of convolutions with it.
            wanted = {name: tied.get(name, name) for name in names}
            read = {kept: weights.get_tensor(kept).clone() for kept in set(wanted.values())}
            return {name: read[kept] for name, kept in wanted.items()}
    except Exception as error:
        raise _unreadable(file, error) from error


def _check_header(file: Path, name: str, expected: Tensor | None, header: Any) -> None:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if expected is None or tuple(expected.shape) != shape:
        want = "no such weight" if expected is None else f"shape {tuple(expected.shape)}"
        raise ValueError(f"{file} and its config disagree about {name!r}: expected {want}, found shape {shape}")
    if expected.is_floating_point() != dtype.startswith(("F", "BF")):
        raise ValueError(
            f"{file} and its config disagree about {name!r}: expected {expected.dtype}, found {dtype}; {AGAIN}"
        )


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({error}); the file is damaged or incomplete: {AGAIN}")


def load_placed(
    model: nn.Module,
    files: list[Path],
    device_map: DeviceMap,
    max_memory: Mapping[int | str, int | str] | None,
    tied: Mapping[str, str],
) -> None:
    """Load safetensors into a model without weights, and let accelerate move them.

    Weights that are mapped to the disk stay in these files, which must not change afterwards; they are read when their
    module runs. Nothing is written.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import check_device_map, get_balanced_memory

    contents = check_headers(model, files, tied)
    dtypes = {name: dtype for file in files for name, dtype in _dtypes(file).items()}
    dtypes |= {name: dtypes[kept] for name, kept in tied.items()}
    empty = {name: value.to("meta", dtypes[name]) for name, value in model.state_dict().items()}
    model.load_state_dict(empty, strict=True, assign=True)
    chosen: dict[str, Any]
    if isinstance(device_map, str):
        whole: Any = {"no_split_module_classes": sorted(getattr(model, "_no_split_modules", None) or ())}
        memory: Any = None if max_memory is None else dict(max_memory)
        if device_map != "sequential":
            memory = get_balanced_memory(model, memory, low_zero=device_map == "balanced_low_0", **whole)
        chosen = infer_auto_device_map(model, memory, **whole)
    else:
        chosen = dict(device_map)
    check_device_map(model, chosen)
    places = {name: _device_of(name, chosen) for name in empty}
    places |= {
        name: "cpu" for name, _ in model.named_buffers() if places.get(name) == "disk"
    }  # hooks move only weights
    for file, names in contents.items():
        here = [name for name in names if places[name] != "disk"]
        found = {name: value.to(places[name]) for name, value in read_weights(file, here, tied).items()}
        model.load_state_dict(found, strict=False, assign=True)
    share(model, {name: kept for name, kept in tied.items() if places[name] == places[kept] != "disk"})
    index = {
        name: {
            "safetensors_file": str(file),
            "weight_name": tied.get(name, name),
            "dtype": str(dtypes[name]).removeprefix("torch."),
        }
        for file, names in contents.items()
        for name in names
        if places[name] == "disk"
    }
    main = "cpu" if set(map(str, chosen.values())) <= {"cpu", "disk"} else None
    dispatch_model(model, chosen, main_device=main, offload_index=index or None, force_hooks=True)


def whole_blocks(model: nn.Module) -> list[str]:
    """Return the classes of modules that must not be distributed over several devices, of all networks in a model."""
    named = (getattr(module, "_no_split_modules", None) or () for module in model.modules() if module is not model)
    return sorted({"StitchingLayer", *(name for names in named for name in names)})


def _dtypes(file: Path) -> dict[str, torch.dtype]:
    with safe_open(file, framework="pt") as weights:
        found = {}
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            part = weights.get_slice(name)
            found[name] = (part[:0] if part.get_shape() else weights.get_tensor(name)).dtype
        return found


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the innermost module of the map that contains a weight."""
    inside = [module for module in device_map if not module or name == module or name.startswith(f"{module}.")]
    return device_map[max(inside, key=len)]
