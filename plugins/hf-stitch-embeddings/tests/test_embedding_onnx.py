"""Maps in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap
from hf_stitch_embeddings.export import export_onnx

from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch, PiecewiseStitch, ResidualMLPStitch

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
STITCHES = [
    LinearStitch(12, 9),
    LowRankStitch(12, 9, rank=3),
    ResidualMLPStitch(12, 9, hidden=5),
    PiecewiseStitch(12, 9, pieces=3),
    IdentityStitch(12, 12),
]


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("stitch", STITCHES, ids=lambda stitch: stitch.name)
def test_it_computes_the_map_for_any_number_of_rows(stitch: Any, metric: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for parameter in stitch.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    embedding_map = EmbeddingMap.of(stitch, metric=metric)
    session = onnxruntime.InferenceSession(export_onnx(embedding_map, tmp_path / "map.onnx"))
    for rows in (1, 2, 77):
        vectors = np.random.default_rng(rows).normal(size=(rows, 12)).astype(np.float32)
        (mapped,) = session.run(["mapped"], {"vectors": vectors})
        np.testing.assert_allclose(mapped, embedding_map(vectors), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["map.onnx"]  # weights inside
