"""What a library of networks tells hf-stitch: a :class:`Library`, one file for each."""

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
    """What :meth:`Library.load` returns.

    Attributes:
        model: The network.
        reference: Where it comes from; it names another library if that one has to describe the network.
        processor: Turns raw samples into inputs. ``None`` (default) if there is none.
        new: Names of the weights of a head that the user asked for and the files lack. Default: none.

    Example:
        >>> Loaded(nn.Linear(4, 2), ModelReference(None, "torch")).processor is None
        True
    """

    model: Any
    reference: ModelReference
    processor: Any = None
    new: tuple[str, ...] = ()


class Described(NamedTuple):
    """What :meth:`Library.describe` returns.

    Attributes:
        model: The network, as a module.
        interface: How it takes its input.
        example: Batch of inputs with which cuts are found and verified, as keyword arguments of the forward.
        processor: Turns raw samples into inputs. ``None`` (default) for models that take tensors.

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
    """How the networks of one library are recognised, loaded, described and built again.

    A subclass implements :meth:`serves` and :meth:`describe`; the other methods as its networks need them. Layers, cuts
    and halves are found in the network itself, so that a library never runs a cut. Register the class in
    ``hf_stitch.registries.adapters``. It has no arguments and stores nothing: an instance serves all networks.

    Attributes:
        name: Name of the library in ``hf_stitch.registries.adapters``, and in names of networks, ``name:id``.
        fallback: Whether the library serves only networks that no other library serves.
        trusted_options: Loading options that the record of an artefact may set without the consent of the user. None
            of them may refer to a file, a URL or code.
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
        """Return whether an object, if compiled or data-parallel the module inside it, belongs to this library."""

    @abstractmethod
    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Return how a live network takes its input.

        Args:
            model: A network that this library :meth:`serves`.
            example_inputs: Batch of inputs with which cuts are found and verified. ``None`` (default) if the user gave
                none.
            processor: Turns raw samples into inputs. ``None`` (default) if the user gave none.
            content: Name of the argument that carries the content, for models with several. ``None`` (default) if the
                user gave none.

        Raises:
            ExampleError: If example inputs are required and missing, or do not fit the forward.
        """

    def adapter(
        self, model: Any, reference: ModelReference, example_inputs: Any = None, processor: Any = None,
        content: str | None = None,
    ) -> Adapter:  # fmt: skip
        """Create the adapter of a live network as :meth:`describe` describes it."""
        found = self.describe(model, example_inputs, processor, content)
        return self.adapter_class(found.model, self, found.interface, found.example, reference, found.processor)

    def task(self, adapter: Adapter) -> str | None:
        """Return the task of the head of a network, a name in ``hf_stitch.registries.tasks``; by default ``None``."""
        return None

    def unscored(self, adapter: Adapter) -> str:
        """Return what the head of a network predicts, in words, if no task scores it; empty otherwise."""
        return ""

    def running(self, adapter: Adapter, inputs: Mapping[str, Any], *, trial: bool) -> AbstractContextManager[None]:
        """Return a context for every forward, for networks that take some batches only under a condition.

        Args:
            adapter: The adapter of the network.
            inputs: Inputs of this forward.
            trial: Whether this is a forward by which cuts are found and verified.
        """
        return nullcontext()

    # -- networks with a name -------------------------------------------------------------------------
    def reads(self, config: Mapping[str, Any]) -> bool:
        """Return whether a folder with this ``config.json`` contains a network of this library."""
        return False

    def origin(self, model: Any) -> str | None:
        """Return the Hub id or the absolute path from which a live network was loaded; by default ``None``."""
        return None

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a network by its reference.

        Args:
            reference: The network to load.
            processor: The processor of the user, instead of which none is loaded. ``None`` (default) if there is none.
            **options: Loading options of the library.
        """
        raise ValueError(f"networks of {self.name} cannot be loaded by name, got {reference}: pass the live module")

    # -- networks in records --------------------------------------------------------------------------
    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return JSON values from which :meth:`build` constructs a network without its weights.

        Raises:
            ValueError: By default: the class of the network is user code, which cannot be built from a config.
        """
        raise ValueError(
            f"{type(model).__name__} is a class of user code and cannot be rebuilt from a config. Save "
            "the Stitcher (stitched.stitcher.save_pretrained) and attach it to live modules: "
            "Stitcher.attach(source=…, target=…)" + see("not-saved")
        )

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Construct the network of a :meth:`blueprint`, which may be untrusted, in eval mode, without weights."""
        raise ValueError(f"networks of {self.name} cannot be rebuilt from a config: pass the live module")

    def settings(self, model: nn.Module) -> Settings:
        """Return what a forward reads of the config, by which a recorded network is recognised beside its weights.

        Two ways to load a network must give the same settings: no names, versions or paths, and nothing that only
        training reads.
        """
        try:
            blueprint = self.blueprint(model)
        except ValueError:  # user code, of which the weights alone are known
            return Settings()
        return Settings.of({"library": self.name, **blueprint})

    def processor_of(self, blueprint: Mapping[str, Any], folder: str) -> Any:
        """Load the processor of a network from the files in a folder; ``None`` if it contains none."""
        return None
