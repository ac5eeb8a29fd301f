"""Front half, stitching layer and back half as one network of transformers: how it runs and is trained."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import can_return_tuple

from hf_stitch.adapters.cutting.halves import Back, Front, Observed
from hf_stitch.adapters.cutting.interface import MASK, POSITIONS, Interface, positions_of
from hf_stitch.adapters.examples import arguments_of, passes_on
from hf_stitch.adapters.libraries.configs import GENERATES, unscored_head
from hf_stitch.adapters.libraries.transformers import EXTRA_OUTPUTS
from hf_stitch.adapters.prefixes import INPUTS, PrefixFront
from hf_stitch.adapters.preprocess import preprocess
from hf_stitch.artefacts.configuration import StitchConfig, back_of, front_of
from hf_stitch.artefacts.record import SIDES
from hf_stitch.artefacts.weights import whole_blocks
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import task_named, task_of_problem

CHUNKS = "chunk_size_feed_forward"
READ_IN_TEXTS = ("vocab_size", "bos_token_id", "eos_token_id")
"""Keys of a config that are those of the network that reads texts, or of the one that writes them."""
UNUSED_KEYS = ("is_encoder_decoder", "output_router_logits")
"""Keys of the config of any model that have no effect here."""

SHOWN = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Argument -> entry of the output."""


class Depth(NamedTuple):
    """The layer at which a half is cut, and the number of layers of its network."""

    layer: int
    layers: int


def depth_of(half: Front | Back) -> Depth | None:
    """Return where a half is cut, if its network is a list of layers, whose outputs are its hidden states."""
    parent, _, last = half.cut.layer.rpartition(".")
    if not parent or not last.isdecimal() or isinstance(half, PrefixFront) or not hasattr(half.model, "config"):
        return None
    layers = half.model.get_submodule(parent)
    return Depth(int(last), len(layers)) if isinstance(layers, nn.ModuleList) else None


def number_of_layers(source: Front, target: Back) -> int | None:
    """Return the number of hidden states - 1: the layers of both halves that run, and the stitch between them."""
    first, last = depth_of(source), depth_of(target)
    return None if first is None or last is None else first.layer + 1 + last.layers - last.layer


class StitchedNetwork(PreTrainedModel):
    """A source network up to a cut, a stitching layer, and a target network after a cut: what of them runs.

    It contains only the layers that run, and no hooks. Parts that are not given are built from the config, without
    loading weights.
    """

    config_class = StitchConfig
    base_model_prefix = "stitched"
    main_input_name = "input_ids"
    auto_class: ClassVar[str] = "AutoModel"
    output_class: ClassVar[type[Any] | None] = None  # with loss and logits; without one, the output of the target
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
        self.anchors: AnchorSet | None = None
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
        if not (asked := self._asked(inputs)):
            return self.head(self.transfer(**inputs), labels)
        seen = Observed(flags(self.source, asked))
        entering = self.transfer(seen, **inputs)
        output = self.head(entering, labels, **flags(self.target, asked))
        for name, values in self._joined(asked, seen, entering, output).items():
            output[name] = values
        return output

    def head(self, representation: Representation, labels: Tensor | None = None, **options: Any) -> Any:
        """Run the back half on activations, as returned by :meth:`transfer`.

        Args:
            representation: The activations that enter the back half.
            labels: Labels, as for :meth:`forward`.
            **options: Further arguments of the target's forward method, for example a cache.
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
        while isinstance(front.model, StitchedNetwork):
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

    # -- hidden states and attentions -------------------------------------------------------------------------------
    def _asked(self, inputs: MutableMapping[str, Any]) -> dict[str, Any]:
        """Take the arguments that ask for hidden states and attentions from inputs, or else from the config.

        Hidden states may be asked for by their numbers. A half that is not cut at one of a list of layers gives none,
        which is an error before anything runs.
        """
        given = {name: inputs.pop(name, None) for name in SHOWN}
        wanted = {name: getattr(self.config, name, None) if value is None else value for name, value in given.items()}
        asked = {name: value for name, value in wanted.items() if value is not None and value is not False}
        for half in (self.source, self.target) if asked else ():
            if depth_of(half) is None:
                raise _gives_none(half, next(iter(asked)))
        return asked

    def _joined(
        self, asked: Mapping[str, Any], seen: Observed, entering: Representation, output: Any
    ) -> Mapping[str, tuple[Any, ...]]:
        """Join what both halves computed.

        Hidden states are those of the source up to its cut, the mapped ones, and those of the target after its cut,
        each in the layout of its network. Attentions are those of all layers that run, in each half whose network has
        attentions.
        """
        found: dict[str, tuple[Any, ...]] = {}
        source, target = self.source, self.target
        first, last = depth_of(source), depth_of(target)
        assert first is not None and last is not None  # checked when they were asked for
        left = last.layers - 1 - last.layer
        for name, wanted in asked.items():
            before, after = (getattr(each, SHOWN[name], None) for each in (seen.output, output))
            hidden = name == "output_hidden_states"
            for half, values in ((source, before), (target, after)):
                if values is None and (hidden or before is after):
                    raise _gives_none(half, name)
            head = tuple(before or ())[
                : first.layer + 1
            ]  # with hidden states, those of the embeddings and before the cut
            tail = tuple(after or ())[len(after or ()) - left :] if left else ()
            mapped = target.cut.restore(target.cut.accept(entering, target.interface).values)
            every = (*head, seen.values, mapped, *tail) if hidden else (*head, *tail)
            if hidden and wanted is not True:
                numbers = [wanted] if isinstance(wanted, int) else [*wanted]
                if beyond := [number for number in numbers if not -len(every) <= number < len(every)]:
                    raise ValueError(
                        f"output_hidden_states names {beyond}, but there are {len(every)} hidden states, from 0"
                    )
                kept = {number % len(every) for number in numbers}
                every = tuple(value if number in kept else None for number, value in enumerate(every))
            found[SHOWN[name]] = every
        return found

    # -- training ---------------------------------------------------------------------------------------------------
    def freeze_networks(self) -> Self:
        """Freeze both halves, so that only the stitching layer is trained. Frozen halves stay in eval mode."""
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


def class_of(config: StitchConfig) -> type[StitchedNetwork]:
    """Return the class of the stitched model of a config: that of its task."""
    modality = (config.source or {}).get("interface", {}).get("modality", "")
    kind: type[StitchedNetwork] = task_named(config.task).model_for(modality)
    return kind


def flags(half: Front | Back, asked: Iterable[str]) -> dict[str, bool]:
    """Return the arguments that ask the network of a half, without those that it does not take."""
    known = inspect.signature(half.model.forward).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
    return {name: True for name in asked if anything or name in known}


def seen_in(output: Any) -> dict[str, Any]:
    """Return the hidden states and attentions of an output, by name."""
    found = {name: getattr(output, name, None) for name in SHOWN.values()}
    return {name: value for name, value in found.items() if value is not None}


def _gives_none(half: Front | Back, name: str) -> ValueError:
    return ValueError(
        f"{type(half.model).__name__}, cut at {half.cut.layer!r}, gives no {SHOWN[name]} ({name}): representations at "
        "any layer of a network are returned by hf_stitch.load(network).encode"
    )


def _require_gradients(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _is_checkpointed_across(half: Front | Back) -> bool:
    """Return whether gradient checkpointing wraps a module around the cut, which one half cannot recompute."""
    around = map(half.model.get_submodule, half.cut.around)
    return any(isinstance(module, GradientCheckpointingLayer) for module in around)
