"""Stitched models: T ∘ stitch ∘ R as models of transformers, which hold only what runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.cut import Cut
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.cutting.plan import CutPlan
from hf_stitch.adapters.preprocess import preprocess
from hf_stitch.artefacts import manifest
from hf_stitch.artefacts.artefact import Artefact, folder_of, load_anchors
from hf_stitch.artefacts.casting import cast, dtype_of
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import (
    ANCHORS,
    CONFIG,
    MODEL_FILES,
    SHARDS,
    STITCHER,
    WEIGHTS,
    load_strictly,
    save_beside,
    save_weights,
)
from hf_stitch.artefacts.heads import class_for
from hf_stitch.artefacts.parents import load_parent
from hf_stitch.artefacts.record import AGAIN, damaged, read_record
from hf_stitch.artefacts.skeleton import weightless
from hf_stitch.artefacts.stitcher import Stitcher
from hf_stitch.provenance import Method, check_requirements
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.registry import PluginError, UnknownNameError, did_you_mean, registries
from hf_stitch.relative import AnchorSet
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer

Half = TypeVar("Half", Front, Back)

PASSED = (
    "_commit_hash",
    "_from_auto",
    "_from_pipeline",
    "adapter_kwargs",
    "code_revision",
    "low_cpu_mem_usage",
    "trust_remote_code",
    "use_safetensors",
    "weights_only",
)
"""What Auto classes, pipelines and their users pass to any model, and what is so here anyway, or means nothing."""


class StitchedModel(Artefact, PreTrainedModel):  # type: ignore[misc]  # push_to_hub is ours
    """A source network up to a cut, a stitch, and a target network from a cut on (Csiszárik et al. 2021, section 3).

    It behaves as any model of transformers: it takes the source's inputs and returns the target's outputs. It holds the
    blocks that run and no others, so it is smaller than its parents, and no hook. Made by :func:`hf_stitch.stitch`,
    :meth:`Stitcher.attach` or :meth:`from_pretrained`.

    Attributes:
        source: The front half: inputs -> representation.
        stitch: The stitching layer: representation -> representation.
        target: The back half: representation -> the target's own output.
        processor: The source's tokenizer or image processor, for raw samples.
        parents: Both networks, where the model was made of live ones; they are neither part of it nor saved.
        anchors: The anchors of a relative model or of an encoder that was swapped in; saved with the model.
        evaluation: What was measured when it was made; ``config.scores`` keeps it when saved.

    This class returns the target's own output; its subclasses, with a head for a task, add the loss.

    Example:
        >>> import torch, hf_stitch
        >>> a, b = (hf_stitch.load(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
        ...                        example_inputs=torch.randn(2, 4)) for _ in range(2))
        >>> stitched = hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1", task=None)
        >>> stitched(input=torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """

    config_class = StitchConfig
    base_model_prefix = "stitched"
    main_input_name = "input_ids"
    task: ClassVar[str | None] = None
    auto_class: ClassVar[str] = "AutoModel"
    record_file = CONFIG
    commit_message = "Upload stitched model"
    accepts_loss_kwargs = (
        False  # the loss is a mean over the batch; Trainer would pass its number of items to the source
    )
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: StitchConfig,
        source: Front | None = None,
        stitch: StitchingLayer | None = None,
        target: Back | None = None,
        processor: Any = None,
    ) -> None:
        """Join the given parts, or build them from the config, weights not loaded."""
        if not (config.source and config.target and config.stitch):
            raise ValueError("this config describes no stitched model: stitch two networks by hf_stitch.stitch")
        super().__init__(config)
        self.source = source if source is not None else _build(Front, config.source)
        self.stitch = stitch if stitch is not None else StitchingLayer.from_dict(config.stitch)
        self.target = target if target is not None else _build(Back, config.target)
        self.processor = processor
        self.parents: tuple[Adapter, Adapter] | None = None
        self.anchors: AnchorSet | None = None
        self.evaluation: Any = None
        self.main_input_name = {"text": "input_ids", "image": "pixel_values"}.get(
            self.source.interface.modality, self.source.interface.content[0]
        )
        self.supports_gradient_checkpointing = all(
            getattr(half.model, "supports_gradient_checkpointing", False) and not _is_checkpointed_across(half)
            for half in (self.source, self.target)
        )
        # What transformers would collect from the halves in post_init, which would also draw their weights anew.
        self.all_tied_weights_keys: dict[str, str] = {}
        self._no_split_modules = set()
        self._keep_in_fp32_modules = set()
        self._keep_in_fp32_modules_strict = set()
        for module in self.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: not the parents."""
        return {**self.__dict__, "parents": None}

    # -- running ----------------------------------------------------------------------------------------------------
    def transfer(self, **inputs: Any) -> Representation:
        """The source's inputs as a representation of the target's."""
        return self.stitch(self.source(**self.source_inputs(inputs)))

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The target's output for the source's inputs.

        Args:
            input_ids: For text sources: (batch, tokens).
            attention_mask: For text sources: (batch, tokens), 1 where a token is real.
            token_type_ids: For text sources that have them.
            pixel_values: For image sources: (batch, channels, height, width), whatever the source itself calls them;
                for sources of tensors, the tensor.
            labels: For models with a head: classes (batch,), soft labels (batch, classes) as probabilities, of
                multi-label targets (``config.problem_type``) 0 or 1 (batch, classes), or token ids (batch, tokens) with
                -100 where none is asked for.
            **inputs: Arguments of sources of user code, by their own names; ``return_dict=False`` for a tuple.
        """
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
        }
        return self.head(self.transfer(**{k: v for k, v in named.items() if v is not None}, **inputs), labels)

    def head(self, representation: Representation, labels: Tensor | None = None, **options: Any) -> Any:
        """The output for a representation of the target's, as from :meth:`transfer`.

        Args:
            representation: What enters the target.
            labels: As for :meth:`forward`.
            **options: Further arguments of the target's forward (a cache).
        """
        dtype = next((p.dtype for p in self.target.parameters() if p.is_floating_point()), representation.values.dtype)
        entering = representation.replace(values=representation.values.to(dtype))
        return self._with_head(self.target(entering, **options), labels)

    def _with_head(self, output: Any, labels: Tensor | None) -> Any:
        if labels is not None:
            raise ValueError(
                f"{type(self).__name__} has no head and takes no labels; stitch with a task, or leave them out"
            )
        return output

    def source_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by the source's own names."""
        renamed = dict(inputs)
        asked = [name for name in ("output_hidden_states", "output_attentions") if renamed.pop(name, None)]
        if asked:
            raise ValueError(
                f"a stitched model returns the target's output alone and takes no {asked[0]}=True; representations at "
                "any layer of a network come from hf_stitch.load(network).encode"
            )
        content = self.source.interface.content[0]
        if content not in renamed and len(given := [n for n in ("input_ids", "pixel_values") if n in renamed]) == 1:
            renamed[content] = renamed.pop(given[0])
        missing = [name for name in self.source.interface.content if name not in renamed]
        if missing:
            raise ValueError(f"the source takes {', '.join(missing)}, got {', '.join(inputs) or 'no inputs'}")
        return renamed

    def preprocess(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Raw samples as inputs, by the source's processor."""
        return preprocess(samples, self.processor, self.source.interface, self.source)

    # -- training ---------------------------------------------------------------------------------------------------
    def freeze_networks(self) -> Self:
        """Leave the stitch alone to be trained: both halves take no gradient and stay in eval mode.

        Returns:
            This model, to be given to ``transformers.Trainer``.

        Raises:
            ValueError: If the stitch has no parameter that takes a gradient, as an identity.
        """
        if not any(parameter.requires_grad for parameter in self.stitch.parameters()):
            raise ValueError(
                f"nothing would be left to train: the stitch, {self.stitch.body}, has no parameter that takes a "
                "gradient; stitch with another matcher, such as 'lstsq', or train by TaskLoss(initial='identity')"
            )
        self.source.requires_grad_(False)
        self.target.requires_grad_(False)
        return self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Training or eval mode; a half of which nothing is trained stays in eval mode, its BatchNorm as it is."""
        super().train(mode)
        for half in (self.source, self.target):
            if not any(parameter.requires_grad for parameter in half.parameters()):
                half.eval()
        return self

    def parent(self, side: Literal["source", "target"], **options: Any) -> Adapter:
        """A whole network that this model was made of: the live one, or the one that the config names.

        Args:
            side: Which.
            **options: Passed on to :func:`hf_stitch.load` for one that is loaded (``token``, ``cache_dir``, …).

        Raises:
            ValueError: If it was a live module, or in a local folder, and is not here any more; if what the Hub has
                under its name has other weights.
            OSError: If it or its revision is not there, or the Hub cannot be reached.
        """
        if self.parents is not None:
            return self.parents[("source", "target").index(side)]
        return load_parent(side, ModelReference.from_dict(getattr(self.config, side)["reference"]), options=options)

    def has_changed(self, side: Literal["source", "target"]) -> bool:
        """Whether a half has other weights than when it was cut from its network: it was trained, or cast.

        False where an older record does not say with which weights it was cut.
        """
        recorded = getattr(self.config, side).get("half_hash")
        return recorded is not None and weights_hash(getattr(self, side)) != recorded

    # -- the small artefact -----------------------------------------------------------------------------------------
    @property
    def stitcher(self) -> Stitcher:
        """The stitch alone, with the names of both parents: what is worth sharing where these are public.

        Raises:
            ValueError: If a half has changed since it was cut from its network, which then does not hold it.
        """
        for side in ("source", "target"):
            if self.has_changed(side):
                raise ValueError(
                    f"the {side} half was trained or cast since it was cut, and a stitcher would name the network "
                    "from before: save the whole model, or train a network first (the head of a relative model "
                    "alone) and build the model with it"
                )
        found = self.describe()
        return Stitcher(
            self.stitch,
            found.source,
            found.source_layer,
            found.target,
            found.target_layer,
            task=found.task,
            recipe=found.recipe,
            scores=found.scores,
            anchors=self.anchors,
        )

    # -- saving and loading -----------------------------------------------------------------------------------------
    def describe(self) -> Description:
        """Both parents, the stitch, how it was found and how well it does, as plain values."""
        return Description.of({**self.config.to_dict(), "stitch": self.stitch.to_dict()}, whole=True)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: str | int = "5GB",
        **kwargs: Any,
    ) -> None:
        """Write config, weights (safetensors), the source's processor and a model card to a folder.

        Of a card that is there already, what a person wrote stays.

        Args:
            save_directory: The folder; created if needed.
            is_main_process: Only this process writes.
            state_dict: Other weights than the model's own (what a trainer gathered).
            push_to_hub: Also upload it, as :meth:`push_to_hub` does.
            max_shard_size: Size at which the weights are split into several files.
            **kwargs: ``repo_id`` (default: the name of the folder) and what else :meth:`push_to_hub` takes.

        Raises:
            ValueError: If a half is of user code, which no config can rebuild.
            OSError: If it cannot be written; what was there before is left.
        """
        if not is_main_process:
            return
        options: dict[str, Any] = {"state_dict": state_dict, "max_shard_size": max_shard_size}
        self._save(Path(save_directory), **options)
        if push_to_hub:
            written = (Path(save_directory) / hub.CARD).read_text(encoding="utf-8")
            name = kwargs.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(name, **{"present": written, **options, **kwargs})

    def _networks(self) -> Iterable[Method]:
        for half in (self.config.source, self.config.target):
            blueprint = half["blueprint"]
            yield "adapters", blueprint["library"]
            if blueprint.get("class") in registries.networks:
                yield "networks", blueprint["class"]

    def _check_savable(self) -> None:
        for half in (self.config.source, self.config.target):
            if half["blueprint"] is None:
                raise ValueError(half["why"])

    def _write(  # type: ignore[override]
        self, folder: Path, *, state_dict: Mapping[str, Tensor] | None = None, max_shard_size: str | int = "5GB"
    ) -> Mapping[str, Any]:
        beside = [self.generation_config] if self.can_generate() else []
        beside += [self.processor] if hasattr(self.processor, "save_pretrained") else []
        save_beside(beside, folder)
        save_weights(state_dict or self.state_dict(), folder, max_shard_size)
        self.config.architectures, self.config.task = [type(self).__name__], self.task
        self.config.stitch = self.stitch.to_dict()
        self.config.save_pretrained(folder)
        record = read_record(folder / CONFIG)
        (folder / CONFIG).unlink()
        return record

    def _sample_code(self) -> str | None:
        interface = self.source.interface
        if interface.modality == "text" or self.processor is not None:
            return None
        return f"torch.randn{interface.shapes[interface.content[0]]}"

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: StitchConfig | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a stitched model from a folder or the Hub, strictly: every weight, none besides, each as it was saved.

        Args:
            pretrained_model_name_or_path: Local folder or Hub id.
            *args: Refused.
            config: Config to use instead of the one beside the weights.
            dtype: Cast all weights; default: each as saved. Buffers that a network computes for itself are not cast.
            torch_dtype: The older name of ``dtype``.
            device_map: A device for the whole model.
            attn_implementation: Attention of both networks, by transformers' name; default: each as it was.
            **kwargs: How the Hub is reached (:class:`hf_stitch.hub.DownloadOptions`: ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``), and what Auto classes and pipelines pass and
                changes nothing here.

        Returns:
            The model, in eval mode, of the class for its task.

        Raises:
            TypeError: For an option that there is not.
            FileNotFoundError: If config or weights are missing, or the Hub has no such model or revision.
            ValueError: If weights and config disagree (the message names the weights), they or the files beside them
                were changed since they were saved, another class was saved, or an option makes no sense.
            OSError: If the Hub cannot be reached or refuses.
        """
        if args:
            raise TypeError(
                f"a stitched model is built from its config alone, got {len(args)} more positional arguments"
            )
        download: Any = {name: kwargs.pop(name) for name in hub.DownloadOptions.__annotations__ if name in kwargs}
        for name in kwargs:
            if name not in PASSED:
                options = inspect.signature(StitchedModel.from_pretrained).parameters
                hint = did_you_mean(name, [*options, *hub.DownloadOptions.__annotations__])
                raise TypeError(
                    f"from_pretrained of a stitched model has no option {name!r}"
                    + (f"; did you mean {hint!r}?" if hint else "")
                )
        wanted, device = dtype_of(torch_dtype if dtype is None else dtype), _device(device_map)
        place = str(pretrained_model_name_or_path)
        folder = folder_of(place, MODEL_FILES, **download)
        if config is None:
            config = read_config(folder)
        attn_implementation = attn_implementation or config._attn_implementation  # where Auto classes leave it
        check_requirements(config.requires or (), str(folder))
        kind = class_for(config.task)
        if not issubclass(kind, cls):
            raise ValueError(
                f"{place} holds a {kind.__name__} and no {cls.__name__}; load it by StitchedModel.from_pretrained"
            )
        files = sorted(folder.glob(SHARDS))
        if not files:
            raise FileNotFoundError(f"{folder} has no {WEIGHTS}: the weights are missing; {AGAIN}")
        model = _skeleton(kind, config, folder)
        load_strictly(model, files)
        if (folder / CONFIG).is_file():
            record = read_record(folder / CONFIG)
            manifest.verify(folder / CONFIG, record, ANCHORS, lambda: weights_hash(model))
            model.anchors = load_anchors(record, folder)
        try:
            blueprint = (config.source or {})["blueprint"]
            model.processor = registries.adapters.get(blueprint["library"]).processor_of(blueprint, str(folder))
            if model.can_generate() and (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # of whatever the libraries stumble over
            raise damaged(f"what lies beside the weights in {folder}", error) from error
        if wanted is not None:
            cast(model, wanted)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        if device is not None:
            nn.Module.to(model, device)
        model.config.name_or_path = place
        return model.eval()


def read_config(folder: Path) -> StitchConfig:
    """The config in a folder; a warning names keys of a newer version.

    Args:
        folder: Of a stitched model.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or of another kind of model.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}: "
            + (
                "it holds a stitcher, which hf_stitch.Stitcher.from_pretrained loads"
                if (folder / STITCHER).is_file()
                else "it is no saved stitched model"
            )
        )
    values = read_record(path)
    if values.get("model_type") != StitchConfig.model_type:
        raise ValueError(f"{path} is the config of a {values.get('model_type')!r} model, not of a stitched one")
    config: StitchConfig = StitchConfig.from_dict(values, name_or_path=str(folder))
    return config


def _is_checkpointed_across(half: Front | Back) -> bool:
    """Whether the network checkpoints a module that holds the cut and more, which a half cannot compute again."""
    around = map(half.model.get_submodule, half.cut.around)
    return any(isinstance(module, GradientCheckpointingLayer) for module in around)


def _build(kind: type[Half], half: Mapping[str, Any]) -> Half:
    """One half from its record, weights not loaded."""
    model = registries.adapters.get(half["blueprint"]["library"]).build(half["blueprint"])
    plan, interface = CutPlan.from_dict(half["plan"]), Interface.from_dict(half["interface"])
    return kind(model, Cut.from_dict(half["cut"]), plan, interface)


def _device(given: Any) -> torch.device | None:
    """The one device that a ``device_map`` names."""
    if isinstance(given, dict) and list(given) == [""]:
        given = given[""]
    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device_map must name one device for a stitched model, got {given!r}") from None


def _skeleton(kind: type[StitchedModel], config: StitchConfig, folder: Path) -> StitchedModel:
    """The model of a config without its weights."""
    try:
        with weightless():
            return kind(config)
    except (UnknownNameError, PluginError):  # what it names is missing here
        raise
    except Exception as error:  # constructors of other libraries fail as they please on a config that makes no sense
        raise damaged(folder / CONFIG, error) from error
