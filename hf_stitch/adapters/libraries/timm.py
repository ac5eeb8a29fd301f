"""timm models: by architecture name, from the Hub, from a local folder, or live."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.examples import named
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.libraries.completeness import check_weights, replaced
from hf_stitch.adapters.libraries.torch import interface_of
from hf_stitch.adapters.preprocess import Deferred, load_processor, place_of
from hf_stitch.adapters.untrusted import is_in_timm, sealed
from hf_stitch.options import did_you_mean
from hf_stitch.reference import ModelReference, Settings

NOT_ARCHITECTURE = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
"""Arguments of ``timm.create_model`` that define the source of the weights; a config must not set them."""

DESCRIPTION = (
    "architecture",
    "input_size",
    "fixed_input_size",
    "interpolation",
    "crop_pct",
    "crop_mode",
    "mean",
    "std",
    "num_classes",
)
"""Keys of a pretrained config that describe the architecture and its input; the rest define the source of weights."""


class Timm(Library):
    """Adapter for timm models; raw images are preprocessed with the evaluation transform of timm."""

    name: ClassVar[str] = "timm"
    trusted_options: ClassVar[frozenset[str]] = frozenset(
        ("dtype", "num_classes", "in_chans", "img_size", "global_pool", "pretrained")
    )

    def serves(self, model: Any) -> bool:
        """Return whether the model is a module with the ``pretrained_cfg`` that ``timm.create_model`` sets."""
        return isinstance(model, nn.Module) and getattr(model, "pretrained_cfg", None) is not None

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether timm wrote this config; timm models in transformers also have a ``model_type``."""
        return "model_type" not in config and ("architecture" in config or "pretrained_cfg" in config)

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a model by its reference: ``timm:name``, a Hub id, or a local folder.

        Weights are read from safetensors files only. The task of the reference, if any, must be the task of the head.
        """
        import timm

        assert reference.id is not None
        pretrained = options.pop("pretrained", True)
        download = {key: options.pop(key) for key in hub.DownloadOptions.__annotations__ if key in options}
        dtype = options.pop("dtype", None)
        options.pop("trust_remote_code", None)  # timm never runs code of a repository
        if reference.id.startswith("timm:"):
            name = reference.id.removeprefix("timm:")
            if not timm.is_model(name.split(".")[0]):
                hint = did_you_mean(name, timm.list_models())
                raise ValueError(f"timm does not have a model {name!r}{f'; did you mean {hint!r}?' if hint else ''}")
            if pretrained:
                options["pretrained_cfg_overlay"] = {"hf_hub_filename": "model.safetensors", "url": None}
            options["cache_dir"] = download.get("cache_dir")
        else:
            folder = Path(reference.id)
            if not reference.is_local:
                file_names = ["config.json", *(["model.safetensors"] if pretrained else [])]
                folder = hub.download(reference.id, files=file_names, revision=reference.revision, **download)
                reference = dataclasses.replace(reference, revision=folder.name)
            if pretrained and not (folder / "model.safetensors").is_file():
                raise ValueError(
                    f"{reference} must contain model.safetensors; other files of weights are pickles and are not loaded"
                )
            name = f"local-dir:{folder}"
        reports: list[Any] = []

        def record_load(load_state_dict: Any, network: nn.Module, *args: Any, **keywords: Any) -> Any:
            reports.append((network, load_state_dict(network, *args, **keywords)))
            return reports[-1][1]

        with replaced(nn.Module, "load_state_dict", record_load):
            model = timm.create_model(name, pretrained=pretrained, **options)
        if reference.task is not None and (task_of_head := _task(model)) not in (None, reference.task):
            raise ValueError(
                f"task must be {task_of_head!r}, the task of the head of {reference}, or None, got {reference.task!r}; "
                "num_classes= sets the size of the head"
            )
        new: tuple[str, ...] = ()
        for network, report in reports[-1:]:  # with another number of classes, timm requires no weights
            state, used_ids = network.state_dict(keep_vars=True), {*map(id, model.state_dict(keep_vars=True).values())}
            heads = np.atleast_1d(network.pretrained_cfg.get("classifier") or []) if "num_classes" in options else ()
            missing = {weight: "" for weight in report.missing_keys if id(state.get(weight)) in used_ids}
            requested = {weight for weight in missing if weight.rpartition(".")[0] in heads}
            new = check_weights(reference, type(model).__name__, missing, report.unexpected_keys, requested)
        return Loaded(_cast(model, dtype).eval(), reference, processor, new)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a timm model by its pretrained config."""
        import timm.data
        from timm.models import get_model_input_config

        config = timm.data.resolve_model_data_config(model)  # of the pretrained weights
        config["input_size"] = get_model_input_config(model)["input_size"]
        if processor is None:
            processor = Deferred(_image_processor, **config)
        if example_inputs is None:
            generator = torch.Generator().manual_seed(0)
            example_inputs = torch.randn(2, *config["input_size"], generator=generator).to(*place_of(model))
        example = named(model, example_inputs, {}, "x")
        return Described(model, interface_of(model, example, content), example, processor)

    def task(self, adapter: Adapter) -> str | None:
        """``image-classification``, with a single output ``regression``, or ``None`` for a model without a head."""
        return _task(adapter.model)

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the architecture, its arguments and the pretrained config, in the format of timm."""
        cfg: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        arguments: Mapping[str, Any] | None = getattr(model, "_model_args", None)
        if arguments is None or not cfg.get("architecture"):
            raise ValueError(
                f"{type(model).__name__} was not created by timm.create_model, so its "
                f"{'arguments are' if cfg.get('architecture') else 'architecture is'} unknown: create it by name"
            )
        return {
            "architecture": cfg["architecture"],
            "arguments": {k: v for k, v in arguments.items() if k not in NOT_ARCHITECTURE},
            "pretrained_cfg": {k: cfg[k] for k in DESCRIPTION if k in cfg},
        }

    def settings(self, model: nn.Module) -> Settings:
        """Return the architecture and its arguments, without drop rates and the number of classes (from weights)."""
        from timm.models import get_model_args

        cfg: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        excluded = (*NOT_ARCHITECTURE, "num_classes")
        arguments = {key: value for key, value in get_model_args(model).items() if key not in excluded}
        return Settings.of({"architecture": cfg.get("architecture"), "arguments": arguments})

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Build the network of a :meth:`blueprint`."""
        import timm

        arguments, cfg = blueprint.get("arguments", {}), blueprint.get("pretrained_cfg", {})
        foreign = [
            *(key for key in arguments if key in NOT_ARCHITECTURE),
            *(key for key in cfg if key not in DESCRIPTION),
        ]
        if foreign or not is_in_timm(blueprint["architecture"]):
            fault = f"arguments {', '.join(foreign)}" if foreign else f"architecture {blueprint['architecture']!r}"
            raise ValueError(f"a config must contain only an architecture of timm and its arguments, got the {fault}")
        model = timm.create_model(blueprint["architecture"], pretrained=False, pretrained_cfg=dict(cfg), **arguments)
        return model.eval()

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the image processor that is saved in a folder."""
        with sealed():
            return load_processor(folder, "pixel_values", {"trust_remote_code": False, "local_files_only": True})


def _image_processor(**config: Any) -> Any:
    from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

    return TimmImageProcessor(**config)


def _task(model: Any) -> str | None:
    count = getattr(model, "num_classes", 0)
    return "image-classification" if count > 1 else "regression" if count == 1 else None


def _cast(model: nn.Module, dtype: torch.dtype | str | None) -> nn.Module:
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype of torch or its name, got {dtype!r}")
    return model.to(torch_dtype)
