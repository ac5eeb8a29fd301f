"""References to networks (:class:`ModelReference`), pinned by weights and settings."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self

from hf_stitch.records import REQUIRED, SPARSE, Record
from hf_stitch.registry import UnknownNameError, most_special, registries
from hf_stitch.storage.files import decoding

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ModelReference", "Settings", "weights_hash"]

HUB_DEFAULT = "transformers"
"""The library of Hub models, unless the owner has the name of another library."""

SENTENCES, MODULES, OF_SENTENCES = "sentence_transformers", "modules.json", "config_sentence_transformers.json"
"""The library of sentence encoders, their file with the list of modules, and their file with class and prompts."""

PERSONAL = frozenset(
    (
        "token",
        "cache_dir",
        "proxies",
        "local_files_only",
        "force_download",
        "device_map",
        "offload_folder",
        "trust_remote_code",
    )
)
"""Loading options that do not describe the network and must not be published or repeated without consent."""

FUNCTION = re.compile(r".+\.py:[^/\\]*")
"""Name of a function in a Python file that returns a network; only the command line runs it."""

LONGEST, MOST_NAMED = 100, 8
"""Maximum number of characters of an unhashed setting, and maximum number of listed changes."""


@dataclass(frozen=True)
class Settings:
    """Settings of a network or processor that affect outputs: flat names and plain values.

    Another version of a library may have further settings. Default and derived settings are therefore recorded
    separately, and compared only if both records contain them.

    Attributes:
        chosen: Name -> value of settings other than default or derived ones.
        defaults: Name -> value of default and derived settings.

    Example:
        >>> before = Settings.of({"hidden_act": "gelu", "size": {"height": 32}})
        >>> before.changes(Settings.of({"hidden_act": "relu", "size": {"height": 32}}, {"pooler": "cls"}))
        ["hidden_act 'gelu', now 'relu'"]
    """

    chosen: dict[str, Any] = field(default_factory=dict, metadata=REQUIRED)
    defaults: dict[str, Any] = field(default_factory=dict, metadata=REQUIRED)

    @classmethod
    def of(cls, chosen: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Create settings from nested values of any type.

        Args:
            chosen: Settings other than default or derived ones. ``{"size": {"height": 32}}`` becomes ``size.height``;
                long values are replaced by their hashes.
            defaults: Default and derived settings. Default: empty.
        """
        return cls(dict(_flat(chosen)), dict(_flat(defaults or {})))

    def changes(self, now: Settings) -> list[str]:
        """Compare these recorded settings with current settings.

        Args:
            now: The current settings.

        Returns:
            One text with both values for each of the first differing settings; empty if all are equal.
        """
        old, new = {**self.defaults, **self.chosen}, {**now.defaults, **now.chosen}
        differ = {name for name in old.keys() & new.keys() if old[name] != new[name]}
        differ |= (self.chosen.keys() - new.keys()) | (now.chosen.keys() - old.keys())
        texts = [f"{name} {_formatted(old, name)}, now {_formatted(new, name)}" for name in sorted(differ)]
        return texts if len(texts) <= MOST_NAMED else [*texts[:MOST_NAMED], f"{len(texts) - MOST_NAMED} more"]


