"""Provenance of results: versions of packages, and distributions of plugins."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from hf_stitch import __version__
from hf_stitch.registry import PluginError, UnknownNameError, registries

Method = tuple[str, str]
"""A registry and a name, for example ``("matchers", "lstsq")``."""


def versions(methods: Iterable[Method] = ()) -> dict[str, str]:
    """Return the versions of the packages behind a result."""
    plugins = [registries[kind].entry(name).provider for kind, name in methods if name in registries[kind]]
    return {
        "hf_stitch": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "timm")},
        **dict(plugin for plugin in plugins if plugin is not None),
    }


def machine() -> str:
    """Describe the machine: system, processor, torch threads, and accelerator."""
    import torch

    parts = [
        f"{platform.system()} {platform.machine()}",
        f"{os.cpu_count()} cores",
        f"{torch.get_num_threads()} threads",
    ]
    return ", ".join(parts + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def requirements(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """List the methods from outside hf-stitch, with their distributions."""
    records = []
    for kind, name in dict.fromkeys(methods):
        if (entry := registries[kind].entry(name)).origin != "built-in":
            provider, release = entry.provider or (None, None)
            key = "distribution" if entry.file is None else "file"
            records.append({"registry": kind, "name": name, "distribution": None, key: provider, "version": release})
    return records


def check_requirements(required: Iterable[Mapping[str, Any]], where: str) -> None:
    """Raise an error if a required method is not installed."""
    for method in required:
        kind, name = str(method["registry"]), str(method["name"])
        try:
            is_installed = name in registries[kind]
        except UnknownNameError as error:  # a registry of an earlier version
            raise PluginError(f"{where} requires {name!r} among {kind}, but {error}") from error
        if is_installed:
            continue
        distribution, release = method.get("distribution"), method.get("version")
        if file := method.get("file"):
            raise PluginError(
                f"{where} requires {name!r} among {kind} from the file {file} ({release}): if you trust that file, "
                "load it with hf_stitch.load_plugin or hf-stitch --plugin"
            )
        if distribution is None:
            raise PluginError(
                f"{where} requires {name!r} among {kind}, which was registered at run time: register it with "
                f"hf_stitch.registries.{kind}.register before loading"
            )
        raise PluginError(
            f"{where} requires {name!r} among {kind} from {distribution} {release}, which is not installed: pip "
            f"install {distribution}"
        )
