"""Choose the runtime of a network by the prefix of its name, such as ``mlx:./port``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_stitch import Adapter, load
from hf_stitch_versions.ports.port import PACKAGES, Port
from hf_stitch_versions.sources import Source

SUFFIXES = {".xml": "openvino", ".gguf": "gguf", ".keras": "keras"}
"""Suffix of a file -> its runtime."""

PREFIX = re.compile(r"([A-Za-z][A-Za-z0-9_]+):(.+)")


def prefixed(name: object) -> tuple[str, str] | None:
    """Return the runtime and the place that a name contains; ``None`` for other names.

    Raises:
        ValueError: If the runtime is not supported.
    """
    if isinstance(name, Path):
        return (SUFFIXES[name.suffix], str(name)) if name.suffix in SUFFIXES else None
    found = PREFIX.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    runtime, place = found.groups()
    if runtime not in (known := [*PACKAGES, "gguf"]):
        raise ValueError(
            f"expected one of the runtimes {', '.join(known)}, got {runtime!r}. For other runtimes, save activations "
            "under the layer names of the first network as .npz, and pass this file (hf_stitch.Activations)"
        )
    return runtime, place


def opened(
    runtime: str, place: Path, first: Adapter, python: Mapping[str, str], trust: bool, seconds: float
) -> Adapter | Source:  # fmt: skip
    """Start the runtime of a network, or load a GGUF file into transformers.

    Raises:
        FileNotFoundError: If the file or folder does not exist.
        ImportError: If the runtime is not installed.
        ValueError: If the runtime cannot load the network.
    """
    if not place.exists():
        raise FileNotFoundError(f"expected a file or folder for {runtime}, but {place} does not exist")
    if runtime != "gguf":
        return Port(runtime, place, python=python.get(runtime), trust=trust, seconds=seconds)
    kind: Any = type(first.model)
    model = kind.from_pretrained(place.parent, gguf_file=place.name, dtype="float32")
    return load(model, processor=first.processor, example_inputs=dict(first.example))