@dataclass(frozen=True)
class ModelReference(Record):
    """Reference to a network: its id, the library that loads it, and the loading options.

    Attributes:
        id: Id on the Hub, ``library:name`` (``timm:resnet18``), the absolute path of a local folder, or ``None`` for a
            module of user code.
        library: Library that loads the network: a name in ``hf_stitch.registries.adapters`` (``transformers``,
            ``timm``, ``torch``, or a plugin's).
        revision: Branch, tag or commit on the Hub; ``None`` (default) means the default branch.
        task: Task of the head, if the id does not determine it; otherwise ``None`` (default).
        kwargs: Loading options as JSON values (``torch.bfloat16`` becomes ``"bfloat16"``). Options of a user or a
            machine (``token``, ``cache_dir``, ``device_map``, …) and trust in remote code are never recorded.
        weights_hash: Output of :func:`weights_hash` for the loaded network; ``None`` (default) if unknown.
        config: Config settings that the forward of the network uses; for user code, classes and attributes of its
            modules. ``None`` (default) if unknown.
        processor: Settings of its tokenizer or image processor that affect outputs; for a function of user code, only
            its presence. ``None`` (default) if unknown, or without a processor.
        summary: Class and size of the network, for recognising networks without an id, after the name from the command
            line, if any (``mine.py:small``); not compared. ``None`` (default) if unknown.
        license: Name of its licence on the Hub (``apache-2.0``); not compared. ``None`` (default) if unknown.

    Raises:
        UnknownNameError: If the adapter is not installed.

    Example:
        >>> gpt2 = ModelReference.parse("openai-community/gpt2@607a30d", task="text-generation")
        >>> gpt2.id, gpt2.library, gpt2.revision, gpt2.task
        ('openai-community/gpt2', 'transformers', '607a30d', 'text-generation')
        >>> print(gpt2)
        openai-community/gpt2@607a30d
        >>> ModelReference.parse("timm/rexnet_100.nav_in1k").library
        'timm'
    """

    id: str | None
    library: str
    revision: str | None = None
    task: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    weights_hash: str | None = None
    config: Settings | None = field(default=None, hash=False, repr=False)
    processor: Settings | None = field(default=None, hash=False, repr=False)
    summary: str | None = field(default=None, compare=False, repr=False)
    license: str | None = field(default=None, compare=False, repr=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        if self.library not in registries.adapters:
            raise UnknownNameError(
                f"library must be one of {', '.join(registries.adapters)}, got {self.library!r}; install the plugin if "
                "a plugin provides it"
            )
        recorded = {name: _as_json(value, name) for name, value in self.kwargs.items() if name not in PERSONAL}
        object.__setattr__(self, "kwargs", recorded)

    @classmethod
    def parse(cls, text: str, task: str | None = None, **kwargs: Any) -> ModelReference:
        """Parse the name of a model; an existing folder takes precedence over a Hub id of the same name.

        Args:
            text: ``org/name`` or ``org/name@revision`` (a Hub model, loaded with transformers, or with the library of
                the same name as the owner, for example ``timm/…``), ``timm:name`` (a name defined by a library, for
                timm an architecture), or a local folder with a ``config.json`` that an adapter can read, or, without a
                task, with the ``modules.json`` of a sentence encoder.
            task: Task of the head, if the id does not determine it; otherwise ``None`` (default).
            **kwargs: Loading options to record.

        Raises:
            FileNotFoundError: If the text can only be a folder, and the folder does not exist.

        Example:
            >>> ModelReference.parse("timm:resnet18").library
            'timm'
        """
        if not text.strip():
            raise ValueError("the name of a model is empty: pass a Hub id, timm:name or a local folder")
        if "revision" in kwargs:
            raise ValueError(f"write the revision after the id: {text}@{kwargs['revision']}")
        text = text.strip()
        scheme, colon, rest = text.partition(":")
        if colon and scheme in registries.adapters:
            if "@" in rest:
                raise ValueError(
                    f"{text!r} is a name of {scheme}, which does not support revisions; pin weights on the Hub with "
                    "'owner/name@revision'"
                )
            return cls(text, scheme, task=task, kwargs=kwargs)
        if Path(text).expanduser().is_dir():
            folder = Path(text).expanduser().resolve()
            model_folder = folder / str(kwargs.get("subfolder", ""))
            library = HUB_DEFAULT if kwargs.get("gguf_file") else _library_of(model_folder, whole=task is None)
            return cls(str(folder), library, task=task, kwargs=kwargs)
        name, separator, revision = text.rpartition("@") if "@" in text else (text, "", "")
        if separator and not (name and revision):
            raise ValueError(f"{text!r} has nothing {'after' if name else 'before'} '@'; write 'owner/name@revision'")
        if separator and Path(name).expanduser().is_dir():
            raise ValueError(f"{name!r} is a local folder, without revisions; remove '@{revision}'")
        if looks_local(name) or name.count("/") > 1:
            raise FileNotFoundError(f"the folder {text!r} does not exist; Hub ids are 'name' or 'owner/name'")
        owner, slash, _ = name.partition("/")
        library = owner if slash and owner in registries.adapters else HUB_DEFAULT
        return cls(name, library, revision=revision or None, task=task, kwargs=kwargs)

    @property
    def is_local(self) -> bool:
        """Whether the id is a path on this machine, which must not be published."""
        if self.id is None:
            return False
        local_path = self.id.removeprefix(f"{self.library}:")  # of a library that reads files
        return (
            looks_local(local_path)
            or Path(local_path).is_dir()
            or (local_path != self.id and Path(local_path).is_file())
        )

    @property
    def public(self) -> ModelReference:
        """The reference without the path of a local folder, for publication."""
        return replace(self, id=None, revision=None) if self.is_local else self

    def changes(self, now: ModelReference) -> dict[str, list[str]]:
        """Compare a recorded network with a current network: weights, config and processor, if known for both.

        Args:
            now: The current network, pinned (``adapter.pinned``).

        Returns:
            Differing parts (``weights``, ``config``, ``processor``) -> differences; empty if all parts are equal.

        Example:
            >>> before = ModelReference("org/name", "transformers", config=Settings.of({"hidden_act": "gelu"}))
            >>> before.changes(ModelReference("org/name", "transformers", config=Settings.of({"hidden_act": "relu"})))
            {'config': ["hidden_act 'gelu', now 'relu'"]}
        """
        changes = {}
        if self.weights_hash and now.weights_hash and self.weights_hash != now.weights_hash:
            changes["weights"] = [f"hash {self.weights_hash}, now {now.weights_hash}"]
        for part, old, new in (("config", self.config, now.config), ("processor", self.processor, now.processor)):
            if old is not None and new is not None and (differ := old.changes(new)):
                changes[part] = differ
        return changes

    def __str__(self) -> str:
        """Return the id in the syntax of :meth:`parse`, or a description of a module of user code."""
        if self.id is None:
            description = f"{self.summary}," if self.summary else f"live {self.library} module"
            return f"{description} {(self.weights_hash or '')[:15]}".strip(", ")
        return self.id + (f"@{self.revision}" if self.revision else "")


def shareable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the paths of local folders from the JSON record of a job.

    A reference to a local folder becomes :attr:`ModelReference.public`, with an additional ``name`` of the network.
    """
    result: dict[str, Any] = json.loads(json.dumps(record))
    networks = [(network, ModelReference.from_dict(network["reference"])) for network in _networks_in(result)]
    local_networks = [(network, reference) for network, reference in networks if reference.is_local]
    names = short_names(str(reference.id) for _, reference in local_networks)
    for network, reference in local_networks:
        network |= {"reference": reference.public.to_dict(), "name": names[str(reference.id)]}
    return result


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Name each path by its shortest unique ending.

    Example:
        >>> short_names(["/home/alice/first/vit", "/home/alice/second/vit", "/home/alice/bert"])
        {'/home/alice/first/vit': 'first/vit', '/home/alice/second/vit': 'second/vit', '/home/alice/bert': 'bert'}
    """
    parts = {path: PurePath(path).parts for path in paths}
    all_parts = set(parts.values())
    return {
        path: next(
            ("/".join(names[-n:]) for n in range(1, len(names)) if sum(names[-n:] == p[-n:] for p in all_parts) == 1),
            "/".join(names),
        )
        for path, names in parts.items()
    }


def _networks_in(record: Any) -> Iterator[dict[str, Any]]:
    if isinstance(record, dict):
        if isinstance(record.get("reference"), dict):
            yield record
        for value in record.values():
            yield from _networks_in(value)


def libraries_reading(config: Mapping[str, Any]) -> list[str]:
    """Return the libraries with adapters for a ``config.json``; a library takes precedence over the one it extends."""
    foreign = () if config.get("model_type") == "hf_stitch" else ("hf_stitch",)  # its import is slow
    kinds = [kind for kind in registries.adapters.usable(without=foreign) if kind().reads(config)]
    return [kind.name for kind in most_special(kinds)]


def weights_hash(module: nn.Module | Mapping[str, Tensor]) -> str:
    """Hash the ``state_dict`` of a module: names, dtypes, shapes and bytes, sorted by name.

    The hash does not depend on the device or on the registration order of submodules. It changes with any bit of any
    weight or persistent buffer. Weights offloaded by accelerate are loaded one at a time.

    Args:
        module: Module with loaded weights, or its ``state_dict``.

    Returns:
        ``"sha256:"`` and 64 hexadecimal digits.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> twin = torch.nn.Linear(2, 2)
        >>> weights_hash(layer) == weights_hash(twin)
        False
        >>> _ = twin.load_state_dict(layer.state_dict())
        >>> weights_hash(layer) == weights_hash(twin)
        True
    """
    import torch

    from hf_stitch.offloading import State

    digest = hashlib.sha256()
    state = module if isinstance(module, Mapping) else State(module)
    for name in sorted(state):
        for key, value in _parts(name, state[name]):
            if isinstance(value, str):
                digest.update(repr((key, value)).encode())
                continue
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{key} of {type(module).__name__} must be a tensor to be hashed, got {type(value).__name__}"
                )
            if value.is_meta:
                raise ValueError(f"{key} of {type(module).__name__} is on the meta device; load weights before hashing")
            digest.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an entry of a ``state_dict``; a quantized weight has integers, scales and settings."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(value, tuple):  # a linear layer of torch.ao: its weight and its bias
        for number, part in enumerate(value):
            yield from _parts(f"{name}.{number}", part)
    elif isinstance(value, torch.dtype) or value is None:
        yield name, repr(value)
    elif is_traceable_wrapper_subclass(value):  # torchao
        inner, context = value.__tensor_flatten__()
        yield name, f"{type(value).__name__} {context}"
        for part in inner:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, torch.Tensor) and value.is_quantized:
        yield f"{name}.integers", value.int_repr()
        if value.qscheme() == torch.per_tensor_affine:
            yield name, f"{value.dtype} {value.q_scale()} {value.q_zero_point()}"
        else:
            yield name, f"{value.dtype} {value.q_per_channel_axis()}"
            yield f"{name}.scales", value.q_per_channel_scales()
            yield f"{name}.zero_points", value.q_per_channel_zero_points()
    else:
        yield name, value


