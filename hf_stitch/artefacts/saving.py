"""Saving stitched models to files, and loading them from files that may be untrusted."""

from __future__ import annotations

import copy
import inspect
import re
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import GenerationConfig, PreTrainedModel

from hf_stitch import hub
from hf_stitch.adapters.attributes import attributes, changed_by_hand, differences
from hf_stitch.adapters.cutting.surgery import KEPT
from hf_stitch.adapters.pinning import settings_of_processor
from hf_stitch.adapters.prefixes import PrefixFront, fast
from hf_stitch.adapters.rewriting import REWRITES, network_of
from hf_stitch.adapters.untrusted import AttentionError, weightless
from hf_stitch.artefacts.configuration import StitchConfig, back_of, front_of
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import (
    CHECKSUM,
    CONFIG,
    MODEL_FILES,
    MODULE,
    PROCESSOR,
    PROCESSORS,
    SHARDS,
    SOURCE_TOKENIZER,
    TIED,
    WEIGHTS,
    SavedFiles,
    folder_of,
    named_files,
    record_in,
    save_components,
)
from hf_stitch.artefacts.network import StitchedNetwork, class_of
from hf_stitch.artefacts.record import (
    AUTO_MAP,
    USAGE,
    built_from,
    damaged,
    every_half,
    nested_config,
    read_config,
    read_record,
)
from hf_stitch.artefacts.weights import STRATEGIES, DeviceMap, load_placed, load_strictly, on_meta, save_weights, ties
from hf_stitch.offloading import State, is_offloaded
from hf_stitch.options import did_you_mean
from hf_stitch.printing import see, visible, warn
from hf_stitch.provenance import Method, check_requirements
from hf_stitch.records import AGAIN, encode
from hf_stitch.reference import PEFT_CONFIG, Settings, adapter_of_peft
from hf_stitch.stitches.base import as_dtype
from hf_stitch.storage.files import load_whole

M = TypeVar("M", bound=StitchedNetwork)

KEEP_STITCHER = (
    "Or save the Stitcher (stitched.stitcher.save_pretrained) and attach it to the networks: Stitcher.attach(source=…, "
    "target=…)"
)
"""Advice for a model that cannot be saved."""

QUANTIZED = (
    "a stitched model with a quantized network ({}) cannot be saved: stitch the network before quantization. "
    + KEEP_STITCHER + see("not-saved")
)  # fmt: skip

REGISTRATION = """# Read with trust_remote_code=True, for programs that do not import hf_stitch (pip install hf-stitch).
import hf_stitch.auto
from hf_stitch import StitchConfig, StitchedModel
"""
"""The module next to a model: it only imports the installed package."""

PASSED = (
    *("_commit_hash", "_from_auto", "_from_pipeline", "low_cpu_mem_usage", "trust_remote_code"),
    *("offload_folder", "offload_state_dict", "offload_buffers"),  # weights on the disk stay in the model's files
)
"""Options of Auto classes and pipelines for any model, without effect here."""

REFUSED = {
    "ignore_mismatched_sizes": "its files must contain exactly its weights",
    "key_mapping": "its files must contain exactly its weights",
    "gguf_file": "its weights are in safetensors",
    "quantization_config": "quantize both networks before stitching",
    "tp_plan": "its halves run on the devices of a device_map",
}
"""Unsupported options of any model -> reason; they are accepted without a value."""

ALWAYS = ("use_safetensors", "weights_only")
"""Options of any model that are always true here."""


def check_rebuilt(record: Mapping[str, Any]) -> None:
    """Raise an error if a half of a config, or of its nested configs, consists of user code."""
    for half in every_half(record):
        if half["blueprint"] is None:
            raise ValueError(half["why"])
        if (quantization := (half["blueprint"].get("config") or {}).get("quantization_config")) is not None:
            method = quantization["quant_method"]  # an enum in live networks
            raise ValueError(QUANTIZED.format(getattr(method, "value", method)))


def networks_of(record: Mapping[str, Any]) -> Iterator[Method]:
    """Yield the methods required to build the networks of a config and of its nested configs."""
    for half in every_half(record):
        blueprint = half["blueprint"]
        yield "adapters", blueprint["library"]
        yield from (("rewrites", rewrite["name"]) for rewrite in blueprint.get(REWRITES, ()))
        if (inner := nested_config(half)) is not None:
            yield from Description.of(inner, whole=True).methods


