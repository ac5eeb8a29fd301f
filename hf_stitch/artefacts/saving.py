"""Writing a stitched model to files, and loading it from them, which may be untrusted."""

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
    save_beside,
)
from hf_stitch.artefacts.network import StitchedNetwork, class_of
from hf_stitch.artefacts.record import (
    AUTO_MAP,
    USAGE,
    built_from,
    chained,
    damaged,
    every_half,
    read_config,
    read_record,
)
from hf_stitch.artefacts.weights import STRATEGIES, DeviceMap, described, load_placed, load_strictly, save_weights, ties
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
    "Or save the Stitcher (stitched.stitcher.save_pretrained) and attach it to live modules: Stitcher.attach(source=…, "
    "target=…)"
)
"""Advice for a model that cannot be saved."""

QUANTISED = (
    "a stitched model with a quantised network ({}) cannot be saved: stitch the network before it is quantised. "
    + KEEP_STITCHER + see("not-saved")
)  # fmt: skip

REGISTRATION = """# Read with trust_remote_code=True, for programs that do not import hf_stitch (pip install hf-stitch).
import hf_stitch.auto
from hf_stitch import StitchConfig, StitchedModel
"""
"""The module beside a model: it only imports the installed package."""

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


def check_rebuilt(record: Mapping[str, Any]) -> None:
    """Raise an error if a half of a config, or of the chains inside it, consists of user code."""
    for half in every_half(record):
        if half["blueprint"] is None:
            raise ValueError(half["why"])
        if (how := (half["blueprint"].get("config") or {}).get("quantization_config")) is not None:
            by = how["quant_method"]  # an enum in live networks
            raise ValueError(QUANTISED.format(getattr(by, "value", by)))


def networks_of(record: Mapping[str, Any]) -> Iterator[Method]:
    """Yield what is needed to build the networks of a config, and those of the chains inside it."""
    for half in every_half(record):
        blueprint = half["blueprint"]
        yield "adapters", blueprint["library"]
        yield from (("rewrites", each["name"]) for each in blueprint.get(REWRITES, ()))
        if (inner := chained(half)) is not None:
            yield from Description.of(inner, whole=True).methods


def write(
    model: StitchedNetwork, folder: Path, state_dict: Mapping[str, Tensor] | None, max_shard_size: str | int | None
) -> dict[str, Any]:
    """Write the weights and the processor of a model, and return its record."""
    record = _record(model, folder)
    weights = state_dict or State(model)
    if packed := {type(weight).__name__ for weight in model.parameters() if is_traceable_wrapper_subclass(weight)}:
        raise ValueError(QUANTISED.format(", ".join(packed)))
    tied = ties(weights)
    _check_loads(model, record, described(weights), tied)
    save_beside([model.generation_config] if model.can_generate() else [], folder)
    save_beside([model.processor] if hasattr(model.processor, "save_pretrained") else [], folder)
    if isinstance(model.source, PrefixFront):
        if model.source.reader is None:
            raise ValueError("both tokenizers are missing, with which the model is saved: load it with its files")
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
    """Raise the error of saving, if a model could not be loaded again, without writing its weights."""
    check_rebuilt(model.config.to_dict())
    with tempfile.TemporaryDirectory() as folder:
        record = _record(model, Path(folder))
    weights = State(model)
    _check_loads(model, record, described(weights), ties(weights))


def _record(model: StitchedNetwork, folder: Path) -> dict[str, Any]:
    """Return the record of a model as its config writes it; the folder stays as it is."""
    config: Any = model.config
    config.architectures, config.stitch = [type(model).__name__], model.stitch.to_dict()
    config.save_pretrained(folder)
    record = read_record(folder / CONFIG)
    (folder / CONFIG).unlink()
    return record


