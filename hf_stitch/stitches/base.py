"""Base class of stitches; saves stitches and rebuilds them from their config."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch.papers import Paper
from hf_stitch.registry import registries
from hf_stitch.storage.files import decoding, write_whole

RECORD = "stitch"
"""Key of the record in the metadata of a file."""


class Stitch(nn.Module, ABC):
    """Base class of stitches, which map every vector ``(..., in_features)`` to ``(..., out_features)``.

    A subclass sets its ``name`` in the registry of stitches, implements the map in ``transform`` and stores each
    constructor argument in an attribute of the same name. Its tensors are plain parameters and persistent buffers, so
    the config and the state dict determine the stitch:

    - ``type(stitch)(**stitch.config())`` has the same shapes, also under ``torch.device("meta")``;
    - ``twin.load_state_dict(stitch.state_dict(), strict=True)`` then makes it bit-identical (on meta, with
      ``assign=True``).

    :meth:`save` and :meth:`load` do this with one file. A stitch between two named networks, with its recipe and a
    model card, is a :class:`hf_stitch.Stitcher`.

    ``fitted`` is not a constructor argument and not part of ``config``; ``to_dict`` and ``from_dict`` include it.

    ``hf_stitch_testing.check_stitch`` checks these laws for every stitch, by name:

    - ``independent``: vectors are mapped independently. A :class:`SequenceStitch` maps samples independently; masked
      positions do not affect other positions (``padding``), nor later positions earlier ones if ``causal`` is set.
    - ``rebuilt``, ``saved``: config and weights, or a file, reproduce the map bit for bit.
    - ``affine``: a map declared affine equals one weight and one bias.
    - ``shapes``, ``dtypes``, ``width``: leading axes are arbitrary, also empty; the dtype stays; other widths raise.
    - ``gradients``: finite gradients reach the input and the parameters.

    Attributes:
        name: Name in the registry of stitches.
        title: Name in text, for example "an affine map".
        papers: Papers that define the stitch.
        affine: Whether the map is affine. Positions may then be mapped before interpolation.
        in_features: Width of the input vectors.
        out_features: Width of the output vectors.
        fitted: Results of the fit (rank, penalty, R², …) as JSON values; empty if nothing was fitted.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> stitch = LinearStitch(3, 2)
        >>> twin = Stitch.from_dict(stitch.to_dict())
        >>> twin.load_state_dict(stitch.state_dict())
        <All keys matched successfully>
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    affine: ClassVar[bool] = False

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)  # a second base class may create weights
        if in_features < 1 or out_features < 1:
            raise ValueError(f"widths must be at least 1, got {in_features} -> {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.fitted: dict[str, float | int | str | bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__} maps {self.in_features} features to {self.out_features}, got an input of shape "
                f"{tuple(x.shape)}; its last dimension must be {self.in_features} (for bchw, move the channels last)"
            )
        return self.transform(x)

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """Compute the map. ``forward`` has checked the last dimension of the input.

        Args:
            x: ``(..., in_features)``.

        Returns:
            ``(..., out_features)``.
        """

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON values.

        Each argument is read from the attribute of the same name; ``dtype`` is the dtype of the weights, and ``bias``
        a bool.
        """
        names = inspect.signature(type(self)).parameters.keys() - {"dtype"}
        if missing := sorted(name for name in names if not hasattr(self, name)):
            raise AttributeError(
                f"{type(self).__name__} does not have the attribute {missing[0]!r}, an argument of its constructor: "
                "store each argument under its name, or override config"
            )
        arguments = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        if "bias" in arguments and not isinstance(arguments["bias"], bool):
            arguments["bias"] = arguments["bias"] is not None
        if "dtype" in arguments:
            arguments["dtype"] = str(next(chain(self.parameters(), self.buffers())).dtype).removeprefix("torch.")
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return ``name``, ``config()`` and ``fitted`` as a dict of JSON values for :meth:`from_dict`."""
        return {"name": self.name, **self.config(), "fitted": dict(self.fitted)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Stitch:
        """Build a stitch of any class from the output of :meth:`to_dict`, without its weights.

        Args:
            record: ``name`` (in the registry of stitches), the constructor arguments and optionally ``fitted``.

        Example:
            >>> Stitch.from_dict({"name": "linear", "in_features": 3, "out_features": 2})
            LinearStitch(in_features=3, out_features=2, bias=True, dtype='float32')
        """
        arguments = dict(record)
        fitted = arguments.pop("fitted", {})
        stitch = registries.stitches.build(arguments)
        stitch.fitted = dict(fitted)
        return stitch

    def save(self, path: str | Path) -> None:
        """Save the stitch to a safetensors file, with :meth:`to_dict` in its metadata.

        Args:
            path: The file. An existing file is replaced atomically; missing folders are created.
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        metadata = {RECORD: json.dumps(self.to_dict())}
        write_whole(Path(path), lambda file: save_file(tensors, file, metadata))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a stitch saved by :meth:`save` to the CPU, bit for bit.

        Raises:
            FileNotFoundError: The file does not exist.

        Example:
            >>> import tempfile
            >>> from hf_stitch.stitches import LinearStitch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     LinearStitch(3, 2).save(Path(folder) / "map.safetensors")
            ...     Stitch.load(Path(folder) / "map.safetensors")
            LinearStitch(in_features=3, out_features=2, bias=True, dtype='float32')
        """
        with decoding(path), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if RECORD not in metadata:
                raise ValueError(f"{path} is not a stitch file; load a folder with Stitcher or StitchedModel instead")
            with torch.device("meta"):
                stitch = Stitch.from_dict(json.loads(metadata[RECORD]))
            if not isinstance(stitch, cls):
                raise ValueError(
                    f"{path} contains a {type(stitch).__name__}, not a {cls.__name__}; use {type(stitch).__name__}.load"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            expected, got = (
                {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
                for state in (stitch.state_dict(), tensors)
            )
            if expected != got:
                raise ValueError(f"{path} contains the tensors {got}, but its metadata describes {expected}")
            stitch.load_state_dict(tensors, strict=True, assign=True)
            return stitch.eval()

    def extra_repr(self) -> str:
        """Return the config for ``print``."""
        return ", ".join(f"{key}={value!r}" for key, value in self.config().items())


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Convert a ``torch.dtype`` or its name (``"float32"``) to a floating-point dtype."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(resolved, torch.dtype) and resolved.is_floating_point):
        raise ValueError(
            f"dtype must be a floating-point torch.dtype or its name, for example 'float32', got {dtype!r}"
        )
    return resolved
