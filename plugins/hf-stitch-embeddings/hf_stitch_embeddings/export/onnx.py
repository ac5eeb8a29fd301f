"""Export of a map as an ONNX model."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_stitch.storage.files import write_whole
from hf_stitch_embeddings.embedding_map import EmbeddingMap


class _NormalizedMap(nn.Module):
    """Map with its normalisation."""

    def __init__(self, embedding_map: EmbeddingMap) -> None:
        super().__init__()
        self.stitch = copy.deepcopy(embedding_map.stitch).float().eval().requires_grad_(False)
        self.normalized = embedding_map.normalized

    def forward(self, vectors: Tensor) -> Tensor:
        mapped: Tensor = self.stitch.transform(vectors)
        if not self.normalized:
            return mapped
        mapped = mapped / mapped.abs().amax(dim=1, keepdim=True)  # so that no square is 0 or infinite
        return mapped / mapped.norm(dim=1, keepdim=True)


def export_onnx(embedding_map: EmbeddingMap, path: str | Path) -> Path:
    """Export any map as an ONNX model for onnxruntime and similar runtimes.

    The input is ``vectors``, ``(batch, in_features)`` float32 with any number of rows. The output is ``mapped``,
    ``(batch, out_features)`` float32, normalised if the map normalises. The model does not check its input: zero
    vectors give NaN.

    Args:
        embedding_map: The map.
        path: File to write, weights included. A killed process leaves the old file or the new one.

    Returns:
        The file.

    Raises:
        ImportError: If onnx and onnxscript are not installed.
        OSError: If the file cannot be written.
    """
    example = torch.randn(2, embedding_map.in_features, generator=torch.Generator().manual_seed(0))
    program = torch.onnx.export(
        _NormalizedMap(embedding_map).eval(), (example,), dynamo=True, verbose=False,
        input_names=["vectors"], output_names=["mapped"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    assert program is not None
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, lambda fresh: program.save(fresh, external_data=False))
    return target
