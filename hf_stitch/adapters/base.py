"""The base class of adapters, which run a model up to a cut and from a cut on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_stitch.adapters.attributes import attributes, changed_by_hand
from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, CutInfo, CutPlan, NotACutError, in_context, run_part
from hf_stitch.adapters.cutting.forwards import evaluating, is_compiled, run_by_length
from hf_stitch.adapters.cutting.halves import Back, Front, copy_without, hollow
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.surgery import CutReached, alone
from hf_stitch.adapters.discovery.padding import probe_padding
from hf_stitch.adapters.discovery.survey import Survey
from hf_stitch.adapters.overrides import override_of
from hf_stitch.adapters.pinning import settings_of_processor
from hf_stitch.adapters.preprocess import Deferred, place_of, preprocess
from hf_stitch.adapters.rewriting import Recorder, blueprint_of, recorded, settings_of
from hf_stitch.data import Samples
from hf_stitch.hub import license_of
from hf_stitch.reference import ModelReference, Settings, summary_of, weights_hash
from hf_stitch.representation import Representation, RepresentationSpec

MOST_KINDS = 8
"""Number of cached surveys, one for each kind of input in addition to the native kind."""

LayerCallback = Callable[[str, Representation], None]
"""A function that receives the name of a layer and its representation."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _locked(method: Method) -> Method:
    """Lock the network while a method of its adapter runs: the method may change modules and hooks."""

    @wraps(method)
    def locked(self: Adapter, *args: Any, **kwargs: Any) -> Any:
        with alone(self.model):
            return method(self, *args, **kwargs)

    return cast(Method, locked)


class Origin(Recorder, Protocol):
    """Protocol of the library that creates an adapter: the methods that the adapter calls."""

    def task(self, adapter: Adapter) -> str | None:
        """Return the task of the head."""

    def unscored(self, adapter: Adapter) -> str:
        """Return a description of the output of the head if no task scores it."""

    def running(self, adapter: Adapter, inputs: Mapping[str, Any], *, trial: bool) -> AbstractContextManager[None]:
        """Return a context for every forward."""


