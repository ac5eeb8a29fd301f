"""Readings of the layers of a network for metrics of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_stitch.storage.files import decoding, write_whole

SEPARATOR = "\n"
"""Separates a layer from a tensor in the names of a file; names of modules do not contain line breaks."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Reading of a layer by a metric of weights.

    Attributes:
        layer: Name of the layer.
        tensors: Name -> tensor on the CPU, floating point, without gradients. For most metrics a few kilobytes.
        shared: Text that must be equal for two layers to be comparable, such as a hash of shared parts; may be empty.

    Example:
        >>> import torch
        >>> Weights("conv1", {"kernel": torch.ones(9, 3, 3)}, shared="stride 2").shared
        'stride 2'
    """

    layer: str
    tensors: Mapping[str, Tensor]
    shared: str = ""


def save_weights(weights: Mapping[str, Weights], path: Path, metric: str) -> None:
    """Save the readings of a metric to a safetensors file.

    Args:
        weights: Layer -> reading.
        path: The file, which is written atomically.
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
        for layer, reading in weights.items()
        for name, tensor in reading.tensors.items()
    }
    metadata = {"metric": metric, "shared": json.dumps({layer: reading.shared for layer, reading in weights.items()})}
    write_whole(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def load_weights(path: Path, metric: str) -> dict[str, Weights]:
    """Load readings written by :func:`save_weights`.

    Args:
        path: The file.
        metric: Name of the metric that read the weights.

    Raises:
        FileNotFoundError: If the file does not exist.

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
            contents = f"readings of {metadata['metric']}" if "metric" in metadata else "another format"
            raise ValueError(f"{path} must contain readings of {metric}, got {contents}")
        shared: dict[str, str] = json.loads(metadata["shared"])
        tensors: dict[str, dict[str, Tensor]] = {layer: {} for layer in shared}
        for key in file.keys():  # noqa: SIM118
            layer, _, name = key.partition(SEPARATOR)
            tensors[layer][name] = file.get_tensor(key)
        return {layer: Weights(layer, tensors[layer], shared[layer]) for layer in shared}
