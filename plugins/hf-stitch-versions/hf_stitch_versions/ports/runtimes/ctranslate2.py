"""Network converted to CTranslate2: its outputs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from worker import Call, Seen


class Runtime:
    """Decoder or encoder of CTranslate2. Samples run one by one, because it takes lengths in place of masks."""

    def __init__(self, path: str, trust: bool) -> None:
        if not Path(path, "model.bin").is_file():
            raise FileNotFoundError(f"expected a folder with model.bin, which its converter writes, got {path}")
        try:
            self._network: Any = ctranslate2.Generator(path, device="cpu", compute_type="default")
            self._decodes = True
        except RuntimeError:
            self._network, self._decodes = ctranslate2.Encoder(path, device="cpu", compute_type="default"), False
        computes = self._network.compute_type
        integers = f"its linear layers compute in {computes}" if computes.startswith("int8") else ""
        self.about = {
            "runtime": f"CTranslate2 {ctranslate2.__version__}", "config": {}, "padded": False, "inputs": [],
            "dtype": [computes.rpartition("_")[2]], "quantized": integers,
            "unseen": ["CTranslate2 returns its outputs only: modules are not compared",
                       "samples ran one by one, because CTranslate2 takes no attention mask"],
        }  # fmt: skip

    def run(
        self, inputs: Mapping[str, Any], put: Mapping[Call, Mapping[str, Any]], with_inputs: Sequence[Call]
    ) -> list[Seen]:
        """Run one sample."""
        ids = next(iter(inputs.values())).tolist()
        if self._decodes:
            outputs = {"logits": np.array(self._network.forward_batch(ids), np.float32)}
        else:
            encoded = self._network.forward_batch(ids)
            outputs = {"last_hidden_state": np.array(encoded.last_hidden_state, np.float32)}
            if encoded.pooler_output is not None:
                outputs["pooler_output"] = np.array(encoded.pooler_output, np.float32)
        return [Seen(("", 0), "outputs", None, put.get(("", 0)) or outputs, {})]
