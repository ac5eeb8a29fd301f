"""Adapter for transformers models: from the Hub, from a local folder, or live."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import MASK, POSITIONS, Interface, mask_of
from hf_stitch.adapters.examples import ExampleError, arguments_of, named
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.libraries.completeness import LABELS, OPTIONAL_PARTS, complete, replaced
from hf_stitch.adapters.libraries.configs import (
    GENERATES,
    NO_TOKEN,
    advice,
    as_if_padded,
    lacks_padding,
    pad_id,
    positions_from_padding,
    set_padding,
    task_of_head,
    text_config,
    unscored_head,
)
from hf_stitch.adapters.overrides import override_of
from hf_stitch.adapters.pinning import settings_of_config
from hf_stitch.adapters.preprocess import load_processor, place_of
from hf_stitch.adapters.untrusted import AttentionError, is_installed, own_code_only, sealed
from hf_stitch.hub import DownloadOptions, commit_of, is_out_of_reach
from hf_stitch.printing import visible, warn
from hf_stitch.records import NETWORKS
from hf_stitch.reference import ModelReference, Settings, libraries_reading
from hf_stitch.registry import registries

AUTO_CLASSES = {
    "image-classification": "AutoModelForImageClassification",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text-encoding": "AutoModelForTextEncoding",
    "feature-extraction": "AutoModel",
}
"""Task (name of a pipeline) -> the class that loads models with this head."""

HUB_OPTIONS = (
    *("trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies"),
    "gguf_file",
)
"""Loading options that apply to the config, the weights and the processor."""

IDS = ("input_ids", "decoder_input_ids")
"""Arguments of token ids: for the encoder or the only stack, and for the decoder."""

EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Flags of a config that add the output of every block to the outputs of the model, and so bypass each block."""


