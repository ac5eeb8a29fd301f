"""Create an adapter from a name, a record or a live module: :func:`load`."""

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
            object that the adapter of a plugin serves. An adapter is returned unchanged. A folder or a model of the Hub
            with ``modules.json`` is a sentence encoder, with its pooling; pass a task to load its transformer alone.
        task: For transformers, the head to load: ``image-classification``, ``text-classification``,
            ``text-generation``, ``fill-mask``, ``text-encoding`` or ``feature-extraction``. Default: the class that
            the config of the model names. A head that the files lack is new, with a warning, and jobs refuse to score
            it (:attr:`Adapter.new`). For a module of user code, what it does. Default: classification of what
            its processor takes, if it outputs several numbers for each sample.
        example_inputs: Batch of inputs with which cuts are found and verified: a tensor, a tuple of arguments or a
            mapping of them. Required for modules of user code without a processor, or whose processor does not show
            their input: texts or images become tensors of one shape. For other models, pass it to use another input
            size than the native one.
        processor: Turns raw samples into inputs, instead of the processor that comes with the model: a tokenizer or
            image processor of transformers, or a function from one sample (an image, a text or a pair of texts) to one
            tensor.
        content: Name of the argument that carries the content, for models with several. For an encoder-decoder,
            ``input_ids`` (the default, with cuts in the encoder) or ``decoder_input_ids`` (with cuts in the decoder).
            The other argument belongs to the context: every input must contain it, and both halves receive it. For a
            network of images and texts, ``"image"`` or ``"text"`` names its argument (``hf-stitch-towers``).
        context: What a network of images and texts reads beside each image that comes without a text: a text
            (``"Describe the image"``).
        **options: Passed to ``from_pretrained`` of transformers or ``create_model`` of timm (``dtype``,
            ``device_map``, ``num_classes``, …). ``pretrained=False`` gives random weights in both libraries.
            ``gguf_file`` names a GGUF file in the folder or repository, with its config and tokenizer.

    Raises:
        FileNotFoundError: If the model or revision does not exist or is hidden from the token, or if some of its files
            are not in the folder or the cache and the Hub cannot be reached, or may not be contacted.
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
        other = task if task is not None and task != model.task else None
        _check_kept(
            {"task": other, "example_inputs": example_inputs, "processor": processor, "content": content}, options
        )
        return model.beside(context)
    if processor is not None and not callable(processor):
        raise TypeError(
            "processor must be a function of one sample, or a tokenizer or image processor of transformers, got "
            f"{type(processor).__name__}"
        )
    if isinstance(model, str | os.PathLike | ModelReference):
        given = model if isinstance(model, ModelReference) else None
        name = str(model) if isinstance(model, ModelReference) else os.fspath(model)
        if given is None and name.endswith(".gguf") and (file := Path(name).expanduser()).is_file():
            name, options = str(file.parent), {**options, "gguf_file": file.name}
        _check_no_file(name)
        reference = ModelReference.parse(name, task=task, **options)
        files = Path(str(reference.id)).expanduser().rglob("*") if reference.is_local else ()
        try:
            with reading(files):
                recorded = given and as_recorded(reference, given)
                reference = recorded or _whole(reference, options)
                loaded = _library(reference).load(reference, processor, **options)
                library = _library(loaded.reference)
                adapter = library.adapter(loaded.model, loaded.reference, example_inputs, loaded.processor, content)
                adapter.new = loaded.new
                return adapter.beside(context)
        except Exception as error:
            if (found := _explained(reference, options, error)) is None:
                raise
            raise found from error
    if options:
        raise TypeError(
            f"a live module takes no loading options, got {', '.join(options)}: set them when you create the module"
        )
    module = unwrap(model)
    check_runs(module)
    library = _serving(module)
    with alone(module):
        reference = ModelReference(id=library.origin(module), library=library.name, task=task)
        return library.adapter(module, reference, example_inputs, processor, content).beside(context)