def _check_loads(
    model: StitchedNetwork, record: Mapping[str, Any], weights: Mapping[str, Tensor], tied: Container[str]
) -> None:
    """Raise an error if a record and weights, before they are written, could not be loaded as this model again."""
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
        merged = any(type(module).__module__.startswith("peft.") for module in model.modules())
        why = (
            "this model cannot be saved with an adapter of PEFT inside: merge it into its network first, with "
            "merge_and_unload of its PeftModel. " + KEEP_STITCHER
            if merged
            else "this model cannot be saved, because its networks were changed by hand, or built in a way that their "
            "configs do not contain, and the configs are what loads it: "
            f"{'; '.join(differing)}. Change the config before a network is built, or its modules by a recorded "
            "hf_stitch.adapters.rewriting.Rewrite. " + KEEP_STITCHER + ", with the same changes"
        )
        raise ValueError(why + see("not-saved"))


def changes_by_hand(model: StitchedNetwork, side: str) -> list[str]:
    """Return what was changed in a half, apart from weights, since it was cut from its network."""
    config: Any = model.config
    half, record = getattr(model, side), getattr(config, side)
    found = changed_by_hand(half, lambda: front_of(config) if side == "source" else back_of(config))
    if found is None:
        return [] if half.made is None else half.made.changes(attributes(half))
    now, then = found
    known, cut = (record["reference"].get("config") or {}).get("chosen", {}), half.cut.layer
    names = {name: name.removeprefix("model.").replace(f"{cut}.{KEPT}", cut) for name in now.chosen}
    new = {name for name in names if known.get(f"modules.{names[name]}") != now.chosen[name]}
    own, old = (Settings({names[name]: each.chosen[name] for name in new & each.chosen.keys()}) for each in (now, then))
    return old.changes(own)


def load_pretrained(
    wanted: type[M], place: str, options: dict[str, Any], *, dtype: torch.dtype | None, device_map: Any,
    max_memory: Mapping[int | str, int | str] | None, subfolder: str, config: StitchConfig | None,
    attention: str | None, allow_modified: bool,
) -> M:  # fmt: skip
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
    wanted: type[M], folder: Path, given: StitchConfig | None, attention: str | None, allow_modified: bool,
    placed: DeviceMap | None, max_memory: Mapping[int | str, int | str] | None,
) -> M:  # fmt: skip
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
        kind = class_of(config)
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


def _skeleton(kind: type[M], config: StitchConfig, path: Path) -> M:
    with built_from(path), weightless():
        return kind(config)


def _read_beside(model: StitchedNetwork, files: SavedFiles) -> None:
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


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype by its name."""
    return None if given is None or given == "auto" else as_dtype(given)


def cast(model: StitchedNetwork, dtype: torch.dtype) -> None:
    """Cast the weights of a stitched model in place.

    As in transformers, buffers that a network computes itself (frequencies of rotary embeddings) and modules that it
    keeps in float32 are not cast, because a cast would change their values.
    """
    for side, half in (("source", model.source), ("target", model.target)):
        network: Any = half.model
        if getattr(network, "config_class", None) is type(model.config):  # a stitched model
            cast(network, dtype)
            continue
        stays = _stays(getattr(model.config, side)["blueprint"], half, dtype)
        for name, tensor in (*half.model.named_parameters(), *half.model.named_buffers()):
            if tensor.is_floating_point() and not stays(name):
                tensor.data = tensor.data.to(dtype)
    model.stitch.to(dtype)


def _stays(blueprint: Mapping[str, Any] | None, half: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate on names of tensors that must not be cast; networks of user code are cast entirely."""
    if blueprint is None:
        return lambda name: False
    with weightless():
        network: Any = network_of(blueprint)
    computed = {name for name, _ in network.named_buffers()} - network.state_dict().keys()
    plan = network._get_dtype_plan(dtype) if isinstance(network, PreTrainedModel) else {}
    kept = [re.compile(rf"(^|\.){re.escape(module)}(\.|$)") for module in plan]
    return lambda name: name in computed or any(module.search(name) for module in kept)
