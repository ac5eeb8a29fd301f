"""Adapter for any ``nn.Module``: user code, or a model of a library without an adapter, e.g. torchvision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import MASK, POSITIONS, Interface
from hf_stitch.adapters.cutting.surgery import CutReached
from hf_stitch.adapters.examples import ExampleError, arguments_of, example_of, kinds_of, named, passes_on
from hf_stitch.adapters.libraries.base import Described, Library
from hf_stitch.adapters.overrides import override_of
from hf_stitch.reference import ModelReference
from hf_stitch.registry import registries

CONTEXT_ARGUMENTS = (MASK, POSITIONS, "token_type_ids", "cache_position")
"""Arguments that describe the content (mask, positions) and are never the content."""


class Torch(Library):
    """Adapter for modules of user code; a trace on ``example_inputs`` finds their cuts.

    The ``processor`` is a function from one raw sample (an image, a text or a pair of texts) to one tensor. The kind of
    samples is determined by trials, or by ``task`` if the trials are ambiguous. Without a processor, samples must be
    tensors or arrays.
    """

    name: ClassVar[str] = "torch"
    fallback: ClassVar[bool] = True

    def serves(self, model: Any) -> bool:
        """Return whether the model is an ``nn.Module``."""
        return isinstance(model, nn.Module)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a module by an example."""
        override = override_of(model)
        if example_inputs is None:
            example_inputs = override.example(model)
        if example_inputs is None and processor is not None and not hasattr(processor, "save_pretrained"):
            example_inputs = example_of(model, processor)
        if example_inputs is None:
            raise ExampleError(
                f"{type(model).__name__} is a custom class, and its inputs cannot be generated: load it with "
                "hf_stitch.load(net, example_inputs=…, processor=…) and pass the adapter. example_inputs is a batch "
                "(a tensor or a dict of arguments) to find and verify cuts",
                model,
            )
        example = named(model, example_inputs, override.options)
        interface = interface_of(model, example, content)
        if MASK in interface.arguments:  # cuts are verified with padding
            example = {MASK: torch.ones_like(example[interface.content[0]]), **example}
        return Described(model, interface, example, processor)

    def adapter(
        self, model: Any, reference: ModelReference, example_inputs: Any = None, processor: Any = None,
        content: str | None = None,
    ) -> Adapter:  # fmt: skip
        """Create the adapter, and check its task and the propagation of the attention mask."""
        if reference.task is not None:
            registries.tasks.check(reference.task)
        adapter = super().adapter(model, reference, example_inputs, processor, content)
        if adapter.interface.modality == "text" and hasattr(processor, "pad_token"):
            _check_mask_arrives(adapter)
        return adapter

    def task(self, adapter: Adapter) -> str | None:
        """Task that was set at loading; otherwise regression, classification, or ``None``.

        Regression if the output is one number per sample; classification of images or texts if it is a vector of
        several. Networks of token ids classify texts, networks of grids classify images, and networks of other tensors
        classify the samples that their processor accepts.
        """
        if adapter.reference.task is not None:
            return adapter.reference.task
        with torch.no_grad():
            output = adapter.forward(adapter._example)
        if not isinstance(output, Tensor) or output.dim() != 2:
            return None
        if output.shape[1] == 1:
            return "regression"
        kind = adapter.interface.modality
        if kind == "tensor" and len(kinds := kinds_of(adapter.processor)) == 1:
            (kind,) = kinds
        return {"image": "image-classification", "text": "text-classification"}.get(kind)


def interface_of(model: nn.Module, example: Mapping[str, Any], content_name: str | None = None) -> Interface:
    """Derive the interface of a module from an example.

    The content consists of the floating-point tensors or, without any, of the token ids. In addition to floating-point
    tensors, integers and booleans are context: time steps, masks, classes.
    """
    tensors = tuple(n for n, v in example.items() if isinstance(v, Tensor) and n not in CONTEXT_ARGUMENTS)
    floats = tuple(n for n in tensors if example[n].is_floating_point())
    ids = tuple(n for n in tensors if example[n].dtype in (torch.int64, torch.int32) and example[n].dim() == 2)
    if not (floats or ids):
        received = ", ".join(f"{name} ({_described(value)})" for name, value in example.items()) or "none"
        raise ExampleError(
            "example_inputs must contain a floating-point tensor, or token ids with the shape (samples, tokens), got "
            f"{received}",
            model,
        )
    if content_name not in (None, *floats, *ids):
        raise ExampleError(
            f"content must be one of the input tensors {', '.join((*floats, *ids))}, got {content_name!r}", model
        )
    content = (content_name,) if content_name else floats or ids
    values = {n: example[n] for n in content if n in floats}
    accepted = {*example, *inspect.signature(model.forward).parameters}
    if passes_on(model):
        accepted |= arguments_of(model, content[0]).keys()
        if (inner := _module_with_mask(model, content[0])) is not None:
            accepted |= inspect.signature(inner.forward).parameters.keys()
    padding = {index for module in model.modules() if isinstance(index := getattr(module, "padding_idx", None), int)}
    modality = "text" if not values else "image" if example[content[0]].dim() == 4 else "tensor"
    return Interface(
        content,
        modality,
        shapes={n: tuple(v.shape[1:]) for n, v in values.items()},
        dtypes={n: str(v.dtype).removeprefix("torch.") for n, v in values.items()},
        special_ids=() if values else tuple(sorted(padding)),
        arguments=() if values else tuple(n for n in (MASK, "token_type_ids", POSITIONS) if n in accepted),
        given=tuple(n for n in tensors if n not in content),
    )


def _check_mask_arrives(adapter: Adapter) -> None:
    """Check that the attention mask of the tokenizer reaches the inner module that accepts it."""
    name, kind = adapter.interface.content[0], type(adapter.model).__name__
    inner = _module_with_mask(adapter.model, name)
    if inner is None and passes_on(adapter.model) and MASK not in adapter.interface.arguments:
        raise ExampleError(
            f"{kind} accepts any arguments, and no inner module names {name} and {MASK}: if it uses the {MASK} of the "
            "tokenizer, add it to example_inputs; otherwise, name the arguments of its forward",
            adapter.model,
        )
    if inner is None or inner is adapter.model:
        return
    mask_arrives: list[bool] = []

    def check_mask(module: nn.Module, args: Any, kwargs: Any) -> None:
        passed = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        mask_arrives.append(passed.get(MASK) is not None)
        raise CutReached

    handle = inner.register_forward_pre_hook(check_mask, with_kwargs=True)
    try:
        with suppress(CutReached), torch.no_grad():
            adapter._run(adapter.example)  # forward would try padding first
    finally:
        handle.remove()
    if mask_arrives == [False]:
        raise ExampleError(
            f"{kind} does not pass {MASK} to {type(inner).__name__}, which would read padding as words: pass it in "
            f"the forward, or load the inner {type(inner).__name__}",
            adapter.model,
        )


def _module_with_mask(model: nn.Module, content: str) -> nn.Module | None:
    """Return the outermost module that names the content and its mask."""
    required = {content, MASK}
    return next((m for m in model.modules() if required <= inspect.signature(m.forward).parameters.keys()), None)


def _described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