def write(
    model: StitchedNetwork, folder: Path, state_dict: Mapping[str, Tensor] | None, max_shard_size: str | int | None
) -> dict[str, Any]:
    """Write the weights and the processor of a model, and return its record."""
    record = _record(model, folder)
    weights = state_dict or State(model)
    if quantized := {type(weight).__name__ for weight in model.parameters() if is_traceable_wrapper_subclass(weight)}:
        raise ValueError(QUANTIZED.format(", ".join(quantized)))
    tied = ties(weights)
    _check_loads(model, record, on_meta(weights), tied)
    save_components([model.generation_config] if model.can_generate() else [], folder)
    save_components([model.processor] if hasattr(model.processor, "save_pretrained") else [], folder)
    if isinstance(model.source, PrefixFront):
        if model.source.reader is None:
            raise ValueError("the model cannot be saved without its tokenizers: load it with its files")
        model.source.reader.source.save(str(folder / SOURCE_TOKENIZER))
    save_weights(weights, folder, max_shard_size or ("500MB" if is_offloaded(model) else "5GB"), tied)
    (folder / MODULE).write_text(REGISTRATION, encoding="utf-8")
    settings = settings_of_processor(model.processor)
    return {
        USAGE: "import hf_stitch before AutoModel, pipeline, or other libraries load this folder, or pass "
        "trust_remote_code=True to them",
        **record,
        AUTO_MAP: dict.fromkeys(("AutoModel", model.auto_class), f"{Path(MODULE).stem}.StitchedModel")
        | {"AutoConfig": f"{Path(MODULE).stem}.StitchConfig"},
        PROCESSOR: None if settings is None else encode(settings),
        **({TIED: tied} if tied else {}),
    }


def check_saves(model: StitchedNetwork) -> None:
    """Raise an error, without writing weights, for a model that cannot be saved and loaded again."""
    check_rebuilt(model.config.to_dict())
    with tempfile.TemporaryDirectory() as folder:
        record = _record(model, Path(folder))
    weights = State(model)
    _check_loads(model, record, on_meta(weights), ties(weights))


def _record(model: StitchedNetwork, folder: Path) -> dict[str, Any]:
    """Return the record of a model as written by its config; the folder is unchanged afterwards."""
    config: Any = model.config
    config.architectures, config.stitch = [type(model).__name__], model.stitch.to_dict()
    config.save_pretrained(folder)
    record = read_record(folder / CONFIG)
    (folder / CONFIG).unlink()
    return record


def _check_loads(
    model: StitchedNetwork, record: Mapping[str, Any], weights: Mapping[str, Tensor], tied: Container[str]
) -> None:
    """Raise an error, before writing, if loading the record and weights would not return this model."""
    try:
        config = StitchConfig.from_dict(dict(record))
        with weightless():
            skeleton = class_of(config)(config)
    except Exception as error:  # libraries raise any exception
        raise ValueError(
            f"this model cannot be saved, because it could not be loaded again ({type(error).__name__}: {error}). "
            + KEEP_STITCHER
            + see("not-saved")
        ) from error
    if differing := differences(model, weights, skeleton):
        has_peft = any(type(module).__module__.startswith("peft.") for module in model.modules())
        message = (
            "this model cannot be saved with a PEFT adapter: merge it into its network first, with "
            "merge_and_unload of its PeftModel. " + KEEP_STITCHER
            if has_peft
            else "this model cannot be saved, because its networks differ from the networks of their configs: "
            f"{'; '.join(differing)}. Change the config before building a network, or its modules by a recorded "
            "hf_stitch.adapters.rewriting.Rewrite. " + KEEP_STITCHER + ", with the same changes"
        )
        raise ValueError(message + see("not-saved"))


def changes_by_hand(model: StitchedNetwork, side: str) -> list[str]:
    """Return the changes of a half, except changes of weights, since it was cut from its network."""
    config: Any = model.config
    half, record = getattr(model, side), getattr(config, side)
    states = changed_by_hand(half, lambda: front_of(config) if side == "source" else back_of(config))
    if states is None:
        return [] if half.attributes_at_cut is None else half.attributes_at_cut.changes(attributes(half))
    current, original = states
    recorded, cut = (record["reference"].get("config") or {}).get("chosen", {}), half.cut.layer
    names = {name: name.removeprefix("model.").replace(f"{cut}.{KEPT}", cut) for name in current.chosen}
    changed = {name for name in names if recorded.get(f"modules.{names[name]}") != current.chosen[name]}
    new_settings, old_settings = (
        Settings({names[name]: state.chosen[name] for name in changed & state.chosen.keys()})
        for state in (current, original)
    )
    return old_settings.changes(new_settings)


