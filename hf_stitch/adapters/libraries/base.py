"""The interface between hf-stitch and a library of networks: a :class:`Library`, in one file for each library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

from torch import nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.printing import see
from hf_stitch.reference import ModelReference, Settings


class Loaded(NamedTuple):
    """Output of :meth:`Library.load`.

    Attributes:
        model: The network.
        reference: Origin of the network. If it names another library, that library describes the network.
        processor: Converts raw samples into inputs; ``None`` (default) without one.
        new: Names of the weights of a requested head that the files lack. Default: none.

    Example:
        >>> Loaded(nn.Linear(4, 2), ModelReference(None, "torch")).processor is None
        True
    """

    model: Any
    reference: ModelReference
    processor: Any = None
    new: tuple[str, ...] = ()


class Described(NamedTuple):
    """Output of :meth:`Library.describe`.

    Attributes:
        model: The network, as a module.
        interface: Description of its inputs.
        example: Batch of inputs to find and verify cuts, as keyword arguments of the forward.
        processor: Converts raw samples into inputs; ``None`` (default) for models of tensors.

    Example:
        >>> import torch
        >>> interface = Interface(("input",), "tensor", {"input": (4,)}, {"input": "float32"})
        >>> list(Described(nn.Linear(4, 2), interface, {"input": torch.ones(2, 4)}).example)
        ['input']
    """

    model: nn.Module
    interface: Interface
    example: Mapping[str, Any]
    processor: Any = None


class Library(ABC):
    """Base class of libraries, which recognise, load, describe and rebuild their networks.

    A subclass implements :meth:`serves` and :meth:`describe`, and further methods if its networks require them. It does
    not handle layers, cuts and halves, which are found in the network. Register the class in
    ``hf_stitch.registries.adapters``. Its constructor has no arguments, and an instance must not store anything about a
    network, because it serves all networks.

    Attributes:
        name: Name of the library in ``hf_stitch.registries.adapters``, and in names of networks, ``name:id``.
        fallback: Whether the library serves only networks that no other library serves.
        trusted_options: Loading options that the record of an artefact may set without the consent of the user. They
            must not refer to a file, a URL or code.
        adapter_class: Class of the adapters of its networks.

    Example:
        >>> import torch
        >>> class Doubling(nn.Sequential):
        ...     def forward(self, rows):
        ...         return super().forward(2 * rows)
        >>> class DoublingLibrary(Library):
        ...     name = "doubling"
        ...
        ...     def serves(self, model):
        ...         return isinstance(model, Doubling)
        ...
        ...     def describe(self, model, example_inputs=None, processor=None, content=None):
        ...         width = model[0].in_features
        ...         interface = Interface(("rows",), "tensor", {"rows": (width,)}, {"rows": "float32"})
        ...         return Described(model, interface, {"rows": torch.ones(2, width)}, processor)
        >>> network = Doubling(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> DoublingLibrary().adapter(network, ModelReference(None, "torch")).layers
        ('0',)
    """

    name: ClassVar[str]
    fallback: ClassVar[bool] = False
    trusted_options: ClassVar[frozenset[str]] = frozenset()
    adapter_class: ClassVar[type[Adapter]] = Adapter

    # -- every library --------------------------------------------------------------------------------
    @abstractmethod
    def serves(self, model: Any) -> bool:
        """Return whether an object belongs to this library; compiled and data-parallel modules are unwrapped first."""

    @abstractmethod
    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe the inputs of a live network.

        Args:
            model: A network that this library :meth:`serves`.
            example_inputs: Batch of inputs to find and verify cuts, if the user passed one.
            processor: Converts raw samples into inputs, if the user passed one.
            content: Name of the argument that carries the content, if the user passed it.

        Raises:
            ExampleError: If example inputs are required and missing, or do not match the forward.
        """

    def adapter(
        self, model: Any, reference: ModelReference, example_inputs: Any = None, processor: Any = None,
        content: str | None = None,
    ) -> Adapter:  # fmt: skip
        """Create the adapter of a live network from the output of :meth:`describe`."""
        description = self.describe(model, example_inputs, processor, content)
        return self.adapter_class(
            description.model, self, description.interface, description.example, reference, description.processor
        )

    def task(self, adapter: Adapter) -> str | None:
        """Return the task of the head of a network, a name in ``hf_stitch.registries.tasks``; by default ``None``."""
        return None

    def unscored(self, adapter: Adapter) -> str:
        """Return a description of the output of the head if no task scores it; empty otherwise."""
        return ""

    def running(self, adapter: Adapter, inputs: Mapping[str, Any], *, trial: bool) -> AbstractContextManager[None]:
        """Return a context for every forward, for networks that accept some batches only under a condition.

        Args:
            adapter: The adapter of the network.
            inputs: Inputs of this forward.
            trial: Whether this forward serves to find or verify cuts.
        """
        return nullcontext()

    # -- networks with a name -------------------------------------------------------------------------
    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether a folder with this ``config.json`` contains a network of this library."""
        return False

    def origin(self, model: Any) -> str | None:
        """Return the Hub id or absolute path of a live network, if it was loaded by name; by default ``None``."""
        return None

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a network by its reference.

        Args:
            reference: The network to load.
            processor: The processor of the user, which replaces the saved one. ``None`` (default) without one.
            **options: Loading options of the library.
        """
        raise ValueError(f"networks of {self.name} cannot be loaded by name, got {reference}: pass the live module")

    # -- networks in records --------------------------------------------------------------------------
    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return JSON values for :meth:`build`, which constructs the network without its weights.

        Raises:
            ValueError: By default: the class of the network is user code, which cannot be built from a config.
        """
        raise ValueError(
            f"{type(model).__name__} is a custom class and cannot be rebuilt from a config. Save "
            "the Stitcher (stitched.stitcher.save_pretrained) and attach it to the networks: "
            "Stitcher.attach(source=…, target=…)" + see("not-saved")
        )

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Build the network of a :meth:`blueprint`, which may be untrusted, in eval mode and without weights."""
        raise ValueError(f"networks of {self.name} cannot be rebuilt from a config: pass the live module")

    def settings(self, model: nn.Module) -> Settings:
        """Return the config values that a forward reads; with the weights, they identify a recorded network.

        They must not depend on the way of loading: exclude names, versions, paths, and values that only training reads.
        """
        try:
            blueprint = self.blueprint(model)
        except ValueError:  # user code: only the weights are known
            return Settings()
        return Settings.of({"library": self.name, **blueprint})

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the processor of a network from the files in a folder; ``None`` without a processor."""
        return None
