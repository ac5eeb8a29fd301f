"""Encoders with vectors that are computed once and cached on disk."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_stitch import Adapter, Samples
from hf_stitch.representation import Pooling


def digest(*parts: Any) -> str:
    """Hash the inputs of a computation into a short file name."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Encoder:
    """Frozen network that encodes a sample as one vector, the pooled activations at a cut."""

    name: str
    adapter: Adapter
    layer: str
    pooling: Pooling = "mean"

    @torch.no_grad()
    def vectors(self, samples: Samples, cache: Path) -> Tensor:
        """Encode samples as ``(n, width)`` float32, or read them from the cache."""
        made_by = self.adapter.pinned.weights_hash, self.layer, self.pooling, samples.fingerprint
        path = cache / "vectors" / f"{digest(*made_by)}.safetensors"
        if not path.is_file():
            batches = samples.batches(128, progress=f"encoding: {self.name}")
            inputs = (self.adapter.preprocess(batch.samples) for batch in batches)
            parts = [self.adapter.encode(batch, self.layer)[self.layer].rows(self.pooling) for batch in inputs]
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"vectors": torch.cat(parts).float().cpu().contiguous()}, path)
        return load_file(path)["vectors"]
