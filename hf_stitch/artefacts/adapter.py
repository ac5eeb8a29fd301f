"""Adapter for stitched models, for comparing, cutting and stitching them again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.surgery import KEPT
from hf_stitch.adapters.examples import ExampleError, named
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.libraries.transformers import Transformers
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.adapters.rewriting import settings_of
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.network import class_of
from hf_stitch.artefacts.record import SIDES, layer_name
from hf_stitch.reference import ModelReference, Settings
from hf_stitch.registry import registries

OF_STITCH = re.compile(r"((source|target)\.model\.)*stitch\.")
"""Matches module names of the stitching layers of a chain."""

UNREAD = ("_name_or_path", "transformers_version")
"""Config keys that describe the machine of the writer."""


class StitchedAdapter(Adapter):
    """Adapter of a stitched model, with the layers of both halves."""

    model: StitchedModel

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the layers of both halves, including the layers before and after the stitch."""
        if isinstance(self.model.source, PrefixFront):
            raise ValueError(
                "a stitched model of networks with different tokenizers cannot be cut again, because its source reads "
                "texts; compare or stitch its two networks"
            )
        survey = self._survey()
        ends = [name for name in _ends(self.model) if survey.dominates(name)]
        # Modules around or inside an end are the same layer, and a stitch belongs to neither network.
        inner = [
            name for name in survey.blocks
            if not OF_STITCH.match(name) and not any(_contains(name, end) or _contains(end, name) for end in ends)
        ]  # fmt: skip
        ordered = sorted((*ends, *inner), key=lambda name: survey.trace.calls[name].exited)
        return tuple(map(self.layer_name, ordered))

    def module_name(self, layer: str) -> str:
        """Return the module name of a layer: ``source.model.layer1.0`` for ``source.layer1.0``."""
        modules = dict(self.model.named_modules())
        module = _module(self.model, layer)
        return layer if layer in modules or module not in modules else module

    def layer_name(self, module: str) -> str:
        """Return the layer name of a module: ``source.layer1.0`` for ``source.model.layer1.0``."""
        return layer_name(module, self.model.config.to_dict())


class StitchedLibrary(Transformers):
    """Stitched models: live, from a folder, or from the Hub.

    A stitched model accepts the inputs of its source. It has the layers of both halves, with the names from their
    networks: ``source.layer1.0``, ``target.blocks.2``. In a chain of several networks the names nest:
    ``source.target.layer2.0`` is a layer in the target of the source.
    """

    name: ClassVar[str] = "hf_stitch"
    trusted_options: ClassVar[frozenset[str]] = frozenset(("dtype", "torch_dtype", "attn_implementation"))
    adapter_class: ClassVar[type[Adapter]] = StitchedAdapter

    def serves(self, model: Any) -> bool:
        """Return whether the model is a stitched model."""
        return isinstance(model, StitchedModel)

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether a stitched model wrote this config."""
        return config.get("model_type") == StitchConfig.model_type

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a stitched model by its reference: a Hub id or a local folder."""
        assert reference.id is not None
        repo_or_folder = reference.id
        if not reference.is_local:
            names = ("subfolder", *hub.DownloadOptions.__annotations__)
            download_options: Any = {name: options[name] for name in names if name in options}
            commit = hub.commit_of(repo_or_folder, **{**download_options, "revision": reference.revision})
            reference = dataclasses.replace(reference, revision=commit or reference.revision)
            options["revision"] = reference.revision
        model = StitchedModel.from_pretrained(repo_or_folder, **options)
        if reference.task not in (None, model.task):
            raise ValueError(f"{reference} is a model for the task {model.task}, got task={reference.task!r}")
        return Loaded(model, reference, processor)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a stitched model by its source."""
        interface = model.interface
        if content not in (None, *interface.content):
            raise ExampleError(
                f"content must be {' or '.join(map(repr, interface.content))}, the content of the source, got "
                f"{content!r}",
                model,
            )
        if isinstance(example_inputs, Mapping):
            example = dict(model.source_inputs(example_inputs))
        elif example_inputs is not None:
            innermost: nn.Module = model
            while isinstance(innermost, StitchedModel):
                innermost = innermost.source.model
            example = named(innermost, example_inputs, {}, interface.content[0])
        else:
            example = _example(model)
        device, dtype = place_of(model)
        example = {
            n: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
            for n, v in example.items()
        }
        return Described(model, interface, example, model.processor if processor is None else processor)

    def task(self, adapter: Adapter) -> str | None:
        """Return the task of the head; ``None`` for a model without a head."""
        task: str | None = adapter.model.task  # type: ignore[assignment]
        return task

    def unscored(self, adapter: Adapter) -> str:
        """Return a description of the predictions of the head, if it cannot be scored."""
        return str(adapter.model.unscored)

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the config, with the blueprints of both halves (``None`` for a half of user code)."""
        stitched: Any = model
        config = {**stitched.config.to_dict(), "task": stitched.task, "stitch": stitched.stitch.to_dict()}
        return {"config": {key: v for key, v in config.items() if key not in UNREAD}}

    def settings(self, model: nn.Module) -> Settings:
        """Return the map, the cuts and the settings of both halves."""
        stitched: Any = model
        stitch = stitched.stitch.to_dict()
        maps = {part: {**map_record, "fitted": None} for part in ("body", "prefix") if (map_record := stitch.get(part))}
        settings = Settings.of({"task": stitched.task, "stitch": {**stitch, **maps}})
        for side in SIDES:
            half = getattr(stitched, side)
            settings.chosen[f"{side}.layer"] = half.cut.layer
            blueprint = getattr(stitched.config, side)["blueprint"]
            if blueprint is not None:
                inner = settings_of(half.model, registries.adapters.get(blueprint["library"])())
                settings.chosen.update({f"{side}.{name}": setting for name, setting in inner.chosen.items()})
                settings.defaults.update({f"{side}.{name}": setting for name, setting in inner.defaults.items()})
        return settings

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Construct the model of a :meth:`blueprint`."""
        config: StitchConfig = StitchConfig.from_dict(dict(blueprint["config"]))
        return class_of(config)(config)

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the processor of the source."""
        source = blueprint["config"]["source"]["blueprint"]
        return registries.adapters.get(source["library"])().processor_of(source, folder)


