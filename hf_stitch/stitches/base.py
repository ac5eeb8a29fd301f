"""What every stitch is, and how one is rebuilt from its config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.papers import Paper
from hf_stitch.registry import registries


class Stitch(nn.Module, ABC):
    """A map of vectors, ``(..., in_features)`` to ``(..., out_features)``, applied to every position alike.

    A subclass states its ``name`` in the registry of stitches, computes in ``transform`` and states its
    constructor arguments in ``config``. Its tensors are plain parameters and persistent buffers, so that config and
    state dict together are the whole stitch:

    - ``type(stitch)(**stitch.config())`` is a twin with other values, also under ``torch.device("meta")``;
    - ``twin.load_state_dict(stitch.state_dict(), strict=True)`` makes it the same stitch bit for bit (on meta, with
      ``assign=True``).

    ``fitted`` is no constructor argument, hence no part of ``config``; ``to_dict`` and ``from_dict`` carry it.

    Attributes:
        name: What the registry of stitches calls it.
        title: What it is called in prose: "an affine map".
        papers: Where it comes from.
        in_features: Width of the vectors that come in.
        out_features: Width of the vectors that go out.
        fitted: What the fit found out (rank, penalty, R², …), as JSON values; empty where nothing was fitted.

    Args:
        in_features: Width of the vectors that come in, at least 1.
        out_features: Width of the vectors that go out, at least 1.

    Raises:
        ValueError: A width is below 1.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"a stitch needs widths >= 1, got {in_features} -> {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.fitted: dict[str, float | int | str | bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``.

        Raises:
            ValueError: The last dimension of ``x`` is not ``in_features``.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__} maps {self.in_features} features to {self.out_features}, got an input of shape "
                f"{tuple(x.shape)}; its last dimension must be {self.in_features} (for bchw, move the channels last)"
            )
        return self.transform(x)

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """The map itself, on an input whose last dimension has been checked."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """``name``, ``config()`` and ``fitted`` as one dict of JSON values; :meth:`from_dict` reads it."""
        return {"name": self.name, **self.config(), "fitted": dict(self.fitted)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Stitch:
        """Build the stitch that :meth:`to_dict` described, of whatever class; its weights are then to be loaded.

        Args:
            record: ``name`` (of the registry of stitches), the constructor's arguments and, if it was fitted,
                ``fitted``.

        Raises:
            ValueError: ``name`` is missing.
            UnknownNameError: No stitch is registered under that name.
            TypeError: The stitch does not take one of the arguments, or lacks one.

        Example:
            >>> Stitch.from_dict({"name": "linear", "in_features": 3, "out_features": 2})
            LinearStitch(in_features=3, out_features=2, bias=True, dtype='float32')
        """
        arguments = dict(record)
        fitted = arguments.pop("fitted", {})
        stitch = registries.stitches.build(arguments)
        stitch.fitted = dict(fitted)
        return stitch

    def extra_repr(self) -> str:
        """The config, for ``print``."""
        return ", ".join(f"{key}={value!r}" for key, value in self.config().items())


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating-point dtype from itself or from its name in a config (``"float32"``)."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or its name, such as 'float32', got {dtype!r}")
    return found
