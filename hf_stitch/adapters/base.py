"""The adapter: runs a model to a cut and from a cut."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.copying import compiled_modules, copy_without, hollow
from hf_stitch.adapters.cutting.cut import Cut, NotACutError, in_context
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.cutting.plan import CutPlan, run_after
from hf_stitch.adapters.cutting.surgery import CutReached
from hf_stitch.adapters.discovery.survey import Survey
from hf_stitch.adapters.info import CutInfo
from hf_stitch.adapters.overrides.base import override_of
from hf_stitch.adapters.preprocess import place_of, preprocess
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.representation import Representation, RepresentationSpec

MOST_KINDS = 8
"""Kinds of input, beside the native one, whose cuts are remembered."""


LayerCallback = Callable[[str, Representation], None]
"""Is told the name of a layer and what the network says there."""


class Adapter(ABC):
    """Runs a model up to a cut (:meth:`encode`) and from a cut on (:meth:`decode`).

    Made by :func:`hf_stitch.load`. The model is used, never changed: mode, gradients, hooks and buffers are left as
    they were.

    Attributes:
        library: What the registry of adapters calls it.
        fallback: Whether it serves only what no other adapter does.
        trusted_options: Loading options that the record of an artefact may ask for by itself: none may name a file, an
            address or code.

    Args:
        model: The network.
        interface: How it takes its input.
        example: A batch of inputs by which cuts are found and verified.
        reference: Which model this is.
        processor: Turns raw samples into inputs; ``None`` for models that take tensors.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> a = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> a.layers
        ('0', '1')
        >>> x = torch.randn(5, 4)
        >>> torch.equal(a.decode(a.encode(x, "0")["0"], "0"), net(x))
        True
    """

    library: ClassVar[str]
    fallback: ClassVar[bool] = False
    trusted_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        interface: Interface,
        example: Mapping[str, Any],
        reference: ModelReference,
        processor: Any = None,
    ) -> None:
        """Nothing runs yet."""
        self.model = model
        self.override = override_of(model)
        special = {*interface.special_ids, *self.override.special_ids(model)}
        self.interface = dataclasses.replace(
            interface,
            options={**interface.options, **self.override.options},
            special_ids=tuple(sorted(special)),
            filler_id=next(i for i in range(len(special) + 1) if i not in special),
        )
        self.reference = reference
        self.processor = processor
        self._example = dict(example)
        self._surveys: dict[Any, Survey] = {}

    def preprocess(self, samples: Sequence[Any], *, offsets: bool = False) -> dict[str, Any]:
        """Raw samples (images, texts, tensors) as the model's inputs, by its own processor, on its device.

        Args:
            samples: Raw samples: what :class:`hf_stitch.Samples` yields. Tensors are taken as preprocessed.
            offsets: Of texts, whether to say which characters each token stands for.

        Returns:
            The keyword arguments of the model; with ``offsets`` also ``offset_mapping``, (batch, tokens, 2), which is
            none of them.
        """
        return preprocess(samples, self.processor, self.interface, self.model, offsets=offsets)

    @property
    def pinned(self) -> ModelReference:
        """The reference with the hash of the weights as they are now."""
        return dataclasses.replace(self.reference, weights_hash=weights_hash(self.model))

    # -- what a library must provide --------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def serves(cls, model: Any) -> bool:
        """Whether a live network is of this library.

        Args:
            model: Of any type; ``nn.Module`` that were compiled or wrapped are unwrapped.
        """

    @classmethod
    @abstractmethod
    def of(
        cls,
        model: Any,
        reference: ModelReference,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
    ) -> Adapter:
        """The adapter of a live network.

        Args:
            model: One that it :meth:`serves`.
            reference: Which network it is.
            example_inputs: A batch of inputs, where given.
            processor: What turns raw samples into inputs, where given.
            content: The argument that is cut away from the output, where given.

        Raises:
            ExampleError: If inputs are missing or do not fit.
        """

    @property
    @abstractmethod
    def task(self) -> str | None:
        """What the head does: ``image-classification``, ``text-classification``, ``text-generation``, or ``None``."""

    @abstractmethod
    def blueprint(self) -> dict[str, Any]:
        """How to build this network without its weights, as JSON values.

        Raises:
            ValueError: For classes of user code, which no config can rebuild.
        """

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Whether a folder with such a ``config.json`` holds a network of this library; by default no.

        Args:
            config: The values in the file.
        """
        return False

    @classmethod
    def origin(cls, model: Any) -> str | None:
        """The id that a live network was loaded from, as far as it knows; by default it does not.

        Args:
            model: One that it :meth:`serves`.
        """
        return None

    @classmethod
    def load(
        cls,
        reference: ModelReference,
        *,
        example_inputs: Any = None,
        processor: Any = None,
        content: str | None = None,
        **options: Any,
    ) -> Adapter:
        """The adapter of a network by name.

        Args:
            reference: Which network.
            example_inputs: As for :meth:`of`.
            processor: As for :meth:`of`.
            content: As for :meth:`of`.
            **options: The library's own loading options.

        Raises:
            ValueError: If networks of this library have no names, which is the default.
        """
        raise ValueError(f"networks of {cls.library} have no names, got {reference}: pass the live module")

    @classmethod
    def build(cls, blueprint: Mapping[str, Any]) -> nn.Module:
        """The network of a :meth:`blueprint`, weights not loaded, in eval mode.

        Raises:
            ValueError: If networks of this library cannot be rebuilt.
        """
        raise ValueError(f"networks of {cls.library} cannot be rebuilt from a config: pass the live module")

    @classmethod
    def processor_of(cls, blueprint: Mapping[str, Any], folder: str) -> Any:
        """The processor for a network of a :meth:`blueprint`, from the files in a folder; ``None`` without one."""
        return None

    # -- cuts ------------------------------------------------------------------------------------
    @property
    def example(self) -> dict[str, Any]:
        """The batch of inputs by which cuts are found and verified, as keyword arguments."""
        return dict(self._example)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The ordered names of the blocks that everything seems to flow through, verified or not."""
        return self._survey().blocks

    @property
    def layers(self) -> tuple[str, ...]:
        """The ordered names of the verified cuts among the :attr:`candidates`.

        Each candidate is verified at the first access, which runs the network a few times on the example.
        """
        return tuple(name for name in self.candidates if self.verify_cut(name).status == "verified")

    def verify_cut(self, layer: str) -> CutInfo:
        """Verify a layer as a cut and tell what came out; refusals are told, not raised."""
        survey = self._survey()
        try:
            plan, cut = survey.plan(layer), survey.cut(layer)
        except NotACutError as error:
            return CutInfo(layer, "refused", reason=str(error))
        return CutInfo(layer, "verified", cut.spec, cut.cost, plan.kind)

    def cut_info(self, layer: str) -> CutInfo:
        """What is known of a layer without verifying it."""
        survey = self._survey()
        cut = survey.cut(layer)
        plan = survey.plan(layer).kind if survey.status(layer) == "verified" else None
        return CutInfo(layer, survey.status(layer), cut.spec, cut.cost, plan)

    def spec(self, layer: str) -> RepresentationSpec:
        """The form of the representation at a layer, at the model's native input size."""
        return self._survey().cut(layer).spec

    def cut(self, layer: str) -> tuple[Cut, CutPlan]:
        """The cut at a layer and the verified plan for what follows it.

        Raises:
            NotACutError: If the layer is no cut.
        """
        survey = self._survey()
        return survey.cut(layer), survey.plan(layer)

    # -- running ------------------------------------------------------------------------------------
    def forward(self, inputs: Any) -> Any:
        """The model's own output, in eval mode, with the same options that cuts are verified with."""
        return self._run(self.inputs(inputs))

    def encode(self, inputs: Any, layers: str | Iterable[str]) -> dict[str, Representation]:
        """The representations of a batch at some layers; the forward ends at the deepest of them.

        Args:
            inputs: The model's inputs: a mapping of arguments, or the one tensor.
            layers: Name or names of cuts.

        Returns:
            By layer, in the order asked for. Gradients flow if they are enabled.

        Raises:
            NotACutError: If a layer is no cut.
        """
        names = [layers] if isinstance(layers, str) else list(layers)
        if not names:
            raise ValueError("encode needs at least one layer, got none")
        survey = self._survey(self.inputs(inputs))
        for name in names:
            survey.plan(name)
        found: dict[str, Representation] = {}

        def keep(name: str, representation: Representation) -> None:
            found[name] = representation.replace(values=representation.values.clone())

        self.run_with_callback(inputs, names, keep)
        return {name: found[name] for name in names}

    def run_with_callback(self, inputs: Any, layers: Iterable[str], callback: LayerCallback) -> None:
        """Run the network once, up to the deepest of some layers, and tell what it says at each as it comes.

        To be looked at, a layer need not be a cut: any module will do that runs once and returns vectors, tokens or a
        grid.

        Args:
            inputs: The model's inputs: a mapping of arguments, or the one tensor.
            layers: Names of modules.
            callback: Told of each layer. What follows in the network may overwrite the values: it copies what it keeps.

        Raises:
            NotACutError: If a layer does not exist, does not run, runs several times or returns no representation.

        Example:
            >>> import torch, hf_stitch
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> a = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
            >>> a.run_with_callback(torch.randn(5, 4), ["0", "1"], lambda name, seen: print(name, *seen.values.shape))
            0 5 8
            1 5 8
        """
        arguments = self.inputs(inputs)
        survey = self._survey(arguments)
        cuts = {name: survey.cut(name) for name in layers}
        deepest = max(cuts, key=lambda name: survey.trace.calls[name].exited)
        to_the_end = self._offloaded
        waiting = set(cuts)

        def hook(cut: Cut) -> Callable[[nn.Module, Any, Any], None]:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                if cut.layer not in waiting:
                    raise NotACutError(f"layer {cut.layer!r} runs several times for these inputs; look at another one")
                waiting.remove(cut.layer)
                values = tree.get(output, cut.path)
                callback(cut.layer, cut.represent(values, arguments, self.interface))
                if cut.layer == deepest and not to_the_end:
                    raise CutReached

            return look

        handles = [self.model.get_submodule(name).register_forward_hook(hook(cut)) for name, cut in cuts.items()]
        try:
            with suppress(CutReached):
                self._run(arguments)
        finally:
            for handle in handles:
                handle.remove()
        if waiting:
            raise NotACutError(f"layer {min(waiting)!r} does not run for these inputs; look at another one")

    def decode(self, representation: Representation, layer: str) -> Any:
        """The model's own output for a representation at a layer; runs only what follows, and never sees the input.

        Args:
            representation: From :meth:`encode`, or made elsewhere; without a context, a blank one of the native size
                is made.
            layer: Name of the cut.

        Returns:
            What the model itself returns.
        """
        placed = in_context(representation, self.interface)
        survey = self._survey(placed.context)
        cut, plan = survey.cut(layer), survey.plan(layer)
        cut.accept(representation, self.interface)
        if representation.layout != cut.spec.layout or representation.width != cut.spec.width:
            raise ValueError(
                f"layer {layer!r} takes a representation of layout {cut.spec.layout} and width {cut.spec.width}, "
                f"got {representation.layout} and {representation.width}; stitch them with hf_stitch.stitch"
            )
        return run_after(self.model, self._run, cut, plan, self.interface, placed)

    # -- halves ------------------------------------------------------------------------------------
    def front(self, layer: str) -> Front:
        """The part up to a cut as a module of its own, with copies of the weights that run and of no others.

        Raises:
            NotACutError: If the layer is no cut.
            ValueError: If weights are offloaded, modules are compiled, or a hook would be lost.
        """
        cut, plan = self.cut(layer)
        gone = {name: hollow(self.model.get_submodule(name)) for name in plan.after}
        return Front(copy_without(self.model, gone), cut, plan, self.interface)

    def back(self, layer: str) -> Back:
        """The part after a cut as a module of its own, with copies of the weights that run and of no others.

        Raises:
            NotACutError: If the layer is no cut.
            ValueError: If weights are offloaded, modules are compiled, or a hook would be lost.
        """
        cut, plan = self.cut(layer)
        gone = {name: hollow(self.model.get_submodule(name)) for name in plan.stubs}
        if plan.entry is not None:
            gone[layer] = hollow(self.model.get_submodule(layer))
        return Back(copy_without(self.model, gone), cut, plan, self.interface)

    # -- inside ------------------------------------------------------------------------------------
    def inputs(self, inputs: Any) -> dict[str, Any]:
        """Inputs as keyword arguments, checked: a mapping of the model's arguments, or the one tensor that it takes."""
        if isinstance(inputs, Tensor):
            return {self.interface.content[0]: inputs}
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"inputs must be a tensor or a mapping of the model's arguments, got {type(inputs).__name__}"
            )
        missing = [name for name in (*self.interface.content, *self.interface.given) if name not in inputs]
        if missing:
            raise ValueError(
                f"inputs of {type(self.model).__name__} lack {', '.join(missing)}; got {', '.join(inputs) or 'none'}"
            )
        return {name: value for name, value in inputs.items() if value is not None}

    @property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        return place_of(self.model)[0]

    @property
    def _offloaded(self) -> bool:
        """Whether weights wait elsewhere (here they are on the meta device), moved in and out by a whole forward."""
        return any(p.is_meta for p in self.model.parameters())

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        """Every forward of the model goes through here: in eval mode, uncompiled, with the interface's options."""
        eagerly = torch.compiler.set_stance("force_eager") if compiled_modules(self.model) else nullcontext()
        with evaluating(self.model), eagerly:
            return self.model(**{**self.interface.options, **inputs})

    def _survey(self, inputs: Mapping[str, Any] | None = None) -> Survey:
        """The survey for inputs of a kind: the native one, or another for images of another size, other arguments."""
        native = self._kind(self._example)
        kind = native if inputs is None else self._kind(inputs)
        if kind in self._surveys:
            self._surveys[kind] = self._surveys.pop(kind)  # the last that was asked for
        else:
            if len(self._surveys) > MOST_KINDS:
                del self._surveys[next(known for known in self._surveys if known != native)]
            example = self._example if inputs is None or kind == native else self._few(inputs)
            blocks = self.override.blocks(self.model)
            self._surveys[kind] = Survey(self.model, self._run, self.interface, example, blocks)
        return self._surveys[kind]

    def _kind(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What cuts may depend on: the size of images, and which arguments there are beside those of texts."""
        interface = self.interface
        sizes = () if interface.modality == "text" else tuple(tuple(inputs[n].shape[1:]) for n in interface.content)
        known = {*interface.content, *interface.given, *interface.arguments}
        others = {n: v for n, v in {**interface.options, **inputs}.items() if n not in known}
        told = {n: repr(v) if isinstance(v, (bool, int, float, str)) else type(v).__name__ for n, v in others.items()}
        return sizes, tuple(sorted(told.items()))

    def _few(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Two samples of inputs, of texts as many tokens as of the native ones: by these their kind is verified."""
        interface, few = self.interface, {}
        batch, tokens = size_of_inputs(inputs, interface)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.dim():
                value = value.detach()
                if tokens and value.dim() > 1 and value.shape[1] == tokens:
                    native = self._example[interface.content[0]].shape[1]
                    value = torch.ones_like(value[:, :native]) if name == interface.mask else value[:, :native]
                if len(value) == batch:
                    other = value.flip(-1) if name in interface.shapes else value
                    value = torch.cat([value[:2], other[:1]])[:2]
                if name in interface.shapes and not any(value.stride()):  # erased, in a context
                    value = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
            few[name] = value
        return few
