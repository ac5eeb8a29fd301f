"""Adapter for any ``nn.Module``: user code, a torchvision model, a network of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..endpoint import Endpoint
from .base import Adapter, first_argument
from .cut import MASK, Interface
from .override import override_of

CONTEXT_ARGUMENTS = (MASK, "position_ids", "token_type_ids", "cache_position")
"""Arguments that place the content rather than carry it."""


class TorchAdapter(Adapter):
    """A module of user code, cut by what a forward of ``example_inputs`` shows.

    The ``processor`` is any function from one raw sample to one tensor; without one, samples must be tensors or arrays.
    """

    library: ClassVar[str] = "torch"

    @classmethod
    def of(
        cls,
        model: nn.Module,
        endpoint: Endpoint,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> TorchAdapter:
        """Wrap a live module.

        Raises:
            ValueError: Without ``example_inputs``: what the module takes cannot be guessed.
        """
        if example_inputs is None:
            example_inputs = override_of(model).example(model)
        if example_inputs is None:
            raise ValueError(
                f"{type(model).__name__} is a class of user code: pass example_inputs, a batch of its inputs "
                "(a tensor or a dict of arguments), so that its cuts can be found and verified"
            )
        example = example_inputs
        if isinstance(example, Tensor):
            example = {first_argument(model): example}
        elif isinstance(example, (tuple, list)):
            example = dict(zip(inspect.signature(model.forward).parameters, example, strict=False))
        return cls(model, interface_of(example, content), example, endpoint, processor)

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


def interface_of(example: Mapping[str, Any], only: str | None = None) -> Interface:
    """How a module takes its input, read off an example; ``only`` one of its arguments is the content, if given.

    Where some are floating-point, the integers and booleans beside them are context: time steps, masks, classes.
    """
    tensors = tuple(n for n, v in example.items() if isinstance(v, Tensor) and n not in CONTEXT_ARGUMENTS)
    floats = tuple(n for n in tensors if example[n].is_floating_point())
    ids = tuple(n for n in tensors if example[n].dtype in (torch.int64, torch.int32) and example[n].dim() == 2)
    content = tuple(n for n in floats or ids if only is None) or tuple(n for n in (*floats, *ids) if n == only)
    if not content:
        raise ValueError(
            f"example_inputs must hold a tensor of content{f' {only!r}' if only else ''}: floating-point numbers, or "
            f"token ids of the shape (samples, tokens); got {', '.join(example) or 'none'}"
        )
    values = {n: example[n] for n in content if n in floats}
    modality = "text" if not values else "image" if example[content[0]].dim() == 4 else "tensor"
    return Interface(
        content,
        modality,
        shapes={n: tuple(v.shape[1:]) for n, v in values.items()},
        dtypes={n: str(v.dtype).removeprefix("torch.") for n, v in values.items()},
        given=tuple(n for n in tensors if n not in content),
    )
