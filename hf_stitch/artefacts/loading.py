"""Loading a stitched model from its files, which may be untrusted."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig

from hf_stitch import hub
from hf_stitch.adapters.pinning import settings_of_processor
from hf_stitch.adapters.prefixes import PrefixFront, fast
from hf_stitch.adapters.untrusted import AttentionError, weightless
from hf_stitch.artefacts.artefact import folder_of
from hf_stitch.artefacts.casting import cast
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.files import (
    CONFIG,
    MODEL_FILES,
    PROCESSORS,
    SHARDS,
    SOURCE_TOKENIZER,
    WEIGHTS,
    load_strictly,
    named_files,
    record_in,
)
from hf_stitch.artefacts.halves import every_half
from hf_stitch.artefacts.manifest import CHECKSUM, SavedFiles
from hf_stitch.artefacts.placing import STRATEGIES, DeviceMap, load_placed
from hf_stitch.artefacts.record import built_from, damaged, read_config
from hf_stitch.options import did_you_mean
from hf_stitch.printing import visible, warn
from hf_stitch.provenance import check_requirements
from hf_stitch.records import AGAIN
from hf_stitch.reference import PEFT_CONFIG, Settings, adapter_of_peft
from hf_stitch.storage.files import load_whole

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


PASSED = (
    *("_commit_hash", "_from_auto", "_from_pipeline", "low_cpu_mem_usage", "trust_remote_code"),
    *("offload_folder", "offload_state_dict", "offload_buffers"),  # weights on the disk stay in the model's own files
)
"""Options that Auto classes, pipelines and their users pass to any model, and that have no effect here."""

REFUSED = {
    "ignore_mismatched_sizes": "its files must contain exactly its weights",
    "key_mapping": "its files must contain exactly its weights",
    "gguf_file": "its weights are in safetensors",
    "quantization_config": "quantise both networks, and stitch them then",
    "tp_plan": "its halves run on the devices of a device_map",
}
"""Options of any model that make no sense here, with the reason; without a value they pass."""

ALWAYS = ("use_safetensors", "weights_only")
"""Options of any model that are always true here."""


def load_pretrained(
    wanted: type[StitchedModel], place: str, options: dict[str, Any], *, dtype: torch.dtype | None, device_map: Any,
    max_memory: Mapping[int | str, int | str] | None, subfolder: str, config: StitchConfig | None,
    attention: str | None, allow_modified: bool,
) -> StitchedModel:  # fmt: skip
    """Load a model from a folder or the Hub. Options are those of the download, and what Auto classes pass."""
    download: Any = {name: options.pop(name) for name in hub.DownloadOptions.__annotations__ if name in options}
    if "_adapter_model_path" in (adapter := options.pop("adapter_kwargs", None) or {}):  # an Auto class found it
        raise ValueError(adapter_of_peft(adapter["_adapter_model_path"]))
    for name, value in options.items():
        if name in REFUSED and value:
            raise TypeError(f"a stitched model takes no {name}: {REFUSED[name]}")
        if name not in (*PASSED, *REFUSED) and value is not None and not (value is True and name in ALWAYS):
            known = [*inspect.signature(wanted.from_pretrained).parameters, *hub.DownloadOptions.__annotations__]
            hint = did_you_mean(name, known)
            raise TypeError(
                f"from_pretrained of a stitched model has no option {name!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
    device, placed = _placement(_default_device() if device_map is None else device_map)
    if placed is not None and dtype is not None:
        raise ValueError("dtype cannot be changed while weights are distributed: load with one of dtype, device_map")
    if max_memory is not None and not isinstance(placed, str):
        raise ValueError("max_memory belongs to device_map='auto', 'balanced' or 'sequential'")
    folder = folder_of(place, MODEL_FILES, subfolder=subfolder, **download)
    if (folder / PEFT_CONFIG).is_file():
        raise ValueError(adapter_of_peft(folder))
    given = config, attention, allow_modified, placed, max_memory
    model = load_whole(folder, CONFIG, lambda: _load(wanted, folder, *given))
    if dtype is not None:
        cast(model, dtype)
    if device is not None:
        nn.Module.to(model, device)
    model.config.name_or_path = place
    return model


def _load(
    wanted: type[StitchedModel], folder: Path, given: StitchConfig | None, attention: str | None, allow_modified: bool,
    placed: DeviceMap | None, max_memory: Mapping[int | str, int | str] | None,
) -> StitchedModel:  # fmt: skip
    """Load the files in a folder, and verify them once all are read: then they belong together."""
    path, record = folder / CONFIG, read_config(record_in(folder, CONFIG))
    config: StitchConfig = StitchConfig.from_dict(record, name_or_path=str(folder)) if given is None else given
    files = SavedFiles(path, record, allow_modified)
    if not allow_modified and given is not None and given.checksum not in (None, record[CHECKSUM]):  # None: a user's
        raise ValueError(f"{path} was replaced after the given config had been read from it; load both again")
    check_requirements(config.requires or (), str(folder))
    if record.get("task") not in (None, config.task):
        warn(
            f"{path} calls its task {visible(str(record['task']))}, but its head is for {config.task}: the model "
            "is loaded with this task, without the scores that an earlier version recorded"
        )
    with built_from(path):
        kind = config.model_class
    if not issubclass(kind, wanted):
        raise ValueError(
            f"{folder} contains a {kind.__name__}, not a {wanted.__name__}; load it with StitchedModel.from_pretrained"
        )
    shards = sorted(file for file in folder.glob(SHARDS) if file.name in files.names)
    if not shards:
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: the weights are missing; {AGAIN}")
    attention = attention or config._attn_implementation  # Auto classes set it
    try:
        model = _skeleton(kind, config, path)
    except AttentionError as error:
        if attention is None:
            raise AttentionError(
                f"{path} cannot be loaded: {error}. It was saved with transformers "
                f"{record.get('transformers_version')}: install this version, and the packages of its attention, "
                "or load with attn_implementation='eager', whose outputs differ by rounding"
            ) from error
        config = copy.deepcopy(config)
        config._attn_implementation_internal = None  # set by the attempt
        for half in every_half({"source": config.source, "target": config.target}):
            if "attention" in half["blueprint"]:
                half["blueprint"]["attention"] = attention
        model = _skeleton(kind, config, path)
    if placed is None:
        load_strictly(model, shards, config.tied_weights)
    else:
        load_placed(model, shards, placed, max_memory, config.tied_weights or {})
    model.anchors = files.anchors()
    try:
        _read_beside(model, files)
    except Exception as error:  # libraries raise any exception on damaged files
        files.verify()
        raise damaged(f"a processor or generation config in {folder}", error) from error
    recorded, now = config.processor_settings, settings_of_processor(model.processor)
    same = recorded is not None and now is not None and not Settings(**recorded).changes(now)
    files.verify({name for name in files.names if same and any(fnmatch(name, pattern) for pattern in PROCESSORS)})
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def _default_device() -> torch.device | None:
    """Return the device that ``with torch.device(…)`` or ``torch.set_default_device`` chooses, if it is another one."""
    if (device := torch.get_default_device()).type == "meta":
        raise RuntimeError(
            "You are using `from_pretrained` with a meta device context manager, or after "
            "torch.set_default_device('meta'): weights that are loaded need another device; leave it out"
        )
    return None if device.type == "cpu" else device


def _placement(given: Any) -> tuple[torch.device | None, DeviceMap | None]:
    """Return the only device in a ``device_map``, or the map if it has several or is a strategy."""
    if isinstance(given, Mapping) and list(given) == [""] and given[""] != "disk":
        given = given[""]
    if isinstance(given, Mapping) or given in STRATEGIES:
        return None, given
    try:
        return (None if given is None else torch.device(given)), None
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device_map must be a device, {', '.join(map(repr, STRATEGIES))}, or a mapping from modules to devices, "
            f"got {given!r}"
        ) from None


def _skeleton(kind: type[StitchedModel], config: StitchConfig, path: Path) -> StitchedModel:
    """Build the model of a config without weights."""
    with built_from(path), weightless():
        return kind(config)


def _read_beside(model: StitchedModel, files: SavedFiles) -> None:
    """Read what was saved beside the weights: processor, tokenizer of the source, generation config."""
    reads = isinstance(model.source, PrefixFront)  # the tokens of the target
    blueprint = getattr(model.config, "target" if reads else "source")["blueprint"]
    with named_files(files.folder, files.names) as beside:
        model.processor = model.processor_in(str(beside), blueprint)
        if isinstance(model.source, PrefixFront):
            tokenizer = Tokenizer.from_file(str(beside / SOURCE_TOKENIZER))
            model.source.attach(tokenizer, fast(model.processor, "target"))
        if model.can_generate() and (beside / "generation_config.json").is_file():
            settings = GenerationConfig.from_pretrained(beside)
            if files.record.get("num_hidden_layers") is None and settings.use_cache is False:
                # Version 0.2 saved that it found no cache, as it did under transformers 5.24, like a choice.
                settings.use_cache = None
            model.generation_config = settings
