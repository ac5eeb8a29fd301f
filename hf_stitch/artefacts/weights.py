"""The weights of artefacts in safetensors: writing, strict loading, and distribution over devices.

Files may be untrusted. Sizes in a config are used only after they match the headers of the weights, and nothing is
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
    """Return tied weights: name -> first name of the weight with the same memory."""
    name_by_memory: dict[Any, str] = {}
    tied = {}
    for name, tensor in (weights.entries if isinstance(weights, State) else weights).items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if name_by_memory.setdefault(memory, name) != name:
                tied[name] = name_by_memory[memory]
    return tied


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie weights of a model, as returned by :func:`ties`."""
    for name, first in tied.items():
        (module, _, key), (first_module, _, first_key) = name.rpartition("."), first.rpartition(".")
        setattr(model.get_submodule(module), key, getattr(model.get_submodule(first_module), first_key))


def save_weights(
    weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int, tied: Mapping[str, str]
) -> None:
    """Write weights as safetensors, split into shards if they are large; one shard is in memory at a time."""
    outlines = {name: tensor for name, tensor in on_meta(weights).items() if name not in tied}
    plan = split_torch_state_dict_into_shards(outlines, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = _untied({name: weights[name].detach().cpu().contiguous() for name in names})
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def on_meta(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without values, on the meta device."""
    if isinstance(weights, State):
        return weights.described
    return {name: tensor.to("meta") for name, tensor in weights.items()}


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy weights that share memory, because a file cannot contain shared memory."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() and key in seen:
            weights[name] = tensor.clone()
        seen.add(key)
    return weights


def load_strictly(model: nn.Module, files: list[Path], tied: Mapping[str, str] | None = None) -> None:
    """Load safetensors into a model without weights. Names and shapes must match exactly; dtypes are as saved.

    Headers are checked before any weight is read.
    """
    state: dict[str, Tensor] = {}
    for file, names in check_headers(model, files, tied or {}).items():
        state |= read_weights(file, names, tied or {})
    model.load_state_dict(state, strict=True, assign=True)
    tie(model, tied or {})


def check_headers(model: nn.Module, files: list[Path], tied: Mapping[str, str]) -> dict[Path, list[str]]:
    """Check the headers of safetensors against a model, without reading weights; return the weight names by file."""
    expected = model.state_dict()
    file_of: dict[str, Path] = {}
    tied_names: dict[str, list[str]] = defaultdict(list)
    for name, saved_name in tied.items():
        tied_names[saved_name].append(name)
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for saved_name in weights.keys():  # noqa: SIM118 - not a mapping
                    for name in (saved_name, *tied_names[saved_name]):
                        if name in file_of:
                            raise ValueError(f"{file} and {file_of[name].name} both contain {name!r}; {AGAIN}")
                        file_of[name] = file
                        _check_header(file, name, expected.get(name), weights.get_slice(saved_name))
        except ValueError:
            raise
        except Exception as error:
            raise _unreadable(file, error) from error
    missing = sorted(expected.keys() - file_of.keys())
    if missing:
        raise ValueError(
            f"{files[0].parent} lacks {len(missing)} weights of the model in its config: {', '.join(missing[:5])}"
        )
    if lacking := sorted(tied_names.keys() - file_of.keys()):
        raise ValueError(f"{files[0].parent} lacks the weight {lacking[0]!r} in tied_weights of its config; {AGAIN}")
    return {file: [name for name in file_of if file_of[name] == file] for file in files}


def read_weights(file: Path, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Read weights of a file into memory."""
    try:
        with safe_open(file, framework="pt") as weights:
            # Copied, because the alignment of memory-mapped weights varies, and with it the rounding of convolutions.
            saved_names = {name: tied.get(name, name) for name in names}
            tensors = {saved_name: weights.get_tensor(saved_name).clone() for saved_name in set(saved_names.values())}
            return {name: tensors[saved_name] for name, saved_name in saved_names.items()}
    except Exception as error:
        raise _unreadable(file, error) from error


def _check_header(file: Path, name: str, expected: Tensor | None, header: Any) -> None:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if expected is None or tuple(expected.shape) != shape:
        expected_text = "no such weight" if expected is None else f"shape {tuple(expected.shape)}"
        raise ValueError(f"{file} and its config disagree about {name!r}: expected {expected_text}, got shape {shape}")
    if expected.is_floating_point() != dtype.startswith(("F", "BF")):
        raise ValueError(
            f"{file} and its config disagree about {name!r}: expected {expected.dtype}, got {dtype}; {AGAIN}"
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
    """Load safetensors into a model without weights, and distribute them with accelerate.

    Weights on the disk stay in these files and are read when their module runs; the files must not change afterwards.
    Nothing is written.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import check_device_map, get_balanced_memory

    names_by_file = check_headers(model, files, tied)
    dtypes = {name: dtype for file in files for name, dtype in _dtypes(file).items()}
    dtypes |= {name: dtypes[saved] for name, saved in tied.items()}
    empty = {name: weight.to("meta", dtypes[name]) for name, weight in model.state_dict().items()}
    model.load_state_dict(empty, strict=True, assign=True)
    device_of_module: dict[str, Any]
    if isinstance(device_map, str):
        block_options: Any = {"no_split_module_classes": sorted(getattr(model, "_no_split_modules", None) or ())}
        memory: Any = None if max_memory is None else dict(max_memory)
        if device_map != "sequential":
            memory = get_balanced_memory(model, memory, low_zero=device_map == "balanced_low_0", **block_options)
        device_of_module = infer_auto_device_map(model, memory, **block_options)
    else:
        device_of_module = dict(device_map)
    check_device_map(model, device_of_module)
    devices = {name: _device_of(name, device_of_module) for name in empty}
    # Buffers stay in memory, because the hooks of accelerate move only weights.
    devices |= {name: "cpu" for name, _ in model.named_buffers() if devices.get(name) == "disk"}
    for file, names in names_by_file.items():
        in_memory = [name for name in names if devices[name] != "disk"]
        weights = {name: weight.to(devices[name]) for name, weight in read_weights(file, in_memory, tied).items()}
        model.load_state_dict(weights, strict=False, assign=True)
    tie(model, {name: saved for name, saved in tied.items() if devices[name] == devices[saved] != "disk"})
    index = {
        name: {
            "safetensors_file": str(file),
            "weight_name": tied.get(name, name),
            "dtype": str(dtypes[name]).removeprefix("torch."),
        }
        for file, names in names_by_file.items()
        for name in names
        if devices[name] == "disk"
    }
    main_device = "cpu" if set(map(str, device_of_module.values())) <= {"cpu", "disk"} else None
    dispatch_model(model, device_of_module, main_device=main_device, offload_index=index or None, force_hooks=True)


def whole_blocks(model: nn.Module) -> list[str]:
    """Return the module classes in a model that must not be split over devices."""
    lists = (getattr(module, "_no_split_modules", None) or () for module in model.modules() if module is not model)
    return sorted({"StitchingLayer", *(name for names in lists for name in names)})


def _dtypes(file: Path) -> dict[str, torch.dtype]:
    with safe_open(file, framework="pt") as weights:
        dtypes = {}
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            tensor_slice = weights.get_slice(name)
            dtypes[name] = (tensor_slice[:0] if tensor_slice.get_shape() else weights.get_tensor(name)).dtype
        return dtypes


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a weight: the device of its innermost module in the map."""
    enclosing = [module for module in device_map if not module or name == module or name.startswith(f"{module}.")]
    return device_map[max(enclosing, key=len)]
