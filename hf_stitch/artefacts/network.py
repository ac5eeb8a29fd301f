"""Front half, stitching layer and back half as a transformers model: running and training."""

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
"""Config keys copied from the network that receives texts, or from the network that generates them."""
UNUSED_KEYS = ("is_encoder_decoder", "output_router_logits")
"""Config keys of any model without effect here."""

SHOWN = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Argument -> entry of the output."""


class Depth(NamedTuple):
    """Number of the layer at the cut of a half, and number of layers of its network."""

    layer: int
    layers: int


def depth_of(half: Front | Back) -> Depth | None:
    """Return the depth of a cut in a list of layers with hidden states as outputs; ``None`` for other networks."""
    parent, _, last = half.cut.layer.rpartition(".")
    if not parent or not last.isdecimal() or isinstance(half, PrefixFront) or not hasattr(half.model, "config"):
        return None
    layers = half.model.get_submodule(parent)
    return Depth(int(last), len(layers)) if isinstance(layers, nn.ModuleList) else None


def number_of_layers(source: Front, target: Back) -> int | None:
    """Return the number of hidden states - 1: the layers of both halves, plus the stitch."""
    depth_a, depth_b = depth_of(source), depth_of(target)
    return None if depth_a is None or depth_b is None else depth_a.layer + 1 + depth_b.layers - depth_b.layer


class StitchedNetwork(PreTrainedModel):
    """Source network up to a cut, stitching layer, and target network after a cut.

    It contains only the layers that run, without hooks. Missing parts are built from the config, without loading
    weights.
    """

    config_class = StitchConfig
    base_model_prefix = "stitched"
    main_input_name = "input_ids"
    auto_class: ClassVar[str] = "AutoModel"
    output_class: ClassVar[type[Any] | None] = None  # with loss and logits; without one, the output of the target
    # The loss is a mean over the batch, and forward does not accept num_items_in_batch.
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True  # of an instance: whether both halves support it
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
            raise ValueError(
                "this config does not describe a stitched model: stitch two networks with hf_stitch.stitch"
            )
        # PreTrainedModel sets an attention implementation, but the halves have theirs already.
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
        """Set the config fields that libraries read from text and image encoders."""
        config, interface, target_config = self.config, self.interface, getattr(self.target.model, "config", None)
        if isinstance(target_config, PreTrainedConfig):  # the attribute of user code may be anything
            text_config = target_config.get_text_config()
            config.hidden_size = getattr(text_config, "hidden_size", None)
            heads = getattr(text_config, "num_attention_heads", None)  # a list if stages differ
            config.num_attention_heads = heads if isinstance(heads, int) else None
        config.num_hidden_layers = number_of_layers(self.source, self.target)
        if interface.modality == "text":
            config.max_position_embeddings, config.pad_token_id = interface.max_tokens, interface.pad_id
            source_config = getattr(self.source.model, "config", None)
            source_text = source_config.get_text_config() if isinstance(source_config, PreTrainedConfig) else None
            for name in READ_IN_TEXTS:
                setattr(config, name, getattr(source_text, name, None))

    def _apply_config(self, attention: str | None) -> None:
        """Apply generic config options to both networks, and set the running attention implementation in the config."""
        networks = [half.model for half in (self.source, self.target) if isinstance(half.model, PreTrainedModel)]
        networks = [network for network in networks if network._supports_sdpa or network._supports_flash_attn]
        for network in networks:  # the rest have only one attention implementation, or no attention
            if attention is not None:
                network.set_attn_implementation(attention)
        if len(implementations := {network.config._attn_implementation for network in networks}) == 1:
            self.config._attn_implementation_internal = implementations.pop()
        self._chunks = size = getattr(self.config, CHUNKS, 0) or 0
        if size:
            for module in self.modules():
                if CHUNKS in vars(module):
                    setattr(module, CHUNKS, size)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return true; each network checks its attention implementation."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the weights of a model that was built on the meta device, and only of such a model."""
        if self._without_values and module is self.stitch:
            self.stitch.load_state_dict(StitchingLayer.from_dict(self.stitch.to_dict()).state_dict())
        elif self._without_values:
            super()._init_weights(module)

    @property
    def interface(self) -> Interface:
        """Interface of the source, limited to texts that both halves accept, and without positions."""
        source, target = self.source.takes, self.target.interface
        limits, sides = [source.max_tokens], source.sides
        if self.stitch.pooling == "none":  # every token enters the target
            limits.append(target.max_tokens)
            sides = tuple(side for side in sides if side in target.sides) or sides or target.sides
        max_tokens = min((limit for limit in limits if limit is not None), default=None)
        options = {"use_cache": False} if self.can_generate() else {}
        arguments = tuple(name for name in source.arguments if name != POSITIONS)  # each half counts its own positions
        return dataclasses.replace(source, max_tokens=max_tokens, options=options, sides=sides, arguments=arguments)

    # -- running ----------------------------------------------------------------------------------------------------
    def transfer(self, seen: Observed | None = None, /, **inputs: Any) -> Representation:
        """Run the front half and the stitching layer.

        Args:
            seen: Container for further outputs of the source. Default: further outputs are discarded.
            **inputs: Inputs of the source, as for :meth:`forward`.
        """
        extra = () if seen is None else (seen,)
        return self.stitch(self.source(*extra, **self.source_inputs(inputs)))

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
            token_type_ids: For text sources that accept them: (batch, tokens) int64.
            pixel_values: For image sources: (batch, channels, height, width), also if the source has another name for
                this argument. For sources with tensor inputs: this tensor.
            labels: For models with a head: classes (batch,) int64; probabilities (batch, classes); 0 or 1 (batch,
                classes) for multi-label targets (``config.problem_type``); or token ids (batch, tokens), -100 for
                ignored tokens. Default: no loss.
            inputs_embeds: Replacement for token ids, for text sources that accept it: (batch, tokens, width).
            output_hidden_states: Whether to return hidden states: of the source up to its cut, mapped, and of the
                target after its cut. Numbers select some of them; the rest are ``None``. Default: as in the config.
            output_attentions: Whether to return the attentions of the layers that run. Default: as in the config.
            **inputs: Inputs of the source under their names; ``return_dict=False`` to return a tuple. Unused inputs
                other than ``None`` raise an error.

        Returns:
            The output of the target; for models with a head, an output class of transformers with ``logits`` and, with
            labels, ``loss``.
        """
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
            "inputs_embeds": inputs_embeds,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        return self._run({name: value for name, value in arguments.items() if value is not None} | inputs, labels)

    def _run(self, inputs: dict[str, Any], labels: Tensor | None = None) -> Any:
        if not (requested := self._requested_outputs(inputs)):
            return self.head(self.transfer(**inputs), labels)
        observed = Observed(flags(self.source, requested))
        representation = self.transfer(observed, **inputs)
        output = self.head(representation, labels, **flags(self.target, requested))
        for name, values in self._join_outputs(requested, observed, representation, output).items():
            output[name] = values
        return output

    def head(self, representation: Representation, labels: Tensor | None = None, **options: Any) -> Any:
        """Run the back half on activations, as returned by :meth:`transfer`.

        Args:
            representation: The input of the back half.
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
            return self.output_class(loss=loss, logits=logits, **extra_outputs_of(output))
        if labels is not None:
            raise ValueError(
                f"{type(self).__name__} does not have a head, so labels are not used; stitch with a task, or leave the "
                "labels out"
            )
        return output

    @property
    def task(self) -> str | None:
        """The task for scoring; ``config.problem_type`` may change it. ``None`` without a head."""
        return task_of_problem(self.config.task, self.config.problem_type)

    @property
    def unscored(self) -> str:
        """Description of the head's predictions if they cannot be scored (:mod:`hf_stitch.tasks`); otherwise empty."""
        blueprint = (self.config.target or {}).get("blueprint") or {}
        description = unscored_head(str(blueprint.get("class")), None)
        return "" if task_named(self.task).causal and description in GENERATES else description

    def source_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Rename inputs to the argument names of the source.

        Args:
            inputs: Inputs, as for :meth:`forward`.
        """
        renamed = dict(inputs)
        if not self.can_generate() and renamed.get("use_cache") is False:  # without a cache, it has no effect
            del renamed["use_cache"]
        unsupported = [f"config.{name}" for name in UNUSED_KEYS if getattr(self.config, name, None)]
        if (getattr(self.config, CHUNKS, 0) or 0) != self._chunks:  # set after the model was built
            unsupported.append(f"config.{CHUNKS}")
        unsupported += [name for name in EXTRA_OUTPUTS if renamed.pop(name, None) not in (None, False)]
        if unsupported:
            raise ValueError(
                f"a stitched model returns only the output of the target and does not support {unsupported[0]}=True; "
                "use hf_stitch.load(network).encode for representations at any layer"
            )
        content, generic = self.source.takes.content[0], [n for n in ("input_ids", "pixel_values") if n in renamed]
        if content not in renamed and len(generic) == 1:
            renamed[content] = renamed.pop(generic[0])
        has_embeddings = "inputs_embeds" in renamed and self.source.takes is self.source.interface
        missing = [name for name in self.source.takes.content if name not in renamed and not has_embeddings]
        if missing:
            raise ValueError(f"the source requires {', '.join(missing)}, got {', '.join(inputs) or 'no inputs'}")
        mask, takes = renamed.get(MASK), self.source.takes
        if POSITIONS in takes.arguments and takes is self.source.interface and mask is not None and mask.dim() == 2:
            renamed.setdefault(POSITIONS, positions_of(mask))
        return self._present_inputs(renamed)

    def _present_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs without ``None``; raise an error for inputs that the source does not use."""
        front: Front = self.source
        while isinstance(front.model, StitchedNetwork):
            front = front.model.source
        network = front.model
        content = front.interface.content[0]
        used = {*front.takes.content, *front.takes.given, *arguments_of(network, content)}
        if self.can_generate():
            used.add("use_cache")  # set here with the cache; networks of transformers may read it from **kwargs
        if front.takes.modality == "text":
            used.add(front.takes.mask)
        if isinstance(self.source, PrefixFront):
            used |= {*INPUTS}
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        unused = [name for name in present if name not in used]
        is_user_code = passes_on(network) and not isinstance(network, PreTrainedModel)  # or around a network
        for module in network.modules() if unused and is_user_code else ():
            parameters = inspect.signature(module.forward).parameters
            unused = [name for name in unused if content not in parameters or name not in parameters]
        if "token_type_ids" in unused and not bool(present["token_type_ids"].any()):  # of the first text only
            unused.remove("token_type_ids")
            del present["token_type_ids"]
        if unused:
            raise ValueError(
                f"neither the source, {type(network).__name__}, nor {type(self).__name__} uses {', '.join(unused)}: "
                "leave it out" + (", or name it in the forward of the source or in its example_inputs" * is_user_code)
            )
        return present

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Tensor]:
        """Convert raw samples to inputs with the source's processor.

        Args:
            samples: Images, texts, pairs of texts, or tensors.
            offsets: For texts, whether to return the character span of each token, as in
                :meth:`hf_stitch.Adapter.preprocess`.
        """
        return preprocess(samples, self.processor, self.interface, self.source, offsets=offsets)

    def processor_in(self, folder: str, blueprint: Mapping[str, Any]) -> Any:
        """Load the processor in a folder by the library of a network's blueprint."""
        return registries.adapters.get(blueprint["library"])().processor_of(blueprint, folder)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings of the source.

        Raises:
            NotImplementedError: If the source does not have token embeddings.
        """
        find = getattr(self.source.model, "get_input_embeddings", None)
        if find is None:
            raise NotImplementedError(f"the source, {type(self.source.model).__name__}, lacks token embeddings")
        embeddings: nn.Module = find()
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings of the source."""
        self.get_input_embeddings()  # raises without embeddings
        source: Any = self.source.model
        source.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the token embeddings of the source, and the output layer of a target that predicts tokens.

        Args:
            new_num_tokens: The number of tokens; ``None`` keeps it.
            pad_to_multiple_of: Round the number up to a multiple of this.
            mean_resizing: Whether to draw new embeddings around the mean of the old embeddings.
        """
        if isinstance(self.source, PrefixFront):
            raise ValueError("source and target have different tokenizers: resize the embeddings before stitching")
        self.get_input_embeddings()  # raises without embeddings
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
        """Make the outputs of the source's token embeddings require gradients.

        For a source without token embeddings, the output of the front half requires gradients.
        """
        try:
            module = self.get_input_embeddings()
        except NotImplementedError:
            module = self.source
        self._require_grads_hooks = [module.register_forward_hook(_require_gradients)]

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing: the halves do not contain the weights that their weights were tied to."""

    # -- hidden states and attentions -------------------------------------------------------------------------------
    def _requested_outputs(self, inputs: MutableMapping[str, Any]) -> dict[str, Any]:
        """Pop the flags for hidden states and attentions from the inputs; the config contains the defaults.

        Hidden states may be selected by numbers. Raises an error if a half is not cut in a list of layers, because it
        then cannot return hidden states.
        """
        switches = {name: inputs.pop(name, None) for name in SHOWN}
        switches = {n: getattr(self.config, n, None) if flag is None else flag for n, flag in switches.items()}
        requested = {name: flag for name, flag in switches.items() if flag is not None and flag is not False}
        for half in (self.source, self.target) if requested else ():
            if depth_of(half) is None:
                raise _missing_outputs(half, next(iter(requested)))
        return requested

    def _join_outputs(
        self, requested: Mapping[str, Any], observed: Observed, representation: Representation, output: Any
    ) -> Mapping[str, tuple[Any, ...]]:
        """Join the hidden states and attentions of both halves.

        Hidden states are from the source up to its cut, mapped, and from the target after its cut, each in the layout
        of its network. Attentions are from all layers that run, in each half with attentions.
        """
        joined: dict[str, tuple[Any, ...]] = {}
        source, target = self.source, self.target
        depth_a, depth_b = depth_of(source), depth_of(target)
        assert depth_a is not None and depth_b is not None  # checked by _requested_outputs
        num_after = depth_b.layers - 1 - depth_b.layer
        for name, flag in requested.items():
            outputs_a, outputs_b = (
                getattr(half_output, SHOWN[name], None) for half_output in (observed.output, output)
            )
            is_hidden = name == "output_hidden_states"
            for half, values in ((source, outputs_a), (target, outputs_b)):
                if values is None and (is_hidden or outputs_a is outputs_b):
                    raise _missing_outputs(half, name)
            # Hidden states include the embeddings.
            head = tuple(outputs_a or ())[: depth_a.layer + 1]
            tail = tuple(outputs_b or ())[len(outputs_b or ()) - num_after :] if num_after else ()
            mapped = target.cut.restore(target.cut.accept(representation, target.interface).values)
            all_states = (*head, observed.values, mapped, *tail) if is_hidden else (*head, *tail)
            if is_hidden and flag is not True:
                numbers = [flag] if isinstance(flag, int) else [*flag]
                if beyond := [number for number in numbers if not -len(all_states) <= number < len(all_states)]:
                    raise ValueError(
                        f"output_hidden_states names {beyond}, but there are {len(all_states)} hidden states, from 0"
                    )
                selected = {number % len(all_states) for number in numbers}
                all_states = tuple(states if number in selected else None for number, states in enumerate(all_states))
            joined[SHOWN[name]] = all_states
        return joined

    # -- training ---------------------------------------------------------------------------------------------------
    def freeze_networks(self) -> Self:
        """Freeze both halves to train only the stitching layer. Frozen halves stay in eval mode."""
        if not any(parameter.requires_grad for parameter in self.stitch.parameters()):
            raise ValueError(
                f"the stitch, {self.stitch.body}, does not have trainable parameters; stitch with another matcher "
                "(matcher='lstsq'), or train with TaskLoss(initial='identity')"
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
        weights_of_modules: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, module in self.named_modules() if mode else ():
            if name.endswith(".modules_to_save"):
                weights_of_modules[name.split(".")[-2]] += module.parameters()
        if unused := [name for name, weights in weights_of_modules.items() if not weights]:
            raise ValueError(
                f"modules_to_save contains {', '.join(unused)}, which does not run in this model: leave it out"
            )
        for half in (self.source, self.target):
            if not any(parameter.requires_grad for parameter in half.parameters()):
                half.eval()
        return self


def class_of(config: StitchConfig) -> type[StitchedNetwork]:
    """Return the class of stitched models for the task of a config."""
    modality = (config.source or {}).get("interface", {}).get("modality", "")
    model_class: type[StitchedNetwork] = task_named(config.task).model_for(modality)
    return model_class


def flags(half: Front | Back, requested: Iterable[str]) -> dict[str, bool]:
    """Return the flags for hidden states and attentions that the network of a half accepts."""
    parameters = inspect.signature(half.model.forward).parameters
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: True for name in requested if has_kwargs or name in parameters}


def extra_outputs_of(output: Any) -> dict[str, Any]:
    """Return the hidden states and attentions of an output, by name."""
    entries = {name: getattr(output, name, None) for name in SHOWN.values()}
    return {name: tensors for name, tensors in entries.items() if tensors is not None}


def _missing_outputs(half: Front | Back, name: str) -> ValueError:
    return ValueError(
        f"{type(half.model).__name__}, cut at {half.cut.layer!r}, does not return {SHOWN[name]} ({name}): use "
        "hf_stitch.load(network).encode for representations at any layer"
    )


def _require_gradients(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _is_checkpointed_across(half: Front | Back) -> bool:
    """Return whether gradient checkpointing wraps a module around the cut; one half cannot recompute such a module."""
    modules_around = map(half.model.get_submodule, half.cut.around)
    return any(isinstance(module, GradientCheckpointingLayer) for module in modules_around)
