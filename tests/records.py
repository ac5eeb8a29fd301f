"""Changes of saved artefacts, as by a person, an attacker, or a broken disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_stitch.artefacts.files import checksum


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record and sign it again, as an attacker can."""
    record = json.loads(path.read_text())
    change(record)
    record["checksum"] = checksum(record)
    path.write_text(json.dumps(record))


def reweigh(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a safetensors file."""
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def truncate(path: Path, size: int) -> None:
    """Keep the first bytes of a file."""
    path.write_bytes(path.read_bytes()[:size])
