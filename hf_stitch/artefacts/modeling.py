"""Stitched models: front half, stitching layer and back half as one model of transformers."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.halves import Back, Front, Observed
from hf_stitch.adapters.cutting.interface import MASK, POSITIONS, Interface, positions_of
from hf_stitch.adapters.examples import arguments_of, passes_on
from hf_stitch.adapters.libraries.configs import GENERATES, unscored_head
from hf_stitch.adapters.libraries.transformers import EXTRA_OUTPUTS
from hf_stitch.adapters.prefixes import INPUTS, PrefixAdapter, PrefixFront
from hf_stitch.adapters.preprocess import preprocess
from hf_stitch.artefacts.artefact import Artefact
from hf_stitch.artefacts.card import summary
from hf_stitch.artefacts.casting import dtype_of
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import CONFIG
from hf_stitch.artefacts.halves import back_of, front_of
from hf_stitch.artefacts.hidden_states import asked_of, flags, joined, number_of_layers, seen_in
from hf_stitch.artefacts.loading import load_pretrained
from hf_stitch.artefacts.parents import CHANGED, SCORED, Changeable, load_parent, warn_if_only_weights_are_pinned
from hf_stitch.artefacts.placing import whole_blocks
from hf_stitch.artefacts.record import SIDES
from hf_stitch.artefacts.saving import check_rebuilt, networks_of, stitcher_of, write
from hf_stitch.artefacts.stitcher import Stitcher
from hf_stitch.options import checked
from hf_stitch.provenance import Method
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import task_named, task_of_problem

LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
CHUNKS = "chunk_size_feed_forward"
READ_IN_TEXTS = ("vocab_size", "bos_token_id", "eos_token_id")
"""Keys of a config that are those of the network that reads texts, or of the one that writes them."""
UNUSED_KEYS = ("is_encoder_decoder", "output_router_logits")
"""Keys of the config of any model that have no effect here."""


class StitchedModel(Artefact, PreTrainedModel):  # type: ignore[misc]  # push_to_hub is ours
    """A source network up to a cut, a stitching layer, and a target network after a cut.

    The model is T ∘ stitch ∘ R, as in Csiszárik et al. 2021, section 3. It takes the inputs of the source and returns
    the output of the target. It is a ``PreTrainedModel`` of transformers and can be trained, saved and loaded as such.
    It contains only the layers that run, and no hooks. :func:`hf_stitch.stitch`, :func:`hf_stitch.swap`,
    :func:`hf_stitch.relative_model`, :meth:`Stitcher.attach` and :meth:`from_pretrained` build stitched models.

    This class has no head: it returns the output of the target unchanged. Its subclasses for a task add the loss.

    Args:
        config: The config.
        source: The front half. Built from the config, without loading weights, if not given; likewise ``stitch`` and
            ``target``.
        stitch: The stitching layer.
        target: The back half.
        processor: The source's tokenizer or image processor.

    Attributes:
        source: The front half: inputs -> representation.
        stitch: The stitching layer: representation of the source -> representation of the target.
        target: The back half: representation -> output of the target.
        processor: The source's tokenizer or image processor, for raw samples.
        parents: The adapters of both whole networks, if the model was built from them; they are neither part of the
            model nor saved. ``None`` otherwise.
        anchors: The anchor set of a relative model or of a swapped encoder, saved with the model; ``None`` for others.
        evaluation: The scores from :func:`hf_stitch.stitch`, or from :func:`hf_stitch.swap` if it was given data;
            ``None`` for a model that was loaded, that ``swap`` was not given data for, or that cannot be scored, of
            which a warning states the reason. ``config.scores`` contains them after saving, unless the model was
            trained or cast since (:meth:`keep_scores`).

    Raises:
        ValueError: If the config describes no stitched model.

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
    auto_class: ClassVar[str] = "AutoModel"
    output_class: ClassVar[type[Any] | None] = None  # with loss and logits; without one, the output of the target
    record_file = CONFIG
    commit_message = "Upload stitched model"
    # The loss is a mean over the batch, and forward takes no num_items_in_batch.
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True  # of an instance: whether both halves do
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self, config: StitchConfig, source: Front | None = None, stitch: StitchingLayer | None = None,
        target: Back | None = None, processor: Any = None,
    ) -> None:  # fmt: skip
        """Use the given parts, or build them from the config without loading weights."""
        if not (config.source and config.target and config.stitch):
            raise ValueError("this config describes no stitched model: stitch two networks with hf_stitch.stitch")
        # PreTrainedModel sets one of its own, and given halves have theirs.
        attention = config._attn_implementation_internal if source is None else None
        super().__init__(config)
        self.source = source if source is not None else front_of(config)
        self.stitch = stitch if stitch is not None else StitchingLayer.from_dict(config.stitch)
        self.target = target if target is not None else back_of(config)
        self.processor = processor
        self.model_tags = ["hf_stitch", "custom_code"]  # of a card that the Trainer writes
        self.parents: tuple[Adapter, Adapter] | None = None
        self.anchors: AnchorSet | None = None
        self.evaluation: Any = None
        self.main_input_name = {"text": "input_ids", "image": "pixel_values"}.get(
            self.source.takes.modality, self.source.takes.content[0]
        )
        self.supports_gradient_checkpointing = all(
            getattr(half.model, "supports_gradient_checkpointing", False) and not _is_checkpointed_across(half)
            for half in (self.source, self.target)
        )
        self._describe_in_config()
        self._apply_config(attention)
        # Set here because post_init of transformers, which collects them, would also initialise the weights again.
        self.all_tied_weights_keys: dict[str, str] = {}
        self._no_split_modules = set(whole_blocks(self))
        self._keep_in_fp32_modules = set()
        self._keep_in_fp32_modules_strict = set()
        self._without_values = torch.get_default_device().type == "meta"
        for module in self.modules():
            module._is_hf_initialized = not self._without_values  # type: ignore[assignment]
        self._backward_compatibility_gradient_checkpointing()  # config.gradient_checkpointing
        self.eval()

    def _describe_in_config(self) -> None:
        """Set in the config what libraries read there of any text or image encoder."""
        config, interface, network = self.config, self.interface, getattr(self.target.model, "config", None)
        if isinstance(network, PreTrainedConfig):  # your own network may keep anything under this name
            known = network.get_text_config()
            config.hidden_size = getattr(known, "hidden_size", None)
            heads = getattr(known, "num_attention_heads", None)  # a list where stages differ
            config.num_attention_heads = heads if isinstance(heads, int) else None
        config.num_hidden_layers = number_of_layers(self.source, self.target)
        if interface.modality == "text":
            config.max_position_embeddings, config.pad_token_id = interface.max_tokens, interface.pad_id
            first = getattr(self.source.model, "config", None)
            text = first.get_text_config() if isinstance(first, PreTrainedConfig) else None
            for name in READ_IN_TEXTS:
                setattr(config, name, getattr(text, name, None))

    def _apply_config(self, attention: str | None) -> None:
        """Pass on to both networks what a config may ask of any model, and tell in the config which attention runs."""
        networks = [half.model for half in (self.source, self.target) if isinstance(half.model, PreTrainedModel)]
        networks = [network for network in networks if network._supports_sdpa or network._supports_flash_attn]
        for network in networks:  # others have no attention, or no other one
            if attention is not None:
                network.set_attn_implementation(attention)
        if len(running := {network.config._attn_implementation for network in networks}) == 1:
            self.config._attn_implementation_internal = running.pop()
        self._chunks = size = getattr(self.config, CHUNKS, 0) or 0
        if size:
            for module in self.modules():
                if CHUNKS in vars(module):
                    setattr(module, CHUNKS, size)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Each network checks for itself."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Give first values to a model that was built on the meta device, and to no other."""
        if self._without_values and module is self.stitch:
            self.stitch.load_state_dict(StitchingLayer.from_dict(self.stitch.to_dict()).state_dict())
        elif self._without_values:
            super()._init_weights(module)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the parents."""
        return {**self.__dict__, "parents": None}

    @property
    def interface(self) -> Interface:
        """How the model takes its input: as its source does, in texts that both halves can take, without positions."""
        own, target = self.source.takes, self.target.interface
        limits, sides = [own.max_tokens], own.sides
        if self.stitch.pooling == "none":  # every token enters the target
            limits.append(target.max_tokens)
            sides = tuple(side for side in sides if side in target.sides) or sides or target.sides
        most = min((limit for limit in limits if limit is not None), default=None)
        options = {"use_cache": False} if self.can_generate() else {}
        arguments = tuple(name for name in own.arguments if name != POSITIONS)  # each half counts its own
        return dataclasses.replace(own, max_tokens=most, options=options, sides=sides, arguments=arguments)

    # -- running ----------------------------------------------------------------------------------------------------
    def transfer(self, seen: Observed | None = None, /, **inputs: Any) -> Representation:
        """Run the front half and the stitching layer.

        Args:
            seen: What else of the source is wanted, to be kept there; default: nothing.
            **inputs: Inputs of the source, as for :meth:`forward`.

        Returns:
            The activations that enter the back half.
        """
        observed = () if seen is None else (seen,)
        return self.stitch(self.source(*observed, **self.source_inputs(inputs)))

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, pixel_values: Tensor | None = None, labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None, output_hidden_states: bool | int | Sequence[int] | None = None,
        output_attentions: bool | None = None, **inputs: Any,
    ) -> Any:  # fmt: skip
        """Run the model on inputs of the source.

        Args:
            input_ids: For text sources: token ids (batch, tokens) int64.
            attention_mask: For text sources: (batch, tokens), 1 for real tokens and 0 for padding.
            token_type_ids: For text sources that take them: (batch, tokens) int64.
            pixel_values: For image sources: (batch, channels, height, width), whatever the name of this argument in the
                source. For sources that take a tensor: this tensor.
            labels: For models with a head: classes (batch,) int64; probabilities (batch, classes); 0 or 1 (batch,
                classes) for multi-label targets (``config.problem_type``); or token ids (batch, tokens), -100 for
                ignored tokens. Default: no loss.
            inputs_embeds: For text sources that take them, in place of token ids: (batch, tokens, width).
            output_hidden_states: Whether to return those of the source up to its cut, the mapped ones, and those of the
                target after its cut; or the numbers of those to return, the others are ``None``. Default: as in the
                config.
            output_attentions: Whether to return those of the layers that run. Default: as in the config.
            **inputs: Inputs of the source by their own names; ``return_dict=False`` to return a tuple. What nothing
                uses is refused, unless it is ``None``.

        Returns:
            The output of the target; for models with a head, an output class of transformers with ``logits`` and, if
            labels are given, ``loss``.

        Raises:
            ValueError: If an input of the source is missing, nothing uses an argument or a key of the config, or labels
                are given to a model without a head.
        """
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
            "inputs_embeds": inputs_embeds,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        return self._run({name: value for name, value in named.items() if value is not None} | inputs, labels)

    def _run(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Any:
        """Run both halves, with their hidden states and attentions if they are asked for."""
        if not (asked := asked_of(self, inputs)):
            return self.head(self.transfer(**inputs), labels)
        seen = Observed(flags(self.source, asked))
        entering = self.transfer(seen, **inputs)
        output = self.head(entering, labels, **flags(self.target, asked))
        for name, values in joined(self, asked, seen, entering, output).items():
            output[name] = values
        return output

    def head(self, representation: Representation, labels: Tensor | None = None, **options: Any) -> Any:
        """Run the back half on activations, as returned by :meth:`transfer`.

        Args:
            representation: The activations that enter the back half.
            labels: Labels, as for :meth:`forward`.
            **options: Further arguments of the target's forward method, for example a cache.

        Returns:
            The output, as of :meth:`forward`.
        """
        for weight in self.target.parameters():  # torch 2.7 cannot export next() with a default
            if weight.is_floating_point():
                representation = representation.replace(values=representation.values.to(weight.dtype))
                break
        return self._with_head(self.target(representation, **options), labels)

    def _with_head(self, output: Any, labels: Tensor | None) -> Any:
        if self.output_class is not None:
            logits = logits_of(output)
            loss = None if labels is None else task_named(self.task).loss(logits, labels)
            return self.output_class(loss=loss, logits=logits, **seen_in(output))
        if labels is not None:
            raise ValueError(
                f"{type(self).__name__} has no head and takes no labels; stitch with a task, or leave the labels out"
            )
        return output

    @property
    def task(self) -> str | None:
        """The task by which the model is scored, which ``config.problem_type`` may change; ``None`` without a head."""
        return task_of_problem(self.config.task, self.config.problem_type)

    @property
    def unscored(self) -> str:
        """What the head predicts, in words, if the model cannot be scored (:mod:`hf_stitch.tasks`); empty otherwise."""
        blueprint = (self.config.target or {}).get("blueprint") or {}
        found = unscored_head(str(blueprint.get("class")), None)
        return "" if task_named(self.task).causal and found in GENERATES else found

    def source_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Rename inputs to the argument names of the source.

        Args:
            inputs: Inputs, as for :meth:`forward`.

        Returns:
            The inputs by their names in the source.

        Raises:
            ValueError: If an input of the source is missing, nothing uses one, or hidden states or attentions are
                requested.
        """
        renamed = dict(inputs)
        if not self.can_generate() and renamed.get("use_cache") is False:  # there is none
            del renamed["use_cache"]
        asked = [f"config.{name}" for name in UNUSED_KEYS if getattr(self.config, name, None)]
        if (getattr(self.config, CHUNKS, 0) or 0) != self._chunks:  # set after the model was built
            asked.append(f"config.{CHUNKS}")
        asked += [name for name in EXTRA_OUTPUTS if renamed.pop(name, None) not in (None, False)]
        if asked:
            raise ValueError(
                f"a stitched model returns only the output of the target and takes no {asked[0]}=True; "
                "representations at any layer of a network are returned by hf_stitch.load(network).encode"
            )
        content = self.source.takes.content[0]
        if content not in renamed and len(given := [n for n in ("input_ids", "pixel_values") if n in renamed]) == 1:
            renamed[content] = renamed.pop(given[0])
        embedded = "inputs_embeds" in renamed and self.source.takes is self.source.interface
        missing = [name for name in self.source.takes.content if name not in renamed and not embedded]
        if missing:
            raise ValueError(f"the source takes {', '.join(missing)}, got {', '.join(inputs) or 'no inputs'}")
        mask, takes = renamed.get(MASK), self.source.takes
        if POSITIONS in takes.arguments and takes is self.source.interface and mask is not None and mask.dim() == 2:
            renamed.setdefault(POSITIONS, positions_of(mask))
        return self._used(renamed)

    def _used(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs without those that are ``None``, if the source uses them all."""
        front: Front = self.source
        while isinstance(front.model, StitchedModel):
            front = front.model.source
        first = front.model
        content = front.interface.content[0]
        used = {*front.takes.content, *front.takes.given, *arguments_of(first, content)}
        if self.can_generate():
            used.add("use_cache")  # set here with the cache; networks of transformers may read it from **kwargs
        if front.takes.modality == "text":
            used.add(front.takes.mask)
        if isinstance(self.source, PrefixFront):
            used |= {*INPUTS}
        found = {name: value for name, value in inputs.items() if value is not None}
        unused = [name for name in found if name not in used]
        anything = passes_on(first) and not isinstance(first, PreTrainedModel)  # user code, around a network or not
        for module in first.modules() if unused and anything else ():
            named = inspect.signature(module.forward).parameters
            unused = [name for name in unused if content not in named or name not in named]
        if "token_type_ids" in unused and not bool(found["token_type_ids"].any()):  # of the first text only
            unused.remove("token_type_ids")
            del found["token_type_ids"]
        if unused:
            raise ValueError(
                f"neither the source, {type(first).__name__}, nor {type(self).__name__} uses {', '.join(unused)}: "
                "leave it out" + (", or name it in its forward, or in the example_inputs that load it" * anything)
            )
        return found

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Tensor]:
        """Convert raw samples to inputs with the source's processor.

        Args:
            samples: Images, texts, pairs of texts, or tensors.
            offsets: For texts, whether to return the character span of each token, as
                :meth:`hf_stitch.Adapter.preprocess` does.

        Returns:
            Argument name -> batched tensor, for :meth:`forward`.
        """
        return preprocess(samples, self.processor, self.interface, self.source, offsets=offsets)

    def processor_in(self, folder: str, blueprint: Mapping[str, Any]) -> Any:
        """Load the processor that is saved in a folder, as the library of a network does, of which this is a record."""
        return registries.adapters.get(blueprint["library"])().processor_of(blueprint, folder)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the tokens that the source reads.

        Raises:
            NotImplementedError: If the source has none.
        """
        find = getattr(self.source.model, "get_input_embeddings", None)
        if find is None:
            raise NotImplementedError(f"the source, {type(self.source.model).__name__}, has no embeddings of tokens")
        found: nn.Module = find()
        return found

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Exchange the embeddings of the tokens that the source reads."""
        self.get_input_embeddings()  # raises without any
        source: Any = self.source.model
        source.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the number of tokens: of the source, and of the outputs of a target that predicts tokens.

        Args:
            new_num_tokens: Their number; ``None`` leaves it.
            pad_to_multiple_of: Round the number up to a multiple of this one.
            mean_resizing: Whether new embeddings are drawn around the mean of the old ones.

        Returns:
            The embeddings of the source.

        Raises:
            ValueError: If source and target have different tokenizers.
            NotImplementedError: If the source has no embeddings.
        """
        if isinstance(self.source, PrefixFront):
            raise ValueError("source and target have different tokenizers: resize the embeddings before stitching")
        self.get_input_embeddings()  # raises without any
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for side in SIDES if self.get_output_embeddings() is not None else SIDES[:1]:
            network, blueprint = getattr(self, side).model, getattr(self.config, side)["blueprint"] or {}
            network.config.get_text_config().vocab_size = resized.num_embeddings
            blueprint.get("config", {})["vocab_size"] = resized.num_embeddings
            for module in network.modules():
                if "vocab_size" in vars(module):
                    module.vocab_size = resized.num_embeddings
        return resized

    def enable_input_require_grads(self) -> None:
        """Let the embeddings of the source give outputs that require gradients. The target reads no tokens.

        Without embeddings of tokens, the output of the front half requires them.
        """
        try:
            first = self.get_input_embeddings()
        except NotImplementedError:
            first = self.source
        self._require_grads_hooks = [first.register_forward_hook(_require_gradients)]

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing: a half contains only the weights that run, without those to which they were tied."""

    # -- training ---------------------------------------------------------------------------------------------------
    def freeze_networks(self) -> Self:
        """Freeze both halves, so that only the stitching layer is trained. Frozen halves stay in eval mode.

        Returns:
            This model, for example to pass it to ``transformers.Trainer``.

        Raises:
            ValueError: If the stitching layer has no trainable parameters (an identity, for example).
        """
        if not any(parameter.requires_grad for parameter in self.stitch.parameters()):
            raise ValueError(
                f"nothing is left to train: the stitch, {self.stitch.body}, has no parameter that takes a gradient; "
                "stitch with another matcher (matcher='lstsq'), or train with TaskLoss(initial='identity')"
            )
        self.source.requires_grad_(False)
        self.target.requires_grad_(False)
        return self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode. Frozen halves stay in eval mode, so their BatchNorm statistics do not change.

        Args:
            mode: Whether to set training mode.

        Returns:
            This model.

        Raises:
            ValueError: If PEFT is to train a module (``modules_to_save``) that does not run in this model.
        """
        super().train(mode)
        kept: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, module in self.named_modules() if mode else ():
            if name.endswith(".modules_to_save"):
                kept[name.split(".")[-2]] += module.parameters()
        if idle := [name for name, weights in kept.items() if not weights]:
            raise ValueError(
                f"modules_to_save names {', '.join(idle)}, which does not run in this model and would train nothing: "
                "leave it out"
            )
        for half in (self.source, self.target):
            if not any(parameter.requires_grad for parameter in half.parameters()):
                half.eval()
        return self

    @checked
    def parent(
        self, side: Literal["source", "target"], *, allow_changed: Collection[Changeable] = (), **options: Any
    ) -> Adapter:
        """Return one of the two whole networks, from memory or loaded by the name in the config.

        Args:
            side: ``"source"`` or ``"target"``.
            allow_changed: What of a loaded network may differ from the record, as for :meth:`Stitcher.attach`. This
                model remains as it is; whatever is made with the network records its present settings.
            **options: Options of :func:`hf_stitch.load` for a network that is loaded (``token``, ``cache_dir``, …).

        Returns:
            The adapter of the network.

        Raises:
            ValueError: If the network was a module in memory or in a local folder and is no longer available, or if the
                network on the Hub has other weights or settings.
            OSError: If the network or its revision does not exist, or the Hub cannot be reached.
        """
        if self.parents is not None:
            found = self.parents[SIDES.index(side)]
            return found.source if isinstance(found, PrefixAdapter) else found
        source, target = (
            ModelReference.from_dict(end["reference"]) for end in (self.config.source, self.config.target)
        )
        found, _ = load_parent(side, source if side == "source" else target, None, options, allow_changed)
        warn_if_only_weights_are_pinned(source, target)
        return found

    @checked
    def has_changed(self, side: Literal["source", "target"]) -> bool:
        """Return whether a half was trained or cast since it was cut from its network.

        Args:
            side: ``"source"`` or ``"target"``.

        Returns:
            Whether its weights have changed. False if an older record contains no hash of the weights at the time.
        """
        recorded = getattr(self.config, side).get("half_hash")
        return recorded is not None and weights_hash(getattr(self, side)) != recorded

    def keep_scores(self, evaluation: Any = None, *, audit: Mapping[str, Any] | None = None) -> None:
        """Keep scores of the model as it is now, for its card and its config.

        :func:`hf_stitch.stitch` and :func:`hf_stitch.swap` keep the scores that they return. If the model is trained or
        cast later, it is saved without them, until new ones are kept: ``model.keep_scores(hf_stitch.evaluate(model,
        data))``.

        Args:
            evaluation: The result of :func:`hf_stitch.evaluate`. Default: the scores that are kept already.
            audit: The verdict of an audit, with its data and seed. Default: the verdict that is kept already.
        """
        self._leave_out_old_scores()
        if evaluation is not None:
            self.evaluation, self.config.scores = evaluation, evaluation.for_card()
        verdict = {} if audit is None else {"audit": audit}
        self.config.recipe = {**(self.config.recipe or {}), **verdict, SCORED: weights_hash(self)}

    def _leave_out_old_scores(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Leave out scores and the verdict of an audit that belong to other weights than the present ones."""
        recipe = dict(self.config.recipe or {})
        scored = recipe.pop(SCORED, None)
        if scored is None:  # versions before this key knew the weights of the halves only
            known = self.config.scores or "audit" in recipe
            changed = bool(known) and (self.has_changed("source") or self.has_changed("target"))
        else:
            changed = scored != weights_hash(self if weights is None else weights)
        if changed:
            self.evaluation = self.config.scores = None
            recipe.pop("audit", None)
            self.config.recipe = {**recipe, CHANGED: [*recipe.get(CHANGED, ()), "weights"]}

    # -- the small artefact -----------------------------------------------------------------------------------------
    @property
    def stitcher(self) -> Stitcher:
        """The stitching layer with references to both networks, the small artefact to share if these are public.

        Raises:
            ValueError: If a half was trained, cast or changed by hand since it was cut, so that its network no longer
                contains it.
        """
        self._leave_out_old_scores()
        return stitcher_of(self)

    # -- saving and loading -----------------------------------------------------------------------------------------
    def __str__(self) -> str:
        """Return a summary (networks, cut layers, stitch, task, scores), and the modules."""
        self._leave_out_old_scores()
        return f"{summary(self.describe())}\n\n{self!r}"

    def describe(self) -> Description:
        """Return both networks, the stitching layer, its recipe and its scores as plain values."""
        return Description.of({**self.config.to_dict(), "stitch": self.stitch.to_dict()}, whole=True)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: str | int | None = None,
        sync: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write config, weights (safetensors), the source's processor and a model card to a folder.

        Text that a person added to an existing card is kept.

        Args:
            save_directory: The folder, created if needed.
            is_main_process: Whether this process writes. Other processes return at once.
            state_dict: Weights to write instead of the model's own, for example those gathered by a trainer.
            push_to_hub: Whether to upload the model too, as :meth:`push_to_hub` does.
            max_shard_size: Maximum size of a file of weights, in bytes or as text. Default: 5 GB; 500 MB if weights are
                offloaded, because each file is in memory while it is written.
            sync: Whether to wait until the disk contains all files. The old artefact or the new one always survives a
                killed process; with ``sync=True`` also a power failure.
            **kwargs: ``repo_id`` (default: the name of the folder) and further options of :meth:`push_to_hub`.

        Raises:
            ValueError: If a half consists of user code, which cannot be rebuilt from a config, or a network was changed
                (modules exchanged, attributes set) by other means than its config before it was built, or a
                :class:`hf_stitch.adapters.rewriting.Rewrite`.
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        if not is_main_process:
            return
        options: dict[str, Any] = {"state_dict": state_dict, "max_shard_size": max_shard_size}
        self._save(Path(save_directory), sync, **options)
        if push_to_hub:
            written = (Path(save_directory) / hub.CARD).read_text(encoding="utf-8")
            name = kwargs.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(name, **{"present": written, **options, **kwargs})

    def _networks(self) -> Iterable[Method]:
        yield from networks_of(self.config.to_dict())

    def _check_savable(self) -> None:
        check_rebuilt(self.config.to_dict())

    def _write(  # type: ignore[override]
        self, folder: Path, *, state_dict: Mapping[str, Tensor] | None = None, max_shard_size: str | int | None = None
    ) -> Mapping[str, Any]:
        self._leave_out_old_scores(state_dict)
        return write(self, folder, state_dict, max_shard_size)

    def _sample_code(self) -> str | None:
        interface = self.source.takes
        if interface.modality == "text" or self.processor is not None:
            return None
        return f"torch.randn{interface.shapes[interface.content[0]]}"

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *args: Any,
        config: StitchConfig | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        attn_implementation: str | None = None,
        allow_modified: bool = False,
        subfolder: str = "",
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a stitched model from a folder or the Hub.

        Loading is strict: the files must contain exactly the weights of the model, unchanged since they were saved.
        Files that were not saved with the model are not read.

        Args:
            pretrained_model_name_or_path: Local folder or Hub id; ``None`` if config and ``state_dict`` are given.
            *args: Not supported.
            config: Config to use instead of the saved one.
            state_dict: Weights to use instead of the saved ones, all of them.
            dtype: Floating-point dtype to which weights are cast. Default: that of a given ``config`` if it has one,
                otherwise the saved dtypes. Buffers that a network computes itself are not cast.
            torch_dtype: Older name of ``dtype``.
            device_map: Device of the whole model; or ``"auto"``, ``"balanced"``, ``"sequential"``, or a mapping from
                names of modules to devices, ``"cpu"`` or ``"disk"``, as in accelerate. Blocks of both networks are not
                split. Weights on the ``"disk"`` stay in the files of the model.
            max_memory: Device -> most bytes (``{"cpu": "2GB"}``), for ``"auto"`` and the like.
            attn_implementation: Attention implementation of both networks, by its name in transformers.
                Default: not changed.
            allow_modified: Whether to load files that were changed by hand since they were saved, and files that were
                added: nothing is verified then.
            subfolder: Folder inside the folder or the Hub's model that contains the stitched model. Default: none.
            output_loading_info: Whether to return the model and what transformers tells of loading, which is strict
                here: no weight is missing, unexpected or mismatched.
            **kwargs: Options of the download (:class:`hf_stitch.hub.DownloadOptions`: ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``), and options of Auto classes and pipelines
                that have no effect here.

        Returns:
            The model, in eval mode, of the class for its task; with ``output_loading_info``, a tuple.

        Raises:
            TypeError: If an option does not exist, or makes no sense for a stitched model.
            FileNotFoundError: If config or weights are missing, or the Hub has no such model or revision.
            ValueError: If weights and config do not match (the message names the weights), a file was changed after
                saving, the folder contains an adapter of PEFT, another class was saved, an option has an invalid value,
                or transformers lacks the attention of a network (the message names it; pass ``attn_implementation``).
            OSError: If the Hub cannot be reached or denies access.
        """
        if args:
            raise TypeError(f"from_pretrained of a stitched model takes one positional argument, got {len(args)} more")
        if dtype is None:  # Auto classes may put it into the config
            dtype = torch_dtype if config is None or torch_dtype is not None else config.dtype
        if pretrained_model_name_or_path is None:
            if config is None or state_dict is None:
                raise ValueError("without a folder or a Hub id, from_pretrained takes a config and a state_dict")
            model: Any = config.model_class(config)
        else:
            model = load_pretrained(  # of class cls
                cls, str(pretrained_model_name_or_path), kwargs, config=config, dtype=dtype_of(dtype),
                device_map=device_map, max_memory=max_memory, attention=attn_implementation,
                allow_modified=allow_modified, subfolder=subfolder,
            )  # fmt: skip
        if state_dict is not None:
            try:
                model.load_state_dict(state_dict)
            except RuntimeError as error:
                raise ValueError(f"state_dict is not that of this model: {error}") from error
        model.eval()
        return (model, {name: set() for name in LOADING_INFO}) if output_loading_info else model


def _require_gradients(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _is_checkpointed_across(half: Front | Back) -> bool:
    """Return whether gradient checkpointing wraps a module around the cut, which one half cannot recompute."""
    around = map(half.model.get_submodule, half.cut.around)
    return any(isinstance(module, GradientCheckpointingLayer) for module in around)
