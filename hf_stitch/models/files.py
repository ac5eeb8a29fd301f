"""What a saved stitched model is on disk: a config and weights, written and read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from .configuration import StitchConfig

WEIGHTS = "model.safetensors"


def save_weights(weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int) -> None:
    """Write weights as safetensors, in several files where they are large."""
    save_torch_state_dict(
        _untied({name: tensor.contiguous() for name, tensor in weights.items()}), folder, max_shard_size=max_shard_size
    )


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight with memory of its own: what the parents tied must not be dropped when saving."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in weights.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        if tensor.numel() and key in seen:
            weights[name] = tensor.clone()
        seen.add(key)
    return weights


def read_config(folder: Path) -> StitchConfig:
    """The config in a folder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or of another kind of model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no saved stitched model")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is no valid JSON ({error}); the folder is damaged: save or download it again"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}; save or download it again")
    if values.get("model_type") != StitchConfig.model_type:
        raise ValueError(f"{path} is the config of a {values.get('model_type')!r} model, not of a stitched one")
    return StitchConfig.from_dict(values)


def load_strictly(model: nn.Module, folder: Path) -> None:
    """Load safetensors of a folder into a skeleton; names and shapes must agree exactly, dtypes are as saved."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: the weights are missing; save or download it again")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    shape = tuple(weights.get_slice(name).get_shape())
                    if expected.get(name) != shape:
                        want = f"shape {expected[name]}" if name in expected else "no such weight"
                        raise ValueError(
                            f"{file} and its config disagree about {name!r}: expected {want}, found shape {shape}"
                        )
                    # A copy: in place in the file, memory is aligned by chance, and convolutions round by alignment.
                    state[name] = weights.get_tensor(name).clone()
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{file} cannot be read ({error}); the file is damaged or incomplete: save or download it again"
            ) from error
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights that its config asks for: {', '.join(missing[:5])}")
    model.load_state_dict(state, strict=True, assign=True)
