"""What metrics of weights read of the layers of a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_stitch.storage.files import decoding, write_whole

SEPARATOR = "\n"
"""Separates a layer from a tensor in the names of a file; names of modules contain no line break."""


@dataclass(frozen=True, eq=False)
class Weights:
    """What a metric of weights reads of a layer.

    Attributes:
        layer: Name of the layer.
        tensors: Name -> tensor on the CPU, floating point, without gradients. For most metrics a few kilobytes.
        shared: Text that two layers must have in common to be comparable, such as a hash of what they share; empty if
            there is nothing.

    Example:
        >>> import torch
        >>> Weights("conv1", {"kernel": torch.ones(9, 3, 3)}, shared="stride 2").shared
        'stride 2'
    """

    layer: str
    tensors: Mapping[str, Tensor]
    shared: str = ""


def save_weights(weights: Mapping[str, Weights], path: Path, metric: str) -> None:
    """Save what a metric has read of a network to a safetensors file.

    Args:
        weights: Layer -> what was read.
        path: The file, which is written whole or not at all.
        metric: Name of the metric.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "read.safetensors"
        >>> save_weights({"conv1": Weights("conv1", {"kernel": torch.ones(3)})}, path, "kernel_cosine")
        >>> load_weights(path, "kernel_cosine")["conv1"].tensors["kernel"]
        tensor([1., 1., 1.])
    """
    from safetensors.torch import save_file

    tensors = {
        f"{layer}{SEPARATOR}{name}": tensor.contiguous()
        for layer, each in weights.items()
        for name, tensor in each.tensors.items()
    }
    metadata = {"metric": metric, "shared": json.dumps({layer: each.shared for layer, each in weights.items()})}
    write_whole(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def load_weights(path: Path, metric: str) -> dict[str, Weights]:
    """Load what :func:`save_weights` saved.

    Args:
        path: The file.
        metric: Name of the metric that read the weights.

    Raises:
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "read.safetensors"
        >>> save_weights({"conv1": Weights("conv1", {"kernel": torch.ones(3)})}, path, "kernel_cosine")
        >>> list(load_weights(path, "kernel_cosine"))
        ['conv1']
    """
    from safetensors import safe_open

    with decoding(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("metric") != metric:
            found = f"what {metadata['metric']} has read" if "metric" in metadata else "no weights read by a metric"
            raise ValueError(f"{path} contains {found}, not the weights that {metric} reads")
        shared: dict[str, str] = json.loads(metadata["shared"])
        tensors: dict[str, dict[str, Tensor]] = {layer: {} for layer in shared}
        for key in file.keys():  # noqa: SIM118
            layer, _, name = key.partition(SEPARATOR)
            tensors[layer][name] = file.get_tensor(key)
        return {layer: Weights(layer, tensors[layer], shared[layer]) for layer in shared}
