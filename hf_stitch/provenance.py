"""What a result depends on beside its data: versions, and the distributions that methods come from."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from hf_stitch import __version__
from hf_stitch.registry import PluginError, registries

Method = tuple[str, str]
"""A registry and a name in it: ``("matchers", "lstsq")``."""


def versions(methods: Iterable[Method] = ()) -> dict[str, str]:
    """Versions of what a result depends on.

    Args:
        methods: Those that were used; the distributions of plugins are listed too.

    Returns:
        Distribution -> version.

    Example:
        >>> sorted(versions())
        ['hf_stitch', 'python', 'timm', 'torch', 'transformers']
    """
    plugins = [registries[kind].distribution(name) for kind, name in methods if name in registries[kind]]
    return {
        "hf_stitch": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "timm")},
        **dict(found for found in plugins if found is not None),
    }


def requirements(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """The methods that hf-stitch itself does not have, with the distributions that bring them.

    Args:
        methods: Those that are needed.

    Returns:
        For each its registry, name, distribution and version; the latter two are ``None`` for what was registered at
        run time.
    """
    found = []
    for kind, name in dict.fromkeys(methods):
        if registries[kind].origin(name) != "built-in":
            distribution, release = registries[kind].distribution(name) or (None, None)
            found.append({"registry": kind, "name": name, "distribution": distribution, "version": release})
    return found


def check_requirements(required: Iterable[Mapping[str, Any]], where: str) -> None:
    """Make sure that methods of plugins are installed.

    Args:
        required: From :func:`requirements`.
        where: What needs them, for messages.

    Raises:
        PluginError: If one is missing; the message says what to install.
    """
    for each in required:
        kind, name = str(each["registry"]), str(each["name"])
        if name in registries[kind]:
            continue
        distribution = each.get("distribution")
        if distribution is None:
            raise PluginError(
                f"{where} needs {name!r} among {kind}, which was registered at run time where it was made: register it "
                f"before loading, by hf_stitch.registries.{kind}.register"
            )
        raise PluginError(
            f"{where} needs {name!r} among {kind}, which comes from {distribution} {each.get('version')}, and that is "
            f"not installed: pip install {distribution}"
        )
