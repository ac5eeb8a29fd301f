"""Which network is meant: :class:`ModelReference`, and the :func:`weights_hash` that pins what it holds."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_stitch.registry import UnknownNameError, registries

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ModelReference", "weights_hash"]

HUB_DEFAULT = "transformers"
"""The library of models on the Hub whose name does not tell another."""

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
"""Loading options that say nothing of the network and must not be published or repeated unasked."""


@dataclass(frozen=True)
class ModelReference:
    """One of the two networks: what it is called, where it comes from and how it was loaded.

    Attributes:
        id: A Hub id, ``library:name`` (``timm:resnet18``), the absolute path of a local folder, or ``None`` for a
            module of user code.
        library: What loads it: a name of ``hf_stitch.registries.adapters`` (``transformers``, ``timm``, ``torch``, or
            that of a plugin).
        revision: Branch, tag or commit on the Hub; ``None`` means the default branch.
        task: Which head, where the id alone does not say it.
        kwargs: Loading options, as JSON values (``torch.bfloat16`` becomes ``"bfloat16"``). Those that belong to a
            user or a machine (``token``, ``cache_dir``, ``device_map``, …) are never recorded, nor is trust in remote
            code.
        weights_hash: What :func:`weights_hash` gives for the loaded network.

    Raises:
        UnknownNameError: If no adapter of that name is installed.
        TypeError: If a loading option cannot be written as JSON, so that no record of the network could repeat it.

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

    def __post_init__(self) -> None:
        """Refuse what no later session could load again."""
        if self.library not in registries.adapters:
            raise UnknownNameError(
                f"library must be one that has an adapter ({', '.join(registries.adapters)}), got {self.library!r}; "
                "that of a plugin must be installed"
            )
        lasting = {name: _as_json(value, name) for name, value in self.kwargs.items() if name not in PERSONAL}
        object.__setattr__(self, "kwargs", lasting)

    @classmethod
    def parse(cls, text: str, task: str | None = None, **kwargs: Any) -> ModelReference:
        """Read what people write to name a model; an existing folder wins over a Hub id of the same name.

        Args:
            text: ``org/name``, ``org/name@revision``, ``timm/…`` (the Hub, through the library that the owner is
                called after), ``timm:name`` (an architecture by timm's name, or whatever another library makes of a
                name), or a local folder with a ``config.json`` that an adapter can read.
            task: Which head, where the id alone does not say it.
            **kwargs: Loading options to record.

        Raises:
            ValueError: If the text is empty, gives a revision that nothing can have, or names a folder without a model.
            FileNotFoundError: If the text can only be a folder and there is none.
        """
        if not text.strip():
            raise ValueError("the name of a model is empty: give a Hub id, timm:name or a local folder")
        if "revision" in kwargs:
            raise ValueError(f"write the revision behind the id: {text}@{kwargs['revision']}")
        text = text.strip()
        scheme, colon, rest = text.partition(":")
        if colon and scheme in registries.adapters:
            if "@" in rest:
                raise ValueError(
                    f"{text!r} is a name of {scheme} and has no revision; pin weights on the Hub by "
                    "'owner/name@revision'"
                )
            return cls(text, scheme, task=task, kwargs=kwargs)
        if Path(text).expanduser().is_dir():
            folder = Path(text).expanduser().resolve()
            return cls(str(folder), _library_of(folder), task=task, kwargs=kwargs)
        name, at, revision = text.rpartition("@") if "@" in text else (text, "", "")
        if at and not (name and revision):
            raise ValueError(f"{text!r} has nothing {'behind' if name else 'before'} '@'; write 'owner/name@revision'")
        if at and Path(name).expanduser().is_dir():
            raise ValueError(f"{name!r} is a local folder, and those have no revision; leave out '@{revision}'")
        if _looks_local(name) or name.count("/") > 1:
            raise FileNotFoundError(f"no folder {text!r}; a model on the Hub is called 'name' or 'owner/name'")
        return cls(name, _library_of_name(name), revision=revision or None, task=task, kwargs=kwargs)

    @property
    def is_local(self) -> bool:
        """Whether the id is a path on this machine, which means nothing elsewhere and is not to be published."""
        return self.id is not None and (_looks_local(self.id) or Path(self.id).is_dir())

    @property
    def public(self) -> ModelReference:
        """What may be published of it: without the path of a local folder."""
        return replace(self, id=None, revision=None) if self.is_local else self

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ModelReference:
        """Read :meth:`to_dict`; keys of a newer version are left out with a warning that names them.

        Raises:
            ValueError: If ``id`` or ``library`` is missing.
        """
        missing = [key for key in ("id", "library") if key not in record]
        if missing:
            raise ValueError(
                f"the record of an reference lacks {' and '.join(missing)}; it has {', '.join(record) or 'none'}"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            warnings.warn(
                f"the record of reference {record['id']!r} has {', '.join(unknown)}, which this version does not know "
                "and leaves out; it was probably written by a newer version",
                stacklevel=2,
            )
        return cls(**{key: value for key, value in record.items() if key in known})

    def __str__(self) -> str:
        """The id as :meth:`parse` reads it; for a module of user code, a description."""
        if self.id is None:
            return f"live {self.library} module" + (f" {self.weights_hash[:15]}" if self.weights_hash else "")
        return self.id + (f"@{self.revision}" if self.revision else "")


def weights_hash(module: nn.Module | Mapping[str, Tensor]) -> str:
    """Hash of everything in a module's ``state_dict``: names, dtypes, shapes and bytes, sorted by name.

    It does not depend on the device or on the order in which submodules were registered, and changes with any bit of
    any weight or persistent buffer.

    Args:
        module: A module whose weights are loaded, or its ``state_dict``.

    Returns:
        ``"sha256:"`` and 64 hexadecimal digits.

    Raises:
        ValueError: If an entry is on the meta device and so has no bytes.
        TypeError: If an entry is no tensor.

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

    digest = hashlib.sha256()
    state = module if isinstance(module, Mapping) else module.state_dict()
    for name, value in sorted(state.items()):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} of {type(module).__name__} must be a tensor to be hashed, got {type(value).__name__}"
            )
        if value.is_meta:
            raise ValueError(f"{name} of {type(module).__name__} is on the meta device; load weights before hashing")
        digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _looks_local(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~"))


def _library_of_name(name: str) -> str:
    """The library that the owner of a Hub id is called after, or else transformers."""
    owner, slash, _ = name.partition("/")
    return owner if slash and owner in registries.adapters else HUB_DEFAULT


def _library_of(folder: Path) -> str:
    """Which library wrote the ``config.json`` of a folder: the adapters are asked."""
    path = folder / "config.json"
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
        raise ValueError(f"{folder} has no config.json, so it holds no model; found: {found or 'nothing'}")
    config = json.loads(path.read_text(encoding="utf-8"))
    reading = [name for name in registries.adapters if registries.adapters.get(name).reads(config)]
    if len(reading) == 1:
        return reading[0]
    found = ", ".join(sorted(config)) or "nothing"
    if reading:
        raise ValueError(f"{path} is read by several adapters: {', '.join(reading)}; found: {found}")
    raise ValueError(
        f"{path} is read by no adapter ({', '.join(registries.adapters)}): transformers looks for 'model_type', timm "
        f"for 'architecture'; found: {found}"
    )


def _as_json(value: Any, name: str) -> Any:
    """A loading option as JSON values; torch's dtypes and devices by their names."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(item, name) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item, name) for key, item in value.items()}
    if f"{type(value).__module__}.{type(value).__name__}" in ("torch.dtype", "torch.device"):
        return str(value).removeprefix("torch.")
    raise TypeError(
        f"the loading option {name}={value!r} cannot be recorded as JSON, so the model could not be found again: "
        "load it yourself and pass the live module"
    )