def _module(model: nn.Module, layer: str) -> str:
    """Return the module name of a layer of a network or chain."""
    side, _, rest = layer.partition(".")
    if not isinstance(model, StitchedModel) or side not in SIDES or not rest:
        return layer
    half: Front | Back = getattr(model, side)
    name, cut_layer = _module(half.model, rest), half.cut.layer
    if side == "source" and f"{name}.".startswith(f"{cut_layer}."):  # inside the module at the end of the half
        name = f"{cut_layer}.{KEPT}{name.removeprefix(cut_layer)}"
    return f"{side}.model.{name}"


def _ends(model: nn.Module) -> Iterator[str]:
    """Yield the module names at the end of the front half and at the start of the back half, also in chains."""
    if isinstance(model, StitchedModel):
        for side, end in (("source", f".{KEPT}"), ("target", "")):
            half: Front | Back = getattr(model, side)
            yield from (f"{side}.model.{name}" for name in _ends(half.model))
            yield f"{side}.model.{half.cut.layer}{end}"


def _contains(module: str, name: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _example(model: StitchedModel) -> dict[str, Any]:
    """Return example inputs for finding the cuts of a stitched model: from its source, or random."""
    if model.parents is not None:
        return model.parents[0].example
    has_prefix = isinstance(model.source, PrefixFront)  # the tokens of the target
    half, interface = model.target if has_prefix else model.source, model.source.takes
    blueprint = getattr(model.config, "target" if has_prefix else "source")["blueprint"]
    if interface.modality != "text" and set(interface.given) <= interface.prompt.keys():
        generator, blank = torch.Generator().manual_seed(0), interface.blank(2, None, torch.device("cpu"))
        return {n: torch.randn(v.shape, generator=generator) if n in interface.content else v for n, v in blank.items()}
    if blueprint is None:
        raise ExampleError(
            "the inputs of a source of user code cannot be generated: pass example_inputs, a batch of "
            f"{', '.join((*interface.content, *interface.given))}",
            model,
        )
    library: Library = registries.adapters.get(blueprint["library"])()
    return library.adapter(half.model, ModelReference(None, library.name), content=interface.content[0]).example