def summary_of(module: nn.Module) -> str:
    """Return class and size of a network, for people to recognise it.

    Example:
        >>> import torch
        >>> summary_of(torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)))
        'Sequential, 2 layers with weights, 33,310 parameters'
    """
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules())
    count = sum(weight.numel() for weight in module.parameters())
    return f"{type(module).__name__}, {layers} layers with weights, {count:,} parameters"


def _formatted(values: Mapping[str, Any], name: str) -> str:
    text = repr(values[name]) if name in values else "not set"
    return f"{text[1:15]}…" if text.startswith("'sha256:") else text


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
            continue
        text = json.dumps(value, default=_named, sort_keys=True)
        is_short = len(text) <= LONGEST
        yield f"{within}{name}", json.loads(text) if is_short else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _named(value: Any) -> Any:
    """Return a JSON value for an object, equal in every process: names for functions and classes."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    owner = value if hasattr(value, "__qualname__") else type(value)
    by_name = owner is value or " at 0x" in repr(value)  # an address differs between processes
    return f"{owner.__module__}.{owner.__qualname__}" if by_name else repr(value)


PEFT_CONFIG = "adapter_config.json"
"""Config file of a PEFT adapter."""


def as_recorded(reference: ModelReference, record: ModelReference) -> ModelReference:
    """Return a reference with the library of a record: the whole sentence encoder, or its transformer alone."""
    is_encoder = {reference.library, record.library} == {HUB_DEFAULT, SENTENCES}
    return replace(reference, library=record.library) if is_encoder else reference


def adapter_of_peft(place: object) -> str:
    """Return the error message for a PEFT adapter in place of a network."""
    return (
        f"{place} contains a PEFT adapter, which cannot be loaded like a network: load the network with transformers, "
        "and pass hf_stitch.load(peft.PeftModel.from_pretrained(network, folder_of_adapter), processor=tokenizer). For "
        "the command line, merge it: save PeftModel.merge_and_unload() and the tokenizer in a new folder"
    )


def looks_local(name: str) -> bool:
    """Return whether a name has the form of a local path, not of a Hub id; the path may not exist."""
    return Path(name).is_absolute() or name.startswith((".", "~"))


def _library_of(folder: Path, *, whole: bool) -> str:
    """Return the library of a folder: of its ``config.json``, or, if ``whole``, of its sentence encoder, if any."""
    if whole and any((folder / name).is_file() for name in (MODULES, OF_SENTENCES)):
        return SENTENCES
    path = folder / "config.json"
    if not path.is_file():
        if (folder / PEFT_CONFIG).is_file():
            raise ValueError(adapter_of_peft(folder))
        names = sorted(p.name for p in folder.iterdir())
        gguf = next((f". To load a GGUF file, pass gguf_file={name!r}" for name in names if name.endswith(".gguf")), "")
        listing = ", ".join(names[:8]) or "nothing"
        raise ValueError(f"{folder} does not contain config.json, so it is not a model; it contains {listing}{gguf}")
    with decoding(path):
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it must contain a JSON object, got {type(config).__name__}")
        libraries = libraries_reading(config)
        if len(libraries) == 1:
            return libraries[0]
        keys = ", ".join(sorted(config)) or "nothing"
        if libraries:
            raise ValueError(f"several adapters can read {path}: {', '.join(libraries)}; it contains {keys}")
        raise ValueError(
            f"no adapter ({', '.join(registries.adapters)}) can read {path}: transformers looks for 'model_type', "
            f"timm for 'architecture'; it contains {keys}"
        )


def _as_json(option: Any, name: str) -> Any:
    if option is None or isinstance(option, (str, bool, int, float)):
        return option
    if isinstance(option, (list, tuple)):
        return [_as_json(inner, name) for inner in option]
    if isinstance(option, Mapping) and all(isinstance(key, str) for key in option):
        return {key: _as_json(inner, name) for key, inner in option.items()}
    if f"{type(option).__module__}.{type(option).__name__}" in ("torch.dtype", "torch.device"):
        return str(option).removeprefix("torch.")
    raise TypeError(
        f"the loading option {name}={option!r} cannot be recorded as JSON, so the model could not be loaded again: "
        "load the module yourself and pass it"
    )