class Transformers(Library):
    """Adapter for transformers models; raw samples are preprocessed with their tokenizer or image processor."""

    name: ClassVar[str] = "transformers"
    trusted_options: ClassVar[frozenset[str]] = frozenset(
        (
            "dtype",
            "torch_dtype",
            "attn_implementation",
            *LABELS,
            "problem_type",
            "image_size",
            "variant",
            "pretrained",
            *OPTIONAL_PARTS,
        )
    )

    def serves(self, model: Any) -> bool:
        """Return whether the model is a ``PreTrainedModel``."""
        from transformers import PreTrainedModel

        return isinstance(model, PreTrainedModel)

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether the config contains a ``model_type``."""
        return "model_type" in config

    def origin(self, model: Any) -> str | None:
        """Return the argument of ``from_pretrained``; a folder as an absolute path."""
        if getattr(model, "peft_config", None):
            return None
        name = getattr(model.config, "_name_or_path", None) or None
        return str(Path(name).resolve()) if name and Path(name).is_dir() else name

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a model by its reference: a Hub id or a local folder.

        The task of the reference selects the class; without a task, the config does. Weights are read from safetensors
        files only, and code of the repository runs only with ``trust_remote_code=True``.
        """
        import transformers
        from transformers.utils import find_adapter_config_file, is_peft_available

        assert reference.id is not None
        origin = reference.id
        options.setdefault("trust_remote_code", False)
        for source in NETWORKS.values():  # the import registers their configs with AutoConfig
            resolve_name(source)
        hub = {key: options.pop(key) for key in HUB_OPTIONS if key in options}
        if reference.revision:
            hub["revision"] = reference.revision
        download: Any = {key: hub[key] for key in (*DownloadOptions.__annotations__, "subfolder") if key in hub}
        gguf = hub.get("gguf_file")  # contains config, weights and tokenizer
        if not reference.is_local and (commit := commit_of(origin, gguf or "config.json", **download)):
            reference = dataclasses.replace(reference, revision=commit)  # pins all files and the record
            hub["revision"] = commit
            if not hub.get("local_files_only") and is_out_of_reach(origin, revision=commit, token=hub.get("token")):
                hub["local_files_only"] = True  # the cache answers at once
        config = transformers.AutoConfig.from_pretrained(origin, **hub)
        (library,) = libraries_reading(config.to_dict())
        if library != self.name:  # a library that extends this one; the id does not show it
            access = {name: hub[name] for name in hub if name != "revision"}
            loaded: Loaded = registries.adapters.get(library)().load(
                dataclasses.replace(reference, library=library), processor, **access, **options
            )
            return loaded
        if reference.task is not None:
            if reference.task not in AUTO_CLASSES:
                raise ValueError(f"task must be one of {', '.join(AUTO_CLASSES)}, got {reference.task!r}")
            loader = getattr(transformers, AUTO_CLASSES[reference.task])
        else:
            is_causal = gguf and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            kind = (config.architectures or ["AutoModelForCausalLM" if is_causal else "AutoModel"])[0]
            if (loader := _model_class(kind)) is None:
                loader = transformers.AutoModel
                warn(
                    f"the class {visible(str(kind))} in the config of {origin} is not in transformers: AutoModel loads "
                    f"the network without its head. To load a head, pass task= ({', '.join(AUTO_CLASSES)})"
                )
        if options.pop("pretrained", True):
            access = {name: value for name, value in hub.items() if name not in ("trust_remote_code", "gguf_file")}
            if not is_peft_available() and find_adapter_config_file(origin, **access):
                raise ImportError(
                    f"{origin} contains a PEFT adapter in addition to the weights of a network, which would be loaded "
                    "without the adapter: pip install peft"
                )
            model, new = complete(loader.from_pretrained, reference, config.architectures or (), {**hub, **options})
        else:
            model, new = _untrained(loader, origin, hub, options), ()
        if processor is None:
            processor = load_processor(origin, model.main_input_name, hub)
        set_padding(model, processor)
        return Loaded(model.eval(), reference, processor, new)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a network by its config and its forward.

        An encoder-decoder model has two texts. By default, the text of the encoder is the content, and the text of the
        decoder is part of the context and must be among the inputs. ``content="decoder_input_ids"`` swaps their roles.
        """
        name: str = content or str(getattr(model, "main_input_name", "input_ids"))
        arguments = arguments_of(model, name)
        if content is not None and content not in arguments:
            raise ExampleError(
                f"content must be an argument of {type(model).__name__}, got {content!r}; it accepts "
                f"{', '.join(arguments)}",
                model,
            )
        override = override_of(model)
        if example_inputs is None:
            example_inputs = override.example(model)
        if type(processor).__name__ == "TimmWrapperImageProcessor":  # cannot be saved with another model
            from timm.models import get_model_input_config

            from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

            size = get_model_input_config(model.timm_model)["input_size"]
            processor = TimmImageProcessor(**{**processor.data_config, "input_size": size})
        if example_inputs is not None:
            example = named(model, example_inputs, override.options, name)
        elif name in IDS:
            example = _text_example(model, arguments)
            if name != "input_ids" and mask_of(name) in arguments:
                example[mask_of(name)] = torch.ones_like(example[name])
        elif name == "pixel_values":
            example = {name: _image_example(model, processor)}
        elif name in (dummy := dict(model.dummy_inputs)):
            example = {name: dummy[name]}
        else:
            raise ExampleError(
                f"inputs {name!r} of {type(model).__name__} cannot be generated: pass example_inputs, a batch of its "
                "inputs, or register an override that generates one",
                model,
            )
        device, dtype = place_of(model)
        example = {
            n: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
            for n, v in example.items()
        }
        if not isinstance(example.get(name), Tensor):
            got = ", ".join(f"{n} ({type(v).__name__})" for n, v in example.items()) or "none"
            raise ExampleError(
                f"example_inputs of {type(model).__name__} must contain a tensor {name!r}, got {got}", model
            )
        if lacks_padding(model):
            warn(advice(model, processor))
        return Described(model, _interface(model, name, example, processor), example, processor)

    @contextmanager
    def running(self, adapter: Adapter, inputs: Mapping[str, Any], *, trial: bool) -> Iterator[None]:
        """Let trials run without a padding id; on other batches that require it, raise an error with advice."""
        if trial:
            with as_if_padded(adapter.model):
                yield
            return
        try:
            yield
        except ValueError as error:
            if lacks_padding(adapter.model) and len(inputs[adapter.interface.content[0]]) > 1:
                raise ValueError(advice(adapter.model, adapter.processor)) from error
            raise

    def task(self, adapter: Adapter) -> str | None:
        """Task of the head according to the class name, or the task that loaded it; ``None`` for other classes."""
        name, loaded_task = type(adapter.model).__name__, adapter.reference.task
        if task := task_of_head(name, adapter.model.config):
            return task
        has_head = loaded_task in registries.tasks and bool(registries.tasks.get(str(loaded_task)).heads)
        return loaded_task if has_head and unscored_head(name, None) in GENERATES else None

    def unscored(self, adapter: Adapter) -> str:
        """Description of the output of the head, from the class name and the config."""
        name = type(adapter.model).__name__
        if "ForSequenceClassification" in name and adapter.interface.modality != "text":
            return f"classification of {adapter.interface.content[0]}"
        head = unscored_head(name, adapter.model.config)
        return "" if adapter.task and head in GENERATES else head

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the class, the config without local paths, and the attention implementation.

        The JSON values are ``class``, ``config``, ``attention``, ``module`` of a class that transformers does not
        export, and non-default ``arguments`` of the constructor in addition to the config.
        """
        ours = type(model).__name__ in NETWORKS and type(model) is _model_class(type(model).__name__)
        if not (ours or type(model).__module__.startswith("transformers.")):
            raise ValueError(
                f"{type(model).__name__} is not a class of transformers (it comes from {type(model).__module__}) and "
                "cannot be rebuilt from a config. Save the Stitcher and attach it to the networks: "
                "Stitcher.attach(source=…, target=…)"
            )
        settings: Any = model.config
        extra = {} if ours or _model_class(type(model).__name__) is type(model) else {"module": type(model).__module__}
        config = _without_keys(settings.to_dict(), ("_name_or_path", "transformers_version"))
        return {
            "class": type(model).__name__,
            "config": config,
            "attention": settings._attn_implementation,
            **extra,
            **({"arguments": arguments} if (arguments := _arguments(model)) else {}),
        }

    def settings(self, model: nn.Module) -> Settings:
        """Return the class and the config values that affect a forward in eval mode."""
        config = settings_of_config(model.config)
        return Settings({"class": type(model).__name__, **config.chosen}, config.defaults)

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Build the network of a :meth:`blueprint`."""
        import transformers

        kind = _model_class(blueprint["class"], blueprint.get("module"))
        if not (
            isinstance(kind, type)
            and issubclass(kind, transformers.PreTrainedModel)
            and (settings := kind.config_class)
        ):
            raise ValueError(f"model class {blueprint['class']!r} is not in transformers; a newer release may have it")
        arguments = {name: bool(value) for name, value in dict(blueprint.get("arguments", {})).items()}
        if unknown := arguments.keys() - OPTIONAL_PARTS.keys():
            raise ValueError(f"arguments of {blueprint['class']} must be {', '.join(OPTIONAL_PARTS)}, got {unknown}")
        attention = blueprint.get("attention")
        unsupported = AttentionError(f"{kind.__name__} lacks {attention!r} in transformers {transformers.__version__}")
        if str(attention).startswith("flash_attention_") and not is_installed(attention):
            raise unsupported

        def construct(attention: Any) -> nn.Module:
            config = settings.from_dict(own_code_only(blueprint["config"]))
            if attention:
                config._attn_implementation = own_code_only(attention, "attention_implementation")
            # Slow: some initial weights are computed in loops.
            with replaced(transformers.PreTrainedModel, "initialize_weights", lambda initialise, model: None):
                return kind(config, **arguments).eval()

        try:
            return construct(attention)
        except (ImportError, ValueError) as error:
            if attention in (None, "eager") or not is_installed(attention):
                raise
            construct("eager")  # raises the error if attention is not the reason
            raise unsupported from error

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the tokenizer or image processor that is saved in a folder."""
        kind = _model_class(blueprint["class"], blueprint.get("module"))
        with sealed():
            return load_processor(folder, kind.main_input_name, {"trust_remote_code": False, "local_files_only": True})