def load_pretrained(
    model_class: type[M], place: str, options: dict[str, Any], *, dtype: torch.dtype | None, device_map: Any,
    max_memory: Mapping[int | str, int | str] | None, subfolder: str, config: StitchConfig | None,
    attention: str | None, allow_modified: bool,
) -> M:  # fmt: skip
    """Load a model from a folder or the Hub, with options of the download and of Auto classes."""
    download: Any = {name: options.pop(name) for name in hub.DownloadOptions.__annotations__ if name in options}
    if "_adapter_model_path" in (adapter := options.pop("adapter_kwargs", None) or {}):  # an Auto class found it
        raise ValueError(adapter_of_peft(adapter["_adapter_model_path"]))
    for name, option in options.items():
        if name in REFUSED and option:
            raise TypeError(f"stitched models do not support {name}: {REFUSED[name]}")
        if name not in (*PASSED, *REFUSED) and option is not None and not (option is True and name in ALWAYS):
            names = [*inspect.signature(model_class.from_pretrained).parameters, *hub.DownloadOptions.__annotations__]
            hint = did_you_mean(name, names)
            raise TypeError(
                f"from_pretrained of a stitched model got an unexpected option {name!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
    device, placement = _placement(_default_device() if device_map is None else device_map)
    if placement is not None and dtype is not None:
        raise ValueError("dtype cannot be changed while weights are distributed: pass only one of dtype, device_map")
    if max_memory is not None and not isinstance(placement, str):
        raise ValueError("max_memory requires device_map='auto', 'balanced' or 'sequential'")
    folder = folder_of(place, MODEL_FILES, subfolder=subfolder, **download)
    if (folder / PEFT_CONFIG).is_file():
        raise ValueError(adapter_of_peft(folder))
    arguments = config, attention, allow_modified, placement, max_memory
    model = load_whole(folder, CONFIG, lambda: _load(model_class, folder, *arguments))
    if dtype is not None:
        cast(model, dtype)
    if device is not None:
        nn.Module.to(model, device)
    model.config.name_or_path = place
    return model


def _load(
    model_class: type[M], folder: Path, custom: StitchConfig | None, attention: str | None, allow_modified: bool,
    placement: DeviceMap | None, max_memory: Mapping[int | str, int | str] | None,
) -> M:  # fmt: skip
    """Load the files in a folder, and verify at the end that they belong together."""
    path, record = folder / CONFIG, read_config(record_in(folder, CONFIG))
    config: StitchConfig = StitchConfig.from_dict(record, name_or_path=str(folder)) if custom is None else custom
    files = SavedFiles(path, record, allow_modified)
    if not allow_modified and custom is not None and custom.checksum not in (None, record[CHECKSUM]):  # None: a user's
        raise ValueError(f"{path} was replaced after config was read from it; load both again")
    check_requirements(config.requires or (), str(folder))
    if record.get("task") not in (None, config.task):
        warn(
            f"the task in {path} is {visible(str(record['task']))}, but its head is for {config.task}: the model has "
            "this task, and drops the scores of an earlier version"
        )
    with built_from(path):
        actual = class_of(config)
    if not issubclass(actual, model_class):
        raise ValueError(
            f"{folder} contains a {actual.__name__}, not a {model_class.__name__}; use StitchedModel.from_pretrained"
        )
    shards = sorted(file for file in folder.glob(SHARDS) if file.name in files.names)
    if not shards:
        raise FileNotFoundError(f"{folder} does not contain {WEIGHTS}: the weights are missing; {AGAIN}")
    attention = attention or config._attn_implementation  # Auto classes set it
    try:
        model = _skeleton(actual, config, path)
    except AttentionError as error:
        if attention is None:
            raise AttentionError(
                f"{path} cannot be loaded: {error}. It was saved with transformers "
                f"{record.get('transformers_version')}: install this version and the packages of its attention "
                "implementation, or load with attn_implementation='eager' (outputs differ by rounding error)"
            ) from error
        config = copy.deepcopy(config)
        config._attn_implementation_internal = None  # set by the attempt
        for half in every_half({"source": config.source, "target": config.target}):
            if "attention" in half["blueprint"]:
                half["blueprint"]["attention"] = attention
        model = _skeleton(actual, config, path)
    if placement is None:
        load_strictly(model, shards, config.tied_weights)
    else:
        load_placed(model, shards, placement, max_memory, config.tied_weights or {})
    model.anchors = files.anchors()
    try:
        _read_processor(model, files)
    except Exception as error:  # libraries raise any exception on damaged files
        files.verify()
        raise damaged(f"a processor or generation config in {folder}", error) from error
    recorded, now = config.processor_settings, settings_of_processor(model.processor)
    equal = recorded is not None and now is not None and not Settings(**recorded).changes(now)
    files.verify({name for name in files.names if equal and any(fnmatch(name, pattern) for pattern in PROCESSORS)})
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def _default_device() -> torch.device | None:
    """Return the device of ``with torch.device(…)`` or ``torch.set_default_device``; ``None`` for the CPU."""
    if (device := torch.get_default_device()).type == "meta":
        raise RuntimeError(
            "You are using `from_pretrained` with a meta device context manager, or after "
            "torch.set_default_device('meta'): loaded weights require another device; leave it out"
        )
    return None if device.type == "cpu" else device


def _placement(device_map: Any) -> tuple[torch.device | None, DeviceMap | None]:
    """Return the only device in a ``device_map``, or else the map or strategy."""
    if isinstance(device_map, Mapping) and list(device_map) == [""] and device_map[""] != "disk":
        device_map = device_map[""]
    if isinstance(device_map, Mapping) or device_map in STRATEGIES:
        return None, device_map
    try:
        return (None if device_map is None else torch.device(device_map)), None
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device_map must be a device, {', '.join(map(repr, STRATEGIES))}, or a mapping from modules to devices, "
            f"got {device_map!r}"
        ) from None


