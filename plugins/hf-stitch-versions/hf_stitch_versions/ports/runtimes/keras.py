"""Network as keras-hub runs it on any backend: a folder of transformers or keras-hub, or a ``.keras`` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
from worker import Call, Seen, Taps

NAMES = {
    "rope_max_wavelength": ["rope_theta"],
    "layer_norm_epsilon": ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"],
    "final_logit_soft_cap": ["final_logit_softcapping"], "attention_logit_soft_cap": ["attn_logit_softcapping"],
    "sliding_window": ["sliding_window"],
}  # fmt: skip
"""Config key of keras-hub -> config keys of transformers."""

INPUTS = {"token_ids": "input_ids", "segment_ids": "token_type_ids", "images": "pixel_values"}
"""Input of keras-hub -> input of transformers."""


def to_numpy(array: Any) -> Any:
    """Return an array of the backend; NumPy has no bfloat16."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(array, "float32") if is_float(array) else array))


def is_float(array: Any) -> bool:
    """Return whether an array holds floating-point numbers."""
    return "float" in keras.backend.standardize_dtype(array.dtype)


def like(array: Any, reference: Any) -> Any:
    """Return a NumPy array in the shape and the dtype of an array of the backend."""
    return keras.ops.convert_to_tensor(np.ascontiguousarray(array).reshape(reference.shape), reference.dtype)


class Runtime:
    """Network of keras-hub. Samples run one by one, because its masks differ from those of transformers."""

    def __init__(self, path: str, trust: bool) -> None:
        if Path(path).is_dir():
            try:
                self.network = keras_hub.models.CausalLM.from_preset(path, preprocessor=None)
            except ValueError:  # no language model
                self.network = keras_hub.models.Backbone.from_preset(path)
        else:
            self.network = keras.saving.load_model(path, compile=False, safe_mode=not trust)
        backbone = getattr(self.network, "backbone", self.network)
        config = backbone.get_config()
        names = [tensor.name for tensor in self.network.inputs]
        self._inputs = {name: INPUTS.get(name, name) for name in names if "mask" not in name}
        self._masks = [name for name in names if "mask" in name]
        dtypes = {keras.backend.standardize_dtype(weight.dtype) for weight in self.network.weights}
        self.about = {
            "runtime": f"keras-hub {keras_hub.__version__} on {keras.backend.backend()}", "padded": False,
            "dtype": sorted(dtypes), "inputs": list(self._inputs.values()),
            "config": {new: config[key] for key, keys in NAMES.items() if key in config for new in keys},
            "unseen": ["samples ran one by one, because keras-hub builds other masks at padding",
                       "functions between the layers of Keras are not compared"],
        }  # fmt: skip

    def run(
        self, inputs: Mapping[str, Any], put: Mapping[Call, Mapping[str, Any]], with_inputs: Sequence[Call]
    ) -> list[Seen]:
        """Run one sample without padding."""
        given = {name: keras.ops.convert_to_tensor(inputs[theirs]) for name, theirs in self._inputs.items()}
        first = next(iter(given.values()))
        given |= {name: keras.ops.ones(first.shape[:2], "int32") for name in self._masks}
        layers = {
            (layer.path or layer.name).replace("/", "."): layer
            for layer in self.network._flatten_layers(include_self=False)
        }
        with Taps({**layers, "": self.network}, keras.ops.is_tensor, put, with_inputs, to_numpy, like) as taps:
            self.network(given)
        return taps.seen