def _arguments(model: nn.Module) -> dict[str, bool]:
    """Return the non-default constructor arguments of a model, in addition to the config."""
    defaults = {name: p.default for name, p in inspect.signature(type(model).__init__).parameters.items()}
    values = {}
    for name in OPTIONAL_PARTS.keys() & defaults.keys():
        with suppress(AttributeError):  # a class without this part
            values[name] = attrgetter(OPTIONAL_PARTS[name])(model) is not None
    return {name: value for name, value in values.items() if value is not defaults[name]}


def _model_class(name: str, module: str | None = None) -> Any:
    """Return a model class of this package or of transformers by its name, or ``None``.

    A class that transformers does not export (an inner encoder) is imported from its module of models.
    """
    import transformers

    if module is not None:
        is_modeling = re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", module)
        return getattr(importlib.import_module(module), name, None) if is_modeling else None
    return resolve_name(NETWORKS[name]) if name in NETWORKS else getattr(transformers, name, None)


def _untrained(loader: Any, origin: str, hub: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Build a model with random weights; options that the config does not use are passed to the class."""
    import transformers

    config, unused = transformers.AutoConfig.from_pretrained(origin, return_unused_kwargs=True, **hub, **options)
    class_options = {name: value for name, value in unused.items() if name in options}
    if hasattr(loader, "from_config"):  # an Auto class
        return loader.from_config(config, trust_remote_code=hub["trust_remote_code"], **class_options)
    return loader._from_config(config, **class_options)


def _interface(model: nn.Module, name: str, example: Mapping[str, Any], processor: Any) -> Interface:
    config, arguments = model.config, arguments_of(model, name)
    options: dict[str, Any] = {}
    cache_config = config if getattr(config, "is_encoder_decoder", False) else text_config(config)
    if "use_cache" in arguments or getattr(config, "use_cache", False) or getattr(cache_config, "use_cache", False):
        options["use_cache"] = False
    if "use_mems" in arguments:  # a cache in the outputs bypasses every cut
        options["use_mems"] = False
    options |= {flag: False for flag in EXTRA_OUTPUTS if getattr(config, flag, False)}
    values, text_names = example[name], [MASK, "token_type_ids", mask_of("decoder_input_ids")]
    if "decoder_input_ids" not in arguments and positions_from_padding(model) is None:
        text_names.append(POSITIONS)
    if values.is_floating_point():
        dtype, kind = str(values.dtype).removeprefix("torch."), "image" if values.dim() == 4 else "tensor"
        return Interface((name,), kind, {name: tuple(values.shape[1:])}, {name: dtype}, options)
    return Interface(
        (name,),
        "text",
        options=options,
        special_ids=(*_special_ids(config), *([NO_TOKEN] if lacks_padding(model) else [])),
        pad_id=pad_id(config),
        arguments=tuple(n for n in text_names if n in arguments),
        max_tokens=_max_tokens(model, config, processor),
        given=tuple(ids for ids in IDS if ids != name and "decoder_input_ids" in example and ids in example),
        start_id=_start_id(config),
    )


def _max_tokens(model: nn.Module, config: Any, tokenizer: Any) -> int | None:
    """Return the maximum number of tokens: the smaller limit of the tokenizer and of the position embeddings."""
    positions = getattr(text_config(config), "max_position_embeddings", None)
    if positions is not None and (table := positions_from_padding(model)) is not None:
        positions -= int(table.padding_idx or 0) + 1
    limits = (getattr(tokenizer, "model_max_length", None), positions)
    return min((limit for limit in limits if limit and 0 < limit < 10**9), default=None)


def _without_keys(values: Any, keys: tuple[str, ...]) -> Any:
    """Return JSON values without some keys, at any depth."""
    if isinstance(values, dict):
        return {key: _without_keys(value, keys) for key, value in values.items() if key not in keys}
    return [_without_keys(value, keys) for value in values] if isinstance(values, list) else values


def _start_id(config: Any) -> int | None:
    """Return the first token id of a decoder, with ``bos_token_id`` as the fallback, like ``generate``."""
    for key in ("decoder_start_token_id", "bos_token_id"):
        if (token_id := getattr(config, key, None)) is not None:
            return int(token_id)
    return None


def _special_ids(config: Any) -> tuple[int, ...]:
    """Return the ids of padding and end of text, because heads search for them."""
    ids: set[int] = set()
    for key in ("pad_token_id", "eos_token_id"):
        value = getattr(text_config(config), key, None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))


TOKENS, TRIED = 6, 9
"""Number of tokens of example texts, and of the longest text for the verification of cuts."""


def _text_example(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return random token ids and their mask; for an encoder-decoder model, also the ids of the decoder.

    Heads for sequence classification require texts of equal length. Texts of an encoder-decoder model end with the end
    of text id that heads search for.
    """
    config: Any = model.config
    special, end = _special_ids(config), getattr(text_config(config), "eos_token_id", None)
    vocabulary = getattr(text_config(config), "vocab_size", 1000)  # models of characters have no vocabulary
    ordinary = torch.tensor([i for i in range(min(vocabulary, 1000)) if i not in special])
    generator = torch.Generator().manual_seed(0)

    def text(tokens: int) -> torch.Tensor:
        return ordinary[torch.randint(len(ordinary), (2, tokens), generator=generator)]

    limit = _max_tokens(model, config, None) or TRIED
    tokens = max(min(TOKENS, limit - (TRIED - TOKENS)), 1)
    example = {"input_ids": text(tokens)}
    if "decoder_input_ids" in arguments:
        equal_lengths = type(model).__name__.endswith("ForSequenceClassification")
        example["decoder_input_ids"] = text(tokens if equal_lengths else max(tokens - 2, 1))
        if isinstance(end, int):
            example["input_ids"][:, -1] = end
    return {**example, MASK: torch.ones_like(example["input_ids"])} if MASK in arguments else example


def _image_example(model: Any, processor: Any) -> torch.Tensor:
    config, timm_model = model.config, getattr(model, "timm_model", None)
    size = getattr(config, "image_size", None)
    if size is None and processor is not None:
        sizes = getattr(processor, "crop_size", None) or processor.size
        size = (sizes["height"], sizes["width"]) if "height" in sizes else sizes["shortest_edge"]
    size = size or 224
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    channels = getattr(config, "num_channels", getattr(timm_model, "in_chans", 3))
    return torch.randn(2, channels, height, width, generator=generator)