def described(network: Any) -> Described:
    """Describe a network without its weights: a live one, a config of transformers, or a name, which names a config."""
    if isinstance(network, nn.Module):
        module = unwrap(network)
        return _serving(module).describe(module)
    if isinstance(network, transformers.PretrainedConfig):
        name = (network.architectures or ["AutoModel"])[0]
        if (kind := getattr(transformers, name, None)) is None:
            raise ValueError(f"the config names {name}, which is no class of transformers: pass the network itself")
        with weightless():
            model = (kind.from_config if kind is transformers.AutoModel else kind._from_config)(network).eval()
        return _serving(model).describe(model)
    if not isinstance(network, str | os.PathLike):
        raise TypeError(f"a network must be a name, a config of transformers or a module, got {type(network).__name__}")
    _check_no_file(name := os.fspath(network))
    reference = _whole(ModelReference.parse(name, pretrained=False), {})
    with weightless(online=True):
        loaded = _library(reference).load(reference, pretrained=False)
    return _library(loaded.reference).describe(loaded.model, processor=loaded.processor)


def _whole(reference: ModelReference, options: Mapping[str, Any]) -> ModelReference:
    """Return the reference of a name with the library that loads all modules, if a model of the Hub lists some."""
    if (
        reference.is_local
        or reference.library != HUB_DEFAULT
        or reference.task
        or options.keys() & {"subfolder", "gguf_file"}
    ):
        return reference
    place, revision = str(reference.id), reference.revision
    access: Any = {key: options[key] for key in hub.DownloadOptions.__annotations__ if key in options}
    cached = access.pop("local_files_only", False) or hub.is_out_of_reach(place, token=access.get("token"))
    file = hub.file_of(place, MODULES, **access, revision=revision, local_files_only=cached)
    return reference if file is None else dataclasses.replace(reference, library=SENTENCES, revision=file.parent.name)


def _library(reference: ModelReference) -> Library:
    kind: type[Library] = registries.adapters.get(reference.library)
    return kind()


def _check_kept(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise an error if options are given with an adapter, which keeps its own."""
    if given := [*(name for name, value in chosen.items() if value is not None), *options]:
        raise TypeError(
            f"an adapter keeps what it was loaded with, got {', '.join(given)}: pass them to the hf_stitch.load that "
            "makes it, or load its network, adapter.model, with them"
        )


WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files with the weights of a network, or with the names of their shards."""


def _explained(reference: ModelReference, options: Mapping[str, Any], error: Exception) -> Exception | None:
    """Return an error that says why the files of a network could not be read; ``None`` if there was another reason."""
    failure, place = f"{reference} could not be loaded", str(reference.id)
    access: Any = {key: options[key] for key in hub.DownloadOptions.__annotations__ if key in options}
    access["revision"] = reference.revision
    if isinstance(error, SafetensorError):
        folder = Path(place)
        if not reference.is_local:
            with suppress(OSError):
                folder = hub.download(place, files=["*.safetensors"], **{**access, "local_files_only": True})
        files = ", ".join(str(file) for file in sorted(folder.glob("*.safetensors")) if _is_damaged(file))
        return ValueError(
            f"{failure}: {files or 'a file of weights'} is damaged ({error}); restore it, or load it from the Hub "
            "again with force_download=True"
        )
    found = hub.explained(failure, error)
    elsewhere = reference.is_local or any(name in options for name in ("pretrained", "subfolder", "variant"))
    if found is None and type(error) is OSError and not elsewhere:
        found = hub.refused(failure, place, WEIGHTS, **access)
    if found is None and type(error) in (OSError, FileNotFoundError) and ".safetensors" in str(error):
        found = FileNotFoundError(
            f"{failure}: the copy on this machine is incomplete ({str(error).partition('. ')[0].rstrip('.')}); copy it "
            "again, or download it with a connection to the Hub. Weights in another format (pytorch_model.bin) are not "
            "loaded: load them with transformers, and save_pretrained writes model.safetensors"
        )
    wrong_option = isinstance(error, TypeError) and options
    missing = isinstance(error, (ImportError, FileNotFoundError))
    ours = wrong_option or missing or type(error).__module__.startswith("hf_stitch")
    if found is None and reference.is_local and not ours and place not in str(error):
        kind = OSError if isinstance(error, OSError) else ValueError
        return kind(f"{failure} ({type(error).__name__}: {error})")
    return found


FILES_OF_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".h5", ".gguf")
"""Ends of the names of files that contain weights, or a whole network of another library."""


