"""Loading a model onto several devices, with weights that stay in their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import nn

from hf_stitch.artefacts.files import check_headers, read_weights, share

DeviceMap: TypeAlias = str | Mapping[str, int | str | torch.device]
"""``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or name of a module -> device, ``"cpu"`` or
``"disk"``, as in accelerate."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


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
    """Read the dtypes of the weights in a file, without the weights."""
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
