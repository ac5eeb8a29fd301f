"""Adapter for any ``nn.Module``: user code, a torchvision model, a network of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import MASK, Interface
from hf_stitch.adapters.examples import ExampleError, named
from hf_stitch.adapters.overrides.base import override_of
from hf_stitch.reference import ModelReference

CONTEXT_ARGUMENTS = (MASK, "position_ids", "token_type_ids", "cache_position")
"""Arguments that place the content rather than carry it."""


class TorchAdapter(Adapter):
    """A module of user code, cut by what a forward of ``example_inputs`` shows.

    The ``processor`` is any function from one raw sample to one tensor; without one, samples must be tensors or arrays.
    """

    library: ClassVar[str] = "torch"
    fallback: ClassVar[bool] = True

    @classmethod
    def serves(cls, model: Any) -> bool:
        """Any module that no other adapter serves."""
        return isinstance(model, nn.Module)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> TorchAdapter:
        """Wrap a live module.

        Raises:
            ExampleError: Without ``example_inputs``: what the module takes cannot be guessed. Or if they do not fit it.
        """
        override = override_of(model)
        if example_inputs is None:
            example_inputs = override.example(model)
        if example_inputs is None:
            raise ExampleError(
                f"{type(model).__name__} is a class of user code: pass example_inputs, a batch of its inputs "
                "(a tensor or a dict of arguments), so that its cuts can be found and verified",
                model,
            )
        example = named(model, example_inputs, override.options)
        return cls(model, interface_of(model, example, content), example, reference, processor)

    @property
    def task(self) -> str | None:
        """Classification where a batch of images or token ids gives one vector each."""
        with torch.no_grad():
            output = self.forward(self._example)
        kinds = {"image": "image-classification", "text": "text-classification"}
        return kinds.get(self.interface.modality) if isinstance(output, Tensor) and output.dim() == 2 else None

    def blueprint(self) -> dict[str, Any]:
        """Refused: no config rebuilds user code."""
        raise ValueError(
            f"{type(self.model).__name__} is a class of user code and cannot be rebuilt from a config. Save "
            "the Stitcher (stitched.stitcher.save_pretrained) and attach it to live modules: "
            "Stitcher.attach(source=…, target=…)"
        )


def interface_of(model: nn.Module, example: Mapping[str, Any], only: str | None = None) -> Interface:
    """How a module takes its input, read off an example; ``only`` one of its arguments is the content, if given.

    Where some are floating-point, the integers and booleans beside them are context: time steps, masks, classes.

    Raises:
        ExampleError: If no tensor among them can be the content, or the one that is asked for is none.
    """
    tensors = tuple(n for n, v in example.items() if isinstance(v, Tensor) and n not in CONTEXT_ARGUMENTS)
    floats = tuple(n for n in tensors if example[n].is_floating_point())
    ids = tuple(n for n in tensors if example[n].dtype in (torch.int64, torch.int32) and example[n].dim() == 2)
    if not (floats or ids):
        got = ", ".join(f"{name} ({_told(value)})" for name, value in example.items()) or "none"
        raise ExampleError(
            "example_inputs must hold at least one tensor of content, of floating-point numbers or of token ids "
            f"(samples, tokens), got {got}",
            model,
        )
    if only not in (None, *floats, *ids):
        raise ExampleError(
            f"content must be one of {', '.join((*floats, *ids))}, the tensors of the input, got {only!r}", model
        )
    content = (only,) if only else floats or ids
    values = {n: example[n] for n in content if n in floats}
    modality = "text" if not values else "image" if example[content[0]].dim() == 4 else "tensor"
    return Interface(
        content,
        modality,
        shapes={n: tuple(v.shape[1:]) for n, v in values.items()},
        dtypes={n: str(v.dtype).removeprefix("torch.") for n, v in values.items()},
        given=tuple(n for n in tensors if n not in content),
    )


def _told(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
