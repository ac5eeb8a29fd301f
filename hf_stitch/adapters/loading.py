""":func:`load`: the adapter of a network from its name, its record or a live module."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.surgery import alone
from hf_stitch.adapters.examples import check_runs
from hf_stitch.adapters.libraries.base import Described, Library
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.options import Constraint, check
from hf_stitch.plugins import plugin_of
from hf_stitch.reference import FUNCTION, HUB_DEFAULT, MODULES, SENTENCES, ModelReference, as_recorded
from hf_stitch.registry import most_special, registries
from hf_stitch.storage.files import reading


def load(
    model: Any, task: str | None = None, *, example_inputs: Any = None, processor: Any = None,
    content: str | None = None, context: Any = None, **options: Any,
) -> Adapter:  # fmt: skip
    """Load a model and return its adapter, which compares, cuts and stitches it.

    Args:
        model: A Hub id (``"org/name"``, ``"org/name@revision"``; ``"timm/…"`` loads with timm), a timm architecture
            (``"timm:name"``), the path of a local folder (text or ``Path``), or a live network: an ``nn.Module``, or an
            object that the adapter of a plugin serves. An adapter is returned unchanged. A folder or a Hub model with
            ``modules.json`` loads as a sentence encoder with its pooling; pass a task to load only its transformer.
        task: For transformers, the head to load: ``image-classification``, ``text-classification``,
            ``text-generation``, ``fill-mask``, ``text-encoding`` or ``feature-extraction``. Default: the class in the
            config of the model. A head that is missing in the files is initialised randomly, with a warning, and jobs
            do not score it (:attr:`Adapter.new`). For user code, the task of the module. Default: classification of
            the samples that its processor accepts, if it outputs several numbers for each sample.
        example_inputs: Batch of inputs to find and verify cuts: a tensor, or a tuple or mapping of arguments. Required
            for user code, except with a processor that converts texts or images into tensors of one shape. For other
            models, pass it to use an input size that is not native.
        processor: Converts raw samples into inputs, in place of the processor of the model: a tokenizer or image
            processor of transformers, or a function from one sample (an image, a text or a pair of texts) to one
            tensor.
        content: Name of the argument that carries the content, for models with several inputs. For an encoder-decoder
            model, ``input_ids`` (default, with cuts in the encoder) or ``decoder_input_ids`` (with cuts in the
            decoder). The second argument belongs to the context: every input must contain it, and both halves receive
            it. For a multimodal network, ``"image"`` or ``"text"`` (``hf-stitch-towers``).
        context: For a multimodal network, the text for images without a text (``"Describe the image"``).
        **options: Passed to ``from_pretrained`` of transformers or ``create_model`` of timm (``dtype``,
            ``device_map``, ``num_classes``, …). With ``pretrained=False``, both libraries return random weights.
            ``gguf_file`` names a GGUF file in the folder or repository, with its config and tokenizer.

    Raises:
        FileNotFoundError: If the model or revision does not exist or is hidden from the token, or if some of its files
            are not in the folder or the cache and the Hub cannot be reached or contacted.
        PermissionError: If the model is gated, or the token may not read it.
        ConnectionError: If the Hub is not available, or the connection broke.
        ImportError: If the model is a sentence encoder, and sentence-transformers 6 or newer is not installed.

    Example:
        >>> import hf_stitch
        >>> adapter = hf_stitch.load("timm:resnet10t", pretrained=False)
        >>> adapter.layers
        ('layer1.0', 'layer2.0', 'layer3.0', 'layer4.0')
    """
    if isinstance(model, Adapter):
        new_task = task if task is not None and task != model.task else None
        _check_no_options(
            {"task": new_task, "example_inputs": example_inputs, "processor": processor, "content": content}, options
        )
        return model.beside(context)
    if processor is not None and not callable(processor):
        raise TypeError(
            "processor must be a function of one sample, a tokenizer or an image processor of transformers, got "
            f"{type(processor).__name__}"
        )
    if isinstance(model, str | os.PathLike | ModelReference):
        record = model if isinstance(model, ModelReference) else None
        name = str(model) if isinstance(model, ModelReference) else os.fspath(model)
        if record is None and name.endswith(".gguf") and (file := Path(name).expanduser()).is_file():
            name, options = str(file.parent), {**options, "gguf_file": file.name}
        _check_no_file(name)
        reference = ModelReference.parse(name, task=task, **options)
        files = Path(str(reference.id)).expanduser().rglob("*") if reference.is_local else ()
        try:
            with reading(files):
                resolved = record and as_recorded(reference, record)
                reference = resolved or _with_modules(reference, options)
                loaded = _library(reference).load(reference, processor, **options)
                library = _library(loaded.reference)
                adapter = library.adapter(loaded.model, loaded.reference, example_inputs, loaded.processor, content)
                adapter.new = loaded.new
                return adapter.beside(context)
        except Exception as error:
            if (explained := _loading_error(reference, options, error)) is None:
                raise
            raise explained from error
    if options:
        raise TypeError(
            f"a live module does not accept loading options, got {', '.join(options)}: set them when you create the "
            "module"
        )
    module = unwrap(model)
    check_runs(module)
    library = _library_of(module)
    with alone(module):
        reference = ModelReference(id=library.origin(module), library=library.name, task=task)
        return library.adapter(module, reference, example_inputs, processor, content).beside(context)


def described(network: Any) -> Described:
    """Describe a network without its weights, from a live network, a config of transformers, or the name of a model."""
    if isinstance(network, nn.Module):
        module = unwrap(network)
        return _library_of(module).describe(module)
    if isinstance(network, transformers.PretrainedConfig):
        name = (network.architectures or ["AutoModel"])[0]
        if (kind := getattr(transformers, name, None)) is None:
            raise ValueError(f"the config names {name}, which is not a class of transformers: pass the network")
        with weightless():
            model = (kind.from_config if kind is transformers.AutoModel else kind._from_config)(network).eval()
        return _library_of(model).describe(model)
    if not isinstance(network, str | os.PathLike):
        raise TypeError(f"a network must be a name, a config of transformers or a module, got {type(network).__name__}")
    _check_no_file(name := os.fspath(network))
    reference = _with_modules(ModelReference.parse(name, pretrained=False), {})
    with weightless(online=True):
        loaded = _library(reference).load(reference, pretrained=False)
    return _library(loaded.reference).describe(loaded.model, processor=loaded.processor)


def _with_modules(reference: ModelReference, options: Mapping[str, Any]) -> ModelReference:
    """Return the reference with sentence-transformers as its library if the Hub model has ``modules.json``."""
    if (
        reference.is_local
        or reference.library != HUB_DEFAULT
        or reference.task
        or options.keys() & {"subfolder", "gguf_file"}
    ):
        return reference
    repo, revision = str(reference.id), reference.revision
    download: Any = {key: options[key] for key in hub.DownloadOptions.__annotations__ if key in options}
    cached = download.pop("local_files_only", False) or hub.is_out_of_reach(repo, token=download.get("token"))
    file = hub.file_of(repo, MODULES, **download, revision=revision, local_files_only=cached)
    return reference if file is None else dataclasses.replace(reference, library=SENTENCES, revision=file.parent.name)


def _library(reference: ModelReference) -> Library:
    kind: type[Library] = registries.adapters.get(reference.library)
    return kind()


def _check_no_options(values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise an error if loading options are passed with an adapter."""
    if names := [*(name for name, value in values.items() if value is not None), *options]:
        raise TypeError(
            f"an adapter keeps its loading options, got {', '.join(names)}: pass them to the first call of "
            "hf_stitch.load, or load the network, adapter.model, with them"
        )


WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files with the weights of a network, or with an index of its shards."""


def _loading_error(reference: ModelReference, options: Mapping[str, Any], error: Exception) -> Exception | None:
    """Return an error that explains why files of a network could not be read; ``None`` for other reasons."""
    failure, origin = f"{reference} could not be loaded", str(reference.id)
    download: Any = {key: options[key] for key in hub.DownloadOptions.__annotations__ if key in options}
    download["revision"] = reference.revision
    if isinstance(error, SafetensorError):
        folder = Path(origin)
        if not reference.is_local:
            with suppress(OSError):
                folder = hub.download(origin, files=["*.safetensors"], **{**download, "local_files_only": True})
        files = ", ".join(str(file) for file in sorted(folder.glob("*.safetensors")) if _is_damaged(file))
        return ValueError(
            f"{failure}: {files or 'a file of weights'} is damaged ({error}); restore it, or load it from the Hub "
            "again with force_download=True"
        )
    explanation = hub.explained(failure, error)
    has_other_source = reference.is_local or any(name in options for name in ("pretrained", "subfolder", "variant"))
    if explanation is None and type(error) is OSError and not has_other_source:
        explanation = hub.refused(failure, origin, WEIGHTS, **download)
    if explanation is None and type(error) in (OSError, FileNotFoundError) and ".safetensors" in str(error):
        explanation = FileNotFoundError(
            f"{failure}: the copy on this machine is incomplete ({str(error).partition('. ')[0].rstrip('.')}); copy or "
            "download it again. Other formats (pytorch_model.bin) are not supported: load them with transformers, and "
            "write model.safetensors with save_pretrained"
        )
    wrong_option = isinstance(error, TypeError) and options
    missing = isinstance(error, (ImportError, FileNotFoundError))
    is_clear = wrong_option or missing or type(error).__module__.startswith("hf_stitch")
    if explanation is None and reference.is_local and not is_clear and origin not in str(error):
        kind = OSError if isinstance(error, OSError) else ValueError
        return kind(f"{failure} ({type(error).__name__}: {error})")
    return explanation


FILES_OF_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".h5", ".gguf")
"""Suffixes of files with weights, or with a whole network of another library."""


def _check_no_file(name: str) -> None:
    """Raise an error for the path of a file: networks are loaded from folders, except by libraries that read files."""
    if name.partition(":")[0] in registries.adapters:
        return
    path = Path(name).expanduser()
    if (FUNCTION.fullmatch(name) and not path.is_dir()) or (path.is_file() and name.endswith(".py")):
        raise ValueError(
            f"{name} is Python code, which only the command line runs (as mine.py:function). In Python, import the "
            "function and pass its output, hf_stitch.load(function()). If a record contains this name, pass the "
            "network as source=… or target=…"
        )
    if path.is_file() or name.endswith(FILES_OF_WEIGHTS):
        remedy = (
            "To use a file of weights, create the network and pass it: net.load_state_dict(torch.load(path, "
            "weights_only=True)); hf_stitch.load(net, example_inputs=…)"
        )
        if path.suffix == ".gguf":
            remedy = f"For GGUF, pass the path of an existing file or its folder: load(folder, gguf_file={path.name!r})"
        elif path.suffix == ".onnx":
            remedy = (
                "hf_stitch.same(network, file) compares an ONNX export with its network; to cut, compare or stitch it, "
                "load the network"
            )
        raise ValueError(
            f"{name} is a file, but networks are loaded from a folder (with config.json and weights) or from the Hub. "
            f"{remedy}"
        )


class Loadable(Constraint):
    """Constraint on the objects that :func:`load` accepts."""

    def __contains__(self, value: Any) -> bool:
        is_network = isinstance(value, str | os.PathLike | nn.Module | Adapter)
        return is_network or any(kind().serves(value) for kind in registries.adapters.usable())

    def __str__(self) -> str:
        names = ", ".join(kind.name for kind in registries.adapters.usable())
        return f"a network (a name, an nn.Module, or a network of a library with an adapter: {names})"

    def hint(self, value: Any) -> str:
        """Return advice for a class, a state dict, or an object of a plugin."""
        if plugin := plugin_of(value):
            return f"for {plugin}"
        if isinstance(value, type):
            return "pass an instance, with its weights"
        if isinstance(value, Mapping) and value and all(isinstance(weight, torch.Tensor) for weight in value.values()):
            return "load the state dict into a network, net.load_state_dict(state), and pass the network"
        return "pass the original nn.Module" if callable(value) else ""


NetworkLike = Annotated[str | nn.Module | Adapter, Loadable()]
"""A network, in any form that :func:`load` accepts."""


def _is_damaged(file: Path) -> bool:
    try:
        with safe_open(file, "np"):
            return False
    except SafetensorError:
        return True


def _library_of(model: Any) -> Library:
    """Return the library that serves a live network; a fallback library is used last.

    A library that extends a second library takes precedence over it.
    """
    check(NetworkLike, model=model)
    libraries = [kind for kind in registries.adapters.usable() if kind().serves(model)]
    preferred = most_special([kind for kind in libraries if not kind.fallback] or libraries)
    if len(preferred) > 1:
        names = ", ".join(kind.name for kind in preferred)
        class_name = f"{type(model).__module__}.{type(model).__name__}"
        raise TypeError(f"several adapters serve objects of type {class_name}: {names}; uninstall all but one")
    library: Library = preferred[0]()
    return library


def load_on(model: str | nn.Module | Adapter, device: torch.device | None) -> Adapter:
    """Load a model by name onto a device; live networks and adapters are not moved.

    Args:
        model: As for :func:`load`.
        device: Device for a model that is loaded by name; ``None`` for the default device of the library.

    Example:
        >>> import torch
        >>> adapter = load(torch.nn.Linear(4, 2), example_inputs=torch.randn(2, 4))
        >>> load_on(adapter, torch.device("cpu")) is adapter
        True
    """
    adapter = load(model)
    if isinstance(model, str) and device is not None:
        adapter.model.to(device)
    return adapter


LABELS = ("id2label", "label2id")


def load_recorded(reference: ModelReference, **options: Any) -> Adapter:
    """Load the network of a record, which may come from an untrusted source.

    Args:
        reference: The record.
        **options: Loading options of the user (``token``, ``cache_dir``, ``trust_remote_code``, …). They override the
            options of the record.

    Example:
        >>> unsafe = ModelReference("timm:resnet10t", "timm", kwargs={"checkpoint_path": "weights.pth"})
        >>> load_recorded(unsafe)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the record of timm:resnet10t sets the loading option checkpoint_path='weights.pth', ...
    """
    from hf_stitch.adapters.untrusted import is_installed

    trusted = registries.adapters.get(reference.library).trusted_options
    foreign = [
        name
        for name, value in reference.kwargs.items()
        if name not in options
        and (
            name not in trusted
            or ("/" in str(value) and name not in LABELS)
            or (name.endswith("attn_implementation") and not is_installed(value))
        )
    ]
    if foreign:
        raise ValueError(
            f"the record of {reference} sets the loading option "
            f"{', '.join(f'{n}={reference.kwargs[n]!r}' for n in foreign)}, which is not allowed in a record: pass the "
            "option if you trust it"
        )
    return load(reference, task=reference.task, **{**reference.kwargs, **options})


def unwrap(module: Any) -> Any:
    """Return the network inside a compiled or data-parallel module, or inside a ``PeftModel`` that only delegates.

    Args:
        module: A live network.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 2)
        >>> unwrap(torch.compile(net)) is net
        True
    """
    if isinstance(module, torch._dynamo.OptimizedModule):
        return unwrap(module._orig_mod)
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return unwrap(module.module)
    if (peft := sys.modules.get("peft")) is not None and isinstance(module, (peft.PeftModel, peft.PeftMixedModel)):
        tuner, kind = module.base_model, peft.tuners.tuners_utils.BaseTuner
        invoked = any(getattr(config, "alora_invocation_tokens", None) for config in module.peft_config.values())
        forwards = (kind.forward, peft.AdaLoraModel.forward)  # AdaLora changes only the loss
        if isinstance(tuner, kind) and type(tuner).forward in forwards and not invoked:
            return unwrap(tuner.model)
    return module
