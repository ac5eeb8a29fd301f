"""What a result depends on beside its data: versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from hf_stitch import __version__


def versions() -> Mapping[str, str]:
    """Versions of what a result depends on."""
    return {
        "hf_stitch": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "timm")},
    }
