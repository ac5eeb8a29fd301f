"""Provenance of results: versions of packages, and the distributions of the plugins in use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from hf_stitch import __version__
from hf_stitch.registry import PluginError, UnknownNameError, registries

Method = tuple[str, str]
"""A registry and a name in it, for example ``("matchers", "lstsq")``."""


def versions(methods: Iterable[Method] = ()) -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    plugins = [registries[kind].entry(name).provider for kind, name in methods if name in registries[kind]]
    return {
        "hf_stitch": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "timm")},
        **dict(found for found in plugins if found is not None),
    }


def machine() -> str:
    """Describe the machine: system, processor, threads of torch, and accelerator."""
    import torch

    found = [
        f"{platform.system()} {platform.machine()}",
        f"{os.cpu_count()} cores",
        f"{torch.get_num_threads()} threads",
    ]
    return ", ".join(found + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def requirements(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """List the methods that are not built into hf-stitch, with the distributions that provide them."""
    found = []
    for kind, name in dict.fromkeys(methods):
        if (entry := registries[kind].entry(name)).origin != "built-in":
            provider, release = entry.provider or (None, None)
            by = "distribution" if entry.file is None else "file"
            found.append({"registry": kind, "name": name, "distribution": None, by: provider, "version": release})
    return found


def check_requirements(required: Iterable[Mapping[str, Any]], where: str) -> None:
    """Check that the required methods are installed."""
    for each in required:
        kind, name = str(each["registry"]), str(each["name"])
        try:
            present = name in registries[kind]
        except UnknownNameError as error:  # of an earlier version
            raise PluginError(f"{where} needs {name!r} among {kind}, but {error}") from error
        if present:
            continue
        distribution = each.get("distribution")
        if file := each.get("file"):
            raise PluginError(
                f"{where} needs {name!r} among {kind}, which comes from the file {file} ({each.get('version')}): if "
                "you trust that file, load it with hf_stitch.load_plugin or hf-stitch --plugin"
            )
        if distribution is None:
            raise PluginError(
                f"{where} needs {name!r} among {kind}, which was registered at run time when {where} was created: "
                f"register it with hf_stitch.registries.{kind}.register before loading"
            )
        raise PluginError(
            f"{where} needs {name!r} among {kind}, which comes from {distribution} {each.get('version')}, a package "
            f"that is not installed: pip install {distribution}"
        )
