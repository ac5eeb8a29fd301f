"""Adapter for timm models: by name, from the Hub, from a local folder, or live."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.examples import named
from hf_stitch.adapters.libraries.torch import interface_of
from hf_stitch.adapters.preprocess import load_processor, place_of
from hf_stitch.reference import ModelReference
from hf_stitch.registry import did_you_mean

NOT_ARCHITECTURE = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
"""Arguments of ``timm.create_model`` that say where weights come from, which a config is not to say."""

ACCESS = ("token", "cache_dir", "local_files_only", "force_download")
"""Loading options that say how the Hub is reached."""


class TimmAdapter(Adapter):
    """A timm model; raw images go through timm's own evaluation transform for it."""

    library: ClassVar[str] = "timm"
    trusted_options: ClassVar[frozenset[str]] = frozenset(
        ("num_classes", "in_chans", "img_size", "global_pool", "pretrained")
    )

    @classmethod
    def serves(cls, model: Any) -> bool:
        """A module on which ``timm.create_model`` left its config."""
        return isinstance(model, nn.Module) and getattr(model, "pretrained_cfg", None) is not None

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """What timm saves; a timm model that was saved through transformers has the keys of both."""
        return "model_type" not in config and ("architecture" in config or "pretrained_cfg" in config)

    @classmethod
    def load(
        cls,
        reference: ModelReference,
        *,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
        **options: Any,
    ) -> TimmAdapter:
        """Create a model by its reference: ``timm:name``, a Hub id, or a local folder.

        Weights come from safetensors only. ``pretrained=False`` gives random ones.

        Raises:
            ValueError: For an unknown name (with the nearest ones), or weights that exist as a pickle only.
        """
        import timm

        assert reference.id is not None
        pretrained = options.pop("pretrained", True)
        access = {key: options.pop(key) for key in ACCESS if key in options}
        options.pop("trust_remote_code", None)  # timm runs none
        if reference.id.startswith("timm:"):
            name = reference.id.removeprefix("timm:")
            if not timm.is_model(name.split(".")[0]):
                hint = did_you_mean(name, timm.list_models())
                raise ValueError(f"timm has no model {name!r}{f'; did you mean {hint!r}?' if hint else ''}")
            if pretrained:
                options["pretrained_cfg_overlay"] = {"hf_hub_filename": "model.safetensors", "url": None}
            model = timm.create_model(name, pretrained=pretrained, cache_dir=access.get("cache_dir"), **options)
            return cls.of(model.eval(), reference, example_inputs, processor, content)
        folder = Path(reference.id)
        if not reference.is_local:
            wanted = ["config.json", *(["model.safetensors"] if pretrained else [])]
            folder = hub.download(reference.id, files=wanted, revision=reference.revision, **access)
            reference = dataclasses.replace(reference, revision=folder.name)
        if pretrained and not (folder / "model.safetensors").is_file():
            raise ValueError(f"{reference} has no model.safetensors; other weight files would have to be unpickled")
        model = timm.create_model(f"local-dir:{folder}", pretrained=pretrained, **options)
        return cls.of(model.eval(), reference, example_inputs, processor, content)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> TimmAdapter:
        """Wrap a live timm model, which takes images alone.

        Raises:
            ExampleError: If ``example_inputs`` do not fit it, or ``content`` is no argument of it.
        """
        import timm.data

        from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

        config = timm.data.resolve_model_data_config(model)
        if size := _native_size(model):
            config["input_size"] = (config["input_size"][0], *size)
        if processor is None:
            processor = TimmImageProcessor(**config)
        if example_inputs is None:
            generator = torch.Generator().manual_seed(0)
            example_inputs = torch.randn(2, *config["input_size"], generator=generator).to(*place_of(model))
        example = named(model, example_inputs, {}, "x")
        return cls(model, interface_of(model, example, content), example, reference, processor)

    @property
    def task(self) -> str | None:
        """Classification, unless the head was taken off."""
        return "image-classification" if getattr(self.model, "num_classes", 0) else None

    def blueprint(self) -> dict[str, Any]:
        """Architecture, arguments and pretrained config, as timm itself saves them."""
        cfg: Mapping[str, Any] = getattr(self.model, "pretrained_cfg", None) or {}
        if not cfg.get("architecture"):
            raise ValueError(
                f"{type(self.model).__name__} was not made by timm.create_model, so its architecture is unknown: "
                "create it by name"
            )
        keep = (
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
        return {
            "library": self.library,
            "architecture": cfg["architecture"],
            "arguments": {k: v for k, v in getattr(self.model, "_model_args", {}).items() if k not in NOT_ARCHITECTURE},
            "pretrained_cfg": {k: cfg[k] for k in keep if k in cfg},
        }

    @classmethod
    def build(cls, blueprint: Mapping[str, Any]) -> nn.Module:
        """The network of a blueprint."""
        import timm

        foreign = [key for key in blueprint.get("arguments", {}) if key in NOT_ARCHITECTURE]
        if foreign or not timm.is_model(blueprint["architecture"]):
            what = f"arguments {', '.join(foreign)}" if foreign else f"architecture {blueprint['architecture']!r}"
            raise ValueError(f"a config must name an architecture of timm and its arguments only, got the {what}")
        model = timm.create_model(
            blueprint["architecture"],
            pretrained=False,
            pretrained_cfg=dict(blueprint.get("pretrained_cfg", {})),
            **blueprint.get("arguments", {}),
        )
        return model.eval()

    @classmethod
    def processor_of(cls, blueprint: Mapping[str, Any], folder: str) -> Any:
        """The image processor saved in a folder; ``None`` where there is none."""
        return load_processor(folder, "pixel_values", {"trust_remote_code": False})


def _native_size(model: nn.Module) -> tuple[int, int] | None:
    """The input size that a model was built for, where that is not the one of its pretrained weights."""
    network = getattr(model, "model", model)  # a wrapper that returns feature maps holds it
    return getattr(getattr(network, "patch_embed", None), "img_size", None)
