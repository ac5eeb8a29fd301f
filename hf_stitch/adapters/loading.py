"""From a name, a record or a live module to its adapter: :func:`load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.examples import check_runs
from hf_stitch.reference import ModelReference
from hf_stitch.registry import registries

if TYPE_CHECKING:
    import torch
    from torch import nn


def load(
    model: Any,
    task: str | None = None,
    *,
    example_inputs: Any = None,
    processor: Any = None,
    content: str | None = None,
    **options: Any,
) -> Adapter:
    """A model, ready to be cut: from the Hub, a local folder, by timm's name, or live.

    Args:
        model: ``"org/name"``, ``"org/name@revision"``, ``"timm/…"`` (through timm), ``"timm:name"``, a local folder,
            or a live network: an ``nn.Module``, or what the adapter of a plugin serves. An adapter is returned as it
            is.
        task: For transformers, which head: ``image-classification``, ``text-classification``, ``text-generation``,
            ``fill-mask``, ``text-encoding``, ``feature-extraction``. Default: the class that the model's config names.
        example_inputs: A batch of inputs by which cuts are found and verified: needed for modules of user code, and for
            others where another size than the native one is meant.
        processor: What turns raw samples into inputs, where the model's own is not wanted or not found.
        content: Which argument of the model is cut away from its output, where there are several: of an
            encoder-decoder, ``input_ids`` (the default: its cuts are in the encoder) or ``decoder_input_ids`` (in the
            decoder). The other is context: among the inputs, and known to either half.
        **options: Passed on to transformers' ``from_pretrained`` or timm's ``create_model`` (``dtype``,
            ``device_map``, ``num_classes``, …). With ``pretrained=False`` weights are random, of either library.

    Returns:
        The adapter.

    Raises:
        ValueError: If the model cannot be found or cannot be run with the inputs at hand.

    Example:
        >>> import hf_stitch
        >>> a = hf_stitch.load("timm:resnet10t", pretrained=False)
        >>> a.layers
        ('layer1.0', 'layer2.0', 'layer3.0', 'layer4.0')
    """
    if isinstance(model, Adapter):
        return model
    chosen = {"example_inputs": example_inputs, "processor": processor, "content": content}
    given = {name: value for name, value in chosen.items() if value is not None}
    if isinstance(model, str):
        reference = ModelReference.parse(model, task=task, **options)
        loaded: Adapter = registries.adapters.get(reference.library).load(reference, **given, **options)
        return loaded
    if options:
        raise TypeError(f"a live module takes no loading options, got {', '.join(options)}")
    module = unwrap(model)
    check_runs(module)
    kind = _serving(module)
    return kind.of(module, ModelReference(id=kind.origin(module), library=kind.library, task=task), **given)


def _serving(model: Any) -> type[Adapter]:
    """The adapter of a live network: the one that serves it, or a fallback.

    Raises:
        TypeError: If none does, or several.
    """
    kinds = [registries.adapters.get(name) for name in registries.adapters]
    serving = [kind for kind in kinds if kind.serves(model)]
    chosen = [kind for kind in serving if not kind.fallback] or serving
    if len(chosen) != 1:
        what = f"{type(model).__module__}.{type(model).__name__}"
        names = ", ".join(kind.library for kind in (chosen or kinds))
        raise TypeError(
            f"several adapters serve a {what}: {names}; uninstall all but one"
            if chosen
            else f"model must be a name, an nn.Module, or a network of a library that has an adapter ({names}), got a "
            f"{what}"
        )
    return chosen[0]


def load_on(model: str | nn.Module | Adapter, device: torch.device | None) -> Adapter:
    """An adapter; a model that is loaded here goes to a device (``None``: it stays where it is).

    Args:
        model: As for :func:`load`.
        device: Of the process.
    """
    adapter = load(model)
    if isinstance(model, str) and device is not None:
        adapter.model.to(device)
    return adapter


LABELS = ("id2label", "label2id")


def load_recorded(reference: ModelReference, **options: Any) -> Adapter:
    """The network that a record names; the record may come from anyone, and is trusted with little.

    Args:
        reference: The record.
        **options: The user's own loading options, which win (``token``, ``cache_dir``, ``trust_remote_code``, …).

    Raises:
        ValueError: If the record asks for an option that is not harmless and that the user does not pass as well.
        OSError: If there is no such network.
    """
    trusted = registries.adapters.get(reference.library).trusted_options
    foreign = [
        name
        for name, value in reference.kwargs.items()
        if name not in options and (name not in trusted or ("/" in str(value) and name not in LABELS))
    ]
    if foreign:
        raise ValueError(
            f"the record of {reference} asks to load it with {', '.join(f'{n}={reference.kwargs[n]!r}' for n in foreign)}"
            ", which a record is not trusted with: pass the same yourself if you mean it"
        )
    return load(str(reference), task=reference.task, **{**reference.kwargs, **options})


def unwrap(module: Any) -> Any:
    """The module inside a compiled or data-parallel one; anything else as it is.

    Args:
        module: A live network.
    """
    import torch

    if isinstance(module, torch._dynamo.OptimizedModule):
        return unwrap(module._orig_mod)
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return unwrap(module.module)
    return module