def _skeleton(model_class: type[M], config: StitchConfig, path: Path) -> M:
    with built_from(path), weightless():
        return model_class(config)


def _read_processor(model: StitchedNetwork, files: SavedFiles) -> None:
    """Read the files next to the weights: processor, tokenizer of the source, generation config."""
    has_prefix = isinstance(model.source, PrefixFront)  # the tokens of the target
    blueprint = getattr(model.config, "target" if has_prefix else "source")["blueprint"]
    with named_files(files.folder, files.names) as folder:
        model.processor = model.processor_in(str(folder), blueprint)
        if isinstance(model.source, PrefixFront):
            tokenizer = Tokenizer.from_file(str(folder / SOURCE_TOKENIZER))
            model.source.attach(tokenizer, fast(model.processor, "target"))
        if model.can_generate() and (folder / "generation_config.json").is_file():
            settings = GenerationConfig.from_pretrained(folder)
            if files.record.get("num_hidden_layers") is None and settings.use_cache is False:
                # Version 0.2 under transformers 5.24 did not find a cache, and saved this like a choice of the user.
                settings.use_cache = None
            model.generation_config = settings


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Convert a dtype or its name to a dtype; ``"auto"`` to ``None``."""
    return None if dtype is None or dtype == "auto" else as_dtype(dtype)


def cast(model: StitchedNetwork, dtype: torch.dtype) -> None:
    """Cast the weights of a stitched model in place.

    As in transformers, computed buffers of a network (frequencies of rotary embeddings) and modules that it keeps in
    float32 are not cast, because a cast would change their values.
    """
    for side, half in (("source", model.source), ("target", model.target)):
        network: Any = half.model
        if getattr(network, "config_class", None) is type(model.config):  # a stitched model
            cast(network, dtype)
            continue
        keeps_dtype = _keeps_dtype(getattr(model.config, side)["blueprint"], half, dtype)
        for name, tensor in (*half.model.named_parameters(), *half.model.named_buffers()):
            if tensor.is_floating_point() and not keeps_dtype(name):
                tensor.data = tensor.data.to(dtype)
    model.stitch.to(dtype)


def _keeps_dtype(blueprint: Mapping[str, Any] | None, half: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate for names of tensors that must not be cast; networks of user code are cast entirely."""
    if blueprint is None:
        return lambda name: False
    with weightless():
        network: Any = network_of(blueprint)
    computed = {name for name, _ in network.named_buffers()} - network.state_dict().keys()
    plan = network._get_dtype_plan(dtype) if isinstance(network, PreTrainedModel) else {}
    float32_modules = [re.compile(rf"(^|\.){re.escape(module)}(\.|$)") for module in plan]
    return lambda name: name in computed or any(module.search(name) for module in float32_modules)