class Adapter:
    """Run a model up to a cut (:meth:`encode`) and from a cut on (:meth:`decode`).

    Create an adapter with :func:`hf_stitch.load`. An adapter never changes its model: every call leaves the training
    mode, gradients, hooks and buffers as they were. Threads may share an adapter, or a network with several adapters:
    a lock serialises their calls.

    Attributes:
        completes: Whether the network returns an output when it runs to its end.
        embedding_width: Number of trailing features of each activation that hold the embedding of the target's token.
        model: The network.
        new: Names of the randomly initialised weights of a head that was requested at loading.
        interface: Description of the inputs of the network.
        override: The architecture override of the network; a plain :class:`Override` if none is registered.
        reference: Origin of the network and its loading options.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> adapter.layers
        ('0', '1')
        >>> x = torch.randn(5, 4)
        >>> torch.equal(adapter.decode(adapter.encode(x, "0")["0"], "0"), net(x))
        True
    """

    completes: ClassVar[bool] = True
    embedding_width: int = 0
    new: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, library: Origin, interface: Interface, example: Mapping[str, Any],
        reference: ModelReference, processor: Any = None,
    ) -> None:  # fmt: skip
        self.model = model
        self._library = library
        self.override = override_of(model)
        special = {*interface.special_ids, *self.override.special_ids(model)}
        self.interface = dataclasses.replace(
            interface,
            options={**interface.options, **self.override.options},
            special_ids=tuple(sorted(special)),
            filler_id=next(i for i in range(len(special) + 1) if i not in special),
        )
        self.reference = reference
        self._processor = processor
        self._example = dict(example)
        self._surveys: dict[Any, Survey] = {}
        self._padding_is_tried = False

    @cached_property
    def processor(self) -> Any:
        """Function, tokenizer or image processor that converts raw samples into inputs; ``None`` for tensors."""
        return self._processor() if isinstance(self._processor, Deferred) else self._processor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {self.reference})"

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Any]:
        """Convert raw samples (images, texts, tensors) into inputs of the model with its processor.

        Args:
            samples: Raw samples, as :class:`hf_stitch.Samples` yields them. Tensors count as preprocessed.
            offsets: For texts, whether to return the character span of each token.

        Returns:
            The keyword arguments of the model, on its device and in its dtype. ``offsets`` adds ``offset_mapping``,
            shape (batch, tokens, 2), which is not an argument of the model.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> inputs = adapter.preprocess([torch.zeros(4), torch.ones(4)])
            >>> {name: tuple(value.shape) for name, value in inputs.items()}
            {'input': (2, 4)}
        """
        return preprocess(samples, self.processor, self._padded(), self.model, offsets=offsets)

    def beside(self, context: Any) -> Adapter:
        """Return the adapter with a fixed context, for networks that accept a text in addition to their content."""
        if context is not None:
            raise ValueError(f"{type(self.model).__name__} does not accept a context: leave out `context`")
        return self

    @property
    @_locked
    def pinned(self) -> ModelReference:
        """The reference with everything that determines the outputs: current weights (hash), config and processor."""
        settings = self.settings()
        changes = changed_by_hand(self.model, lambda: recorded(self.blueprint(), self.model))
        by_code = attributes(self.model) if changes is None else changes[0]
        chosen, defaults = (
            {f"modules.{name}": value for name, value in part.items()} for part in (by_code.chosen, by_code.defaults)
        )
        return dataclasses.replace(
            self.reference,
            weights_hash=weights_hash(self.model),
            config=Settings(settings.chosen | chosen, settings.defaults | defaults),
            processor=settings_of_processor(self.processor, self.interface.max_tokens),
            summary=", ".join(filter(None, (self.reference.summary, summary_of(self.model)))),
            license=None if self.reference.id is None else license_of(self.reference.id, self.reference.revision),
        )

    # -- from the library ------------------------------------------------------------------
    @property
    def library(self) -> str:
        """Name of the library in ``hf_stitch.registries.adapters``."""
        return self._library.name

    @property
    def task(self) -> str | None:
        """Task of the head, a name in ``hf_stitch.registries.tasks``; ``None`` without a head."""
        return self._library.task(self)

    @property
    def unscored(self) -> str:
        """Description of the output of the head if stitched models with it cannot be scored; empty otherwise."""
        return self._library.unscored(self)

    def blueprint(self) -> dict[str, Any]:
        """Return a description that rebuilds the network, with its rewrites but without its weights.

        Raises:
            ValueError: If the class of the network is user code, which cannot be rebuilt from a config.
        """
        return blueprint_of(self.model, self._library)

    def settings(self) -> Settings:
        """Return the config values that a forward reads; with the weights, they identify a recorded network."""
        return settings_of(self.model, self._library)

    def check_lengths(self, samples: Samples) -> None:
        """Check in advance that the network accepts all texts, if it reads them with a second tokenizer."""

    # -- cuts ------------------------------------------------------------------------------------
    @property
    def example(self) -> dict[str, Any]:
        """The batch of inputs for finding and verifying cuts: keyword arguments of the forward, on :attr:`device`."""
        return {name: v.to(self.device) if isinstance(v, Tensor) else v for name, v in self._example.items()}

    def module_name(self, layer: str) -> str:
        """Return the name in ``model.named_modules()`` of the module at a layer; by default, the name of the layer."""
        return layer

    def layer_name(self, module: str) -> str:
        """Return the layer name of a module, the inverse of :meth:`module_name`; by default, the name of the module."""
        return module

    @property
    @_locked
    def candidates(self) -> tuple[str, ...]:
        """Names of the blocks through which the whole computation appears to flow, in execution order.

        Candidates are not verified; :attr:`layers` lists those that are cuts. The first access runs the network a few
        times on the example.
        """
        return tuple(map(self.layer_name, self._survey().blocks))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the verified cuts among the :attr:`candidates`, in execution order.

        The first access verifies the candidates, which runs the network several times on the example.
        """
        self._padded()
        self._survey().verify(map(self.module_name, self.candidates))
        return tuple(name for name in self.candidates if self.verify_cut(name).status == "verified")

    @_locked
    def verify_cut(self, layer: str) -> CutInfo:
        """Check whether the network can be cut exactly at a layer.

        The result is cached. A layer that is not a cut gives a result with the status ``refused``, not an exception.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> adapter.verify_cut("0").status, adapter.verify_cut("9").status
            ('verified', 'refused')
        """
        survey, module = self._survey(), self.module_name(layer)
        try:
            plan, cut = survey.plan(module), survey.cut(module)
        except NotACutError as error:
            return CutInfo(layer, "refused", reason=error.args[0])
        return CutInfo(layer, "verified", cut.spec, cut.cost, plan.kind)

    @_locked
    def cut_info(self, layer: str) -> CutInfo:
        """Return the properties of a layer as a cut, without verifying it.

        Raises:
            NotACutError: If the layer cannot be a cut: it does not exist, does not run, runs several times, or returns
                no representation.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> info = adapter.cut_info("0")
            >>> info.status, info.spec.width
            ('pending', 8)
        """
        survey, module = self._survey(), self.module_name(layer)
        if survey.status(module) != "pending":
            return self.verify_cut(layer)  # cached
        cut = survey.cut(module)
        return CutInfo(layer, "pending", cut.spec, cut.cost)

    @_locked
    def spec(self, layer: str) -> RepresentationSpec:
        """Return the spec (layout, width, grid, prefix tokens) at a layer, verified or not, at the native input size.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> hf_stitch.load(net, example_inputs=torch.randn(2, 4)).spec("0")
            RepresentationSpec(layout='bd', width=8, grid=None, prefix_tokens=0)
        """
        return self._survey().cut(self.module_name(layer)).spec

    @_locked
    def cut(self, layer: str) -> tuple[Cut, CutPlan]:
        """Verify a layer as a cut and return the cut with the plan for running the part after it.

        Raises:
            NotACutError: If the network cannot be cut at the layer.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> cut, plan = hf_stitch.load(net, example_inputs=torch.randn(2, 4)).cut("1")
            >>> cut.layer, plan.kind
            ('1', 'stubs')
        """
        survey, module = self._survey(), self.module_name(layer)
        return survey.cut(module), survey.plan(module)

    # -- running ------------------------------------------------------------------------------------
    @_locked
    def forward(self, inputs: Any) -> Any:
        """Run the whole model in eval mode, with the options of its interface (e.g. ``use_cache=False``)."""
        return run_by_length(self._run, self.inputs(inputs), self._padded())

    @_locked
    def encode(self, inputs: Any, layers: str | Iterable[str]) -> dict[str, Representation]:
        """Compute the representations of a batch at one or several cuts; the forward stops at the deepest one.

        Gradients flow if they are enabled.

        Args:
            inputs: Inputs of the model: a mapping of arguments, or the single tensor.
            layers: Name or names of cuts.

        Raises:
            NotACutError: If the network cannot be cut at one of the layers.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> representations = adapter.encode(torch.randn(5, 4), ["0", "1"])
            >>> {name: tuple(r.values.shape) for name, r in representations.items()}
            {'0': (5, 8), '1': (5, 8)}
        """
        names = [layers] if isinstance(layers, str) else list(layers)
        if not names:
            raise ValueError("layers must contain at least one name, got none")
        survey = self._survey(self.inputs(inputs))
        for name in names:
            survey.plan(self.module_name(name))
        representations: dict[str, Representation] = {}

        def store(name: str, representation: Representation) -> None:
            representations[name] = representation.replace(values=representation.values.clone())

        self.run_with_callback(inputs, names, store)
        return {name: representations[name] for name in names}

    @_locked
    def run_with_callback(
        self, inputs: Any, layers: Iterable[str], callback: LayerCallback, *, complete: bool = False
    ) -> Any:
        """Run the network once, up to the deepest of several layers, and call a function with each representation.

        Unlike :meth:`encode`, this method does not require cuts: it accepts any module that runs once and returns
        vectors, tokens or a grid.

        Args:
            inputs: Inputs of the model: a mapping of arguments, or the single tensor.
            layers: Names of modules.
            callback: Receives the name and the representation of each layer, in execution order. Later layers may
                overwrite the values in place, so the callback must copy the values that it stores. It must not run
                another adapter: this thread holds the lock of the network, so two such threads could deadlock.
            complete: Whether to run the network to its end and return its output.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> adapter.run_with_callback(torch.randn(5, 4), ["0", "1"], lambda name, r: print(name, *r.values.shape))
            0 5 8
            1 5 8
        """
        arguments, stored = self.inputs(inputs), dict[str, Representation]()
        survey, names = self._survey(arguments), tuple(layers)
        if self._padded().sides:
            return self._capture(survey, arguments, names, callback, complete)

        def store(name: str, representation: Representation) -> None:
            stored[name] = representation.replace(values=representation.values.clone())

        def run(part: Mapping[str, Any]) -> tuple[Any, dict[str, Representation]]:
            return self._capture(survey, part, names, store, complete), stored.copy()

        output, by_layer = run_by_length(run, arguments, self.interface)
        for name in by_layer:
            callback(name, by_layer[name])
        return output

    @_locked
    def run_branches(self, arguments: Mapping[str, Any], layers: Iterable[str], callback: LayerCallback) -> None:
        """Run the network once on several branches of each text; otherwise like :meth:`run_with_callback`.

        The cuts of the native kind of input apply: a mask of queries by keys does not change them.
        """
        self._capture(self._survey(), arguments, layers, callback, False)

    def _capture(
        self, survey: Survey, arguments: Mapping[str, Any], layers: Iterable[str], callback: LayerCallback,
        complete: bool,
    ) -> Any:  # fmt: skip
        layer_of = {self.module_name(name): name for name in layers}
        cuts = {name: survey.cut(name) for name in layer_of}
        deepest = max(cuts, key=lambda name: survey.trace.calls[name].exited)
        # Offloaded weights are on the meta device until hooks of a complete forward load them.
        to_the_end = complete or any(p.is_meta for p in self.model.parameters())
        output = None
        pending = set(cuts)

        def hook(cut: Cut) -> Callable[[nn.Module, Any, Any], None]:
            def capture(module: nn.Module, args: Any, output: Any) -> None:
                if cut.layer not in pending:
                    raise NotACutError(f"layer {cut.layer!r} runs several times for these inputs; choose another layer")
                pending.remove(cut.layer)
                values = tree.get(output, cut.path)
                callback(layer_of[cut.layer], cut.represent(values, arguments, self.interface))
                if cut.layer == deepest and not to_the_end:
                    raise CutReached

            return capture

        handles = [self.model.get_submodule(name).register_forward_hook(hook(cut)) for name, cut in cuts.items()]
        try:
            with suppress(CutReached):
                output = self._run(arguments)
        finally:
            for handle in handles:
                handle.remove()
        if pending:
            raise NotACutError(f"layer {min(pending)!r} does not run for these inputs; choose another layer")
        return output if complete else None

    @_locked
    def decode(self, representation: Representation, layer: str) -> Any:
        """Run the part of the model after a cut on a representation, without the input of the model.

        Args:
            representation: The activations at the cut, from :meth:`encode` or another source. If it lacks a context, a
                blank one of the native input size is added.
            layer: Name of the cut.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> x = torch.randn(5, 4)
            >>> r = adapter.encode(x, "1")["1"]
            >>> torch.equal(adapter.decode(r, "1"), net(x))
            True
            >>> zeros = r.replace(values=torch.zeros(5, 8))
            >>> torch.equal(adapter.decode(zeros, "1"), net[2](torch.zeros(5, 8)))
            True
        """
        complete = in_context(representation, self.interface)
        survey = self._survey(complete.context)
        cut, plan = survey.cut(self.module_name(layer)), survey.plan(self.module_name(layer))
        cut.accept(representation, self.interface)
        if representation.layout != cut.spec.layout or representation.width != cut.spec.width:
            raise ValueError(
                f"layer {layer!r} requires a representation of layout {cut.spec.layout} and width {cut.spec.width}, "
                f"got {representation.layout} and {representation.width}; map it with hf_stitch.stitch"
            )
        first = cut, plan
        return run_by_length(
            lambda part: run_part(self.model, self._run, self.interface, part, first=first), complete, self._padded()
        )

    # -- halves ------------------------------------------------------------------------------------
    @_locked
    def front(self, layer: str) -> Front:
        """Return the part of the network up to a cut as a separate module, from its arguments to the representation.

        The module copies the weights that it uses, and only those.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> front = hf_stitch.load(net, example_inputs=torch.randn(2, 4)).front("0")
            >>> x = torch.randn(5, 4)
            >>> torch.equal(front(input=x).values, net[0](x))
            True
        """
        cut, plan = self.cut(layer)
        replacements = {name: hollow(self.model.get_submodule(name)) for name in plan.after}
        return Front(copy_without(self.model, replacements), cut, plan, self._padded())

    @_locked
    def back(self, layer: str) -> Back:
        """Return the part of the network after a cut as a separate module, from a representation to the output.

        The module copies the weights that it uses, and only those.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> x = torch.randn(5, 4)
            >>> torch.equal(adapter.back("0")(adapter.encode(x, "0")["0"]), net(x))
            True
        """
        cut, plan = self.cut(layer)
        replacements = {name: hollow(self.model.get_submodule(name)) for name in plan.stubs}
        if plan.entry is not None:
            replacements[cut.layer] = hollow(self.model.get_submodule(cut.layer))
        return Back(copy_without(self.model, replacements), cut, plan, self._padded())

    def exchange(self, part: str, encoder: Any, data: Any, run: Any, **options: Any) -> Any:
        """Replace a part of the network by an encoder, for :func:`hf_stitch.swap`.

        Args:
            part: Name of the part.
            encoder: The new encoder, in any form that :func:`hf_stitch.load` accepts.
            data: Raw samples, without labels.
            run: Execution settings of the job (:class:`hf_stitch.running.Run`).
            **options: Options of ``swap`` that apply to parts.
        """
        raise ValueError(
            f"the library {self.library} does not define parts of {type(self.model).__name__}, got part={part!r}: pass "
            "a multimodal network (images or audio with text), then the encoder; the plugin is hf-stitch-towers"
        )

    # -- inside ------------------------------------------------------------------------------------
    def inputs(self, inputs: Any) -> dict[str, Any]:
        """Check inputs of the model and return them as keyword arguments, without those that are ``None``.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> list(hf_stitch.load(net, example_inputs=torch.randn(2, 4)).inputs(torch.zeros(5, 4)))
            ['input']
        """
        kind, content = type(self.model).__name__, self.interface.content
        if isinstance(inputs, Tensor):
            inputs = {content[0]: inputs}
        elif not isinstance(inputs, Mapping):
            raise TypeError(
                f"inputs must be a tensor or a mapping of arguments of the model, got {type(inputs).__name__}"
            )
        inputs = self.interface.complete(inputs)
        if missing := [name for name in (*content, *self.interface.given) if name not in inputs]:
            raise ValueError(f"inputs of {kind} lack {', '.join(missing)}; got {', '.join(inputs) or 'none'}")
        axes = ("samples", "tokens") if self.interface.modality == "text" else ("samples",)
        for name in content:
            if isinstance(value := inputs.get(name), Tensor) and 0 in value.shape[: len(axes)]:
                raise ValueError(
                    f"{name} of {kind} must contain {' and '.join(axes)}, got the shape {tuple(value.shape)}: "
                    "remove empty batches and texts"
                )
        return {name: value for name, value in inputs.items() if value is not None}

    @_locked
    def _padded(self) -> Interface:
        """Return the interface of the network, after a single trial run of the padding of its texts."""
        if self.interface.modality == "text" and not self._padding_is_tried:
            text, pad = self.example.get("input_ids"), getattr(self.processor, "pad_token_id", None)
            self.interface = probe_padding(self.model, partial(self._run, trial=True), self.interface, text, pad)
            self._padding_is_tried = True
        return self.interface

    @property
    def device(self) -> torch.device:
        """Device of the inputs of the model."""
        return place_of(self.model)[0]

    def _run(self, inputs: Mapping[str, Any], *, trial: bool = False, fused: bool = False) -> Any:
        """Run a forward in eval mode, uncompiled, with the options of the interface. All forwards use this method."""
        eager = torch.compiler.set_stance("force_eager") if is_compiled(self.model) else nullcontext()
        condition = self._library.running(self, inputs, trial=trial)
        with evaluating(self.model, fused=fused), eager, condition:
            return self.interface.kept(self.model(**{**self.interface.options, **inputs}))

    def _survey(self, inputs: Mapping[str, Any] | None = None) -> Survey:
        """Return the cached survey for a kind of input, defined by image size and additional arguments."""
        native = self._kind(self._example)
        kind = native if inputs is None else self._kind(inputs)
        if kind in self._surveys:
            self._surveys[kind] = self._surveys.pop(kind)  # the most recently used kind is last
        else:
            if len(self._surveys) > MOST_KINDS:
                del self._surveys[next(cached for cached in self._surveys if cached != native)]
            example = self.example if inputs is None or kind == native else self._few(inputs)
            blocks = self.override.blocks(self.model)
            self._surveys[kind] = Survey(self.model, partial(self._run, trial=True), self.interface, example, blocks)
        return self._surveys[kind]

    def _kind(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the key of the survey cache: the size of images and the non-standard arguments."""
        interface = self.interface
        sizes = () if interface.modality == "text" else tuple(interface.shape(inputs, n) for n in interface.content)
        native_names = {*interface.content, *interface.given, *interface.arguments}
        extra = {n: v for n, v in {**interface.options, **inputs}.items() if n not in native_names}
        values = {n: repr(v) if isinstance(v, (bool, int, float, str)) else type(v).__name__ for n, v in extra.items()}
        return sizes, tuple(sorted(values.items()))

    def _few(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return two samples of the inputs to verify cuts for their kind, texts cut to the native number of tokens."""
        interface, pair = self.interface, {}
        batch, tokens = size_of_inputs(inputs, interface)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.dim():
                value = value.detach()
                if interface.modality == "text" and value.dim() > 1 and value.shape[1] == tokens:
                    native = self._example[interface.content[0]].shape[1]
                    value = torch.ones_like(value[:, :native]) if name == interface.mask else value[:, :native]
                if len(value) == batch:
                    mirrored = value.flip(-1) if name in interface.shapes else value
                    value = torch.cat([value[:2], mirrored[:1]])[:2]
                if name in interface.shapes and not any(value.stride()):  # erased content of a context is all zeros
                    value = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
            pair[name] = value
        return pair
