"""Network as mlx-lm runs it: a folder of transformers or of mlx-lm. Its modules have the names of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from worker import Call, Seen, Taps


def to_numpy(array: Any) -> Any:
    """Return an array of MLX; NumPy has no bfloat16."""
    return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


def is_array(value: Any) -> bool:
    """Return whether a value is an array of MLX."""
    return isinstance(value, mx.array)


def like(array: Any, reference: Any) -> Any:
    """Return a NumPy array in the shape and the dtype of an array of MLX."""
    return mx.array(np.ascontiguousarray(array)).reshape(reference.shape).astype(reference.dtype)


class Runtime:
    """Network of mlx-lm. It takes no masks, so samples run one by one."""

    def __init__(self, path: str, trust: bool) -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"expected a folder with config.json and weights, got {path}")
        self.network, _ = load_model(Path(path), trust_remote_code=trust)
        weights: list[Any] = [pair[1] for pair in tree_flatten(self.network.parameters())]
        floats = {str(w.dtype).rpartition(".")[2] for w in weights if mx.issubdtype(w.dtype, mx.floating)}
        arguments: Any = getattr(self.network, "args", None)
        known = dataclasses.asdict(arguments) if hasattr(arguments, "__dataclass_fields__") else {}
        packed = [module for _, module in self.network.named_modules() if "scales" in module]
        integers = sum(module.weight.size * 32 // module.bits for module in packed)
        scales = sum(module[key].size for module in packed for key in ("scales", "biases") if key in module)
        share = integers / (integers + sum(w.size for w in weights if mx.issubdtype(w.dtype, mx.floating)) - scales)
        kinds = ", ".join(sorted({f"{module.bits} bits" for module in packed}))
        self.about = {
            "runtime": f"mlx-lm {mlx_lm.__version__}", "dtype": sorted(floats), "inputs": [], "padded": False,
            "config": {key: value for key, value in known.items() if plain(value)},
            "quantized": f"{share:.0%} of its weights are integers ({kinds})" if packed else "",
            "unseen": ["samples ran one by one, because mlx-lm takes no attention mask"],
        }  # fmt: skip

    def weights(self, name: str) -> dict[str, Any]:
        """Return the weights inside a module; those of quantized layers as they take effect."""
        found = {}
        for path, module in self.network.named_modules():
            inner = path.removeprefix(name).removeprefix(".") if name else path
            if path != name and not path.startswith(f"{name}.") and name:
                continue
            own = {key: value for key, value in module.items() if isinstance(value, mx.array)}
            if "scales" in own:
                options = {
                    "group_size": module.group_size,
                    "bits": module.bits,
                    "mode": getattr(module, "mode", "affine"),
                }
                own["weight"] = mx.dequantize(own["weight"], own.pop("scales"), own.pop("biases", None), **options)
            found.update({f"{inner}.{key}".strip("."): to_numpy(value) for key, value in own.items()})
        return found

    def run(
        self, inputs: Mapping[str, Any], put: Mapping[Call, Mapping[str, Any]], with_inputs: Sequence[Call]
    ) -> list[Seen]:
        """Run one sample without padding."""
        with Taps(dict(self.network.named_modules()), is_array, put, with_inputs, to_numpy, like) as taps:
            self.network(mx.array(next(iter(inputs.values()))))
        return taps.seen


def plain(value: Any) -> bool:
    """Return whether a value of the config can be written as JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