def _check_no_file(name: str) -> None:
    """Raise an error for the path of a file: networks are loaded from folders, unless a library reads files."""
    if name.partition(":")[0] in registries.adapters:
        return
    path = Path(name).expanduser()
    if (FUNCTION.fullmatch(name) and not path.is_dir()) or (path.is_file() and name.endswith(".py")):
        raise ValueError(
            f"{name} is Python code, which only the command line runs, if a function of it is typed there as a network "
            "(mine.py:function). In Python, import the function and pass what it returns, hf_stitch.load(function()). "
            "For a network that a record names so, pass the network, as source=… or target=…"
        )
    if path.is_file() or name.endswith(FILES_OF_WEIGHTS):
        how = (
            "For a file of weights, create the network and pass it: net.load_state_dict(torch.load(path, "
            "weights_only=True)); hf_stitch.load(net, example_inputs=…)"
        )
        if path.suffix == ".gguf":
            how = f"For GGUF, name the file, which must exist, or its folder: load(folder, gguf_file={path.name!r})"
        elif path.suffix == ".onnx":
            how = (
                "hf_stitch.same(network, file) compares an export to ONNX with its network; to cut, compare or stitch "
                "it, load that network"
            )
        raise ValueError(
            f"{name} is a file, and a network is loaded from a folder (with config.json and its weights) or from the "
            f"Hub. {how}"
        )


class Loadable(Constraint):
    """What :func:`load` takes."""

    def __contains__(self, value: Any) -> bool:
        known = isinstance(value, str | os.PathLike | nn.Module | Adapter)
        return known or any(kind().serves(value) for kind in registries.adapters.usable())

    def __str__(self) -> str:
        names = ", ".join(kind.name for kind in registries.adapters.usable())
        return f"a network (a name, an nn.Module, or one of a library that has an adapter: {names})"

    def hint(self, value: Any) -> str:
        """Say what to do about a class, a state dict, or what a plugin takes."""
        if plugin := plugin_of(value):
            return f"for {plugin}"
        if isinstance(value, type):
            return "pass an instance, with its weights"
        if isinstance(value, Mapping) and value and all(isinstance(each, torch.Tensor) for each in value.values()):
            return "of a state dict, load the weights into a network, net.load_state_dict(state), and pass that"
        return "pass the nn.Module from which it was made" if callable(value) else ""


NetworkLike = Annotated[str | nn.Module | Adapter, Loadable()]
"""A network, in any form that :func:`load` takes."""


def _is_damaged(file: Path) -> bool:
    try:
        with safe_open(file, "np"):
            return False
    except SafetensorError:
        return True


def _serving(model: Any) -> Library:
    """Return the library that serves a live network; a fallback only if no other does.

    A library that extends another one that also serves the network takes precedence over it.
    """
    check(NetworkLike, model=model)
    serving = [kind for kind in registries.adapters.usable() if kind().serves(model)]
    chosen = most_special([kind for kind in serving if not kind.fallback] or serving)
    if len(chosen) > 1:
        names = ", ".join(kind.name for kind in chosen)
        what = f"{type(model).__module__}.{type(model).__name__}"
        raise TypeError(f"several adapters serve objects of type {what}: {names}; uninstall all but one")
    found: Library = chosen[0]()
    return found


def load_on(model: str | nn.Module | Adapter, device: torch.device | None) -> Adapter:
    """Load a model by name onto a device; a live network or an adapter stays on its own device.

    Args:
        model: As for :func:`load`.
        device: Device for a model that is loaded by name. ``None`` keeps the device that the library chooses.

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
        **options: Loading options of the user (``token``, ``cache_dir``, ``trust_remote_code``, …). They take
            precedence over those of the record.

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
            f"{', '.join(f'{n}={reference.kwargs[n]!r}' for n in foreign)}, which a record may not set on its own: "
            "pass the option yourself if you trust it"
        )
    return load(reference, task=reference.task, **{**reference.kwargs, **options})


def unwrap(module: Any) -> Any:
    """Return the network inside a compiled or data-parallel module, or inside a ``PeftModel`` that only passes on.

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
        invoked = any(getattr(each, "alora_invocation_tokens", None) for each in module.peft_config.values())
        forwards = (kind.forward, peft.AdaLoraModel.forward)  # which changes the loss only
        if isinstance(tuner, kind) and type(tuner).forward in forwards and not invoked:
            return unwrap(tuner.model)
    return module
