"""Sources of the values of a network: the network, its compiled code, or recorded activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from hf_stitch import Activations, Adapter, load
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.halves import copy_without
from hf_stitch.data import Id
from hf_stitch.offloading import State, is_offloaded
from hf_stitch.tasks.heads import check_trained
from hf_stitch_versions.changes.weights import integers
from hf_stitch_versions.recording import Event, Key, Values, dtype_of, in_dtype, is_value, values_of, watch

EXACT = torch.float64
"""The dtype of the reference."""


@dataclass(frozen=True)
class Feed:
    """A batch of inputs."""

    ids: tuple[Id, ...]
    arguments: Mapping[str, Any]  # of the first network
    own: Mapping[str, Any] | None = None  # of the second network, for the same samples
    mask: Tensor | None = None  # (batch, positions), true for real tokens


@dataclass(frozen=True)
class Facts:
    """What is known about a network in another runtime.

    Attributes:
        runtime: Its name and version; empty for a network in memory, and for files without a runtime of their own.
        config: Config values that the network was built with.
        unseen: What the runtime does not show, and how it ran, in sentences.
        padded: Whether it accepts padded texts; else both networks get single texts.
    """

    runtime: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    padded: bool = True


def told_as(share: float, kinds: Iterable[str]) -> str:
    """Describe the share of the weights of a network that are stored as integers, and their formats."""
    return f"{share:.0%} of its weights are integers ({', '.join(sorted({*kinds}))})" if share else ""


def check_shape(source: object, name: str, value: Tensor, axes: Sequence[int | None], advice: str) -> None:
    """Raise an error if an input does not have the fixed axes that a file declares; the other axes are ``None``."""
    if len(axes) != value.dim() or any(fixed not in (None, n) for fixed, n in zip(axes, value.shape, strict=True)):
        expected = ", ".join("any" if fixed is None else str(fixed) for fixed in axes)
        raise ValueError(f"{source} requires {name} of shape ({expected}), got {tuple(value.shape)}. {advice}")


def in_memory(network: Adapter) -> Adapter:
    """Return a trained network with weights in memory, where they can be converted; copy an offloaded network."""
    check_trained(network)
    if not is_offloaded(network.model):
        return network
    from accelerate.hooks import remove_hook_from_submodules

    copied = copy_without(network.model, {})
    remove_hook_from_submodules(copied)
    copied.load_state_dict(dict(State(network.model)), assign=True)
    return load(copied.to(network.device), processor=network.processor, example_inputs=dict(network.example))


class Source(Protocol):
    """Source of the events of a network on a batch."""

    dtype: torch.dtype  # dtype of its computations
    modules: Mapping[str, nn.Module]  # modules of a network in memory; else empty
    inferred: ClassVar[bool]  # whether the outputs of modules are inferred and may be wrong
    facts: Facts = Facts()  # what is known about a network in another runtime

    @property
    def quantized(self) -> str:
        """Share of the weights that are integers, in words; empty without integers."""
        return ""

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights inside a module that is not in memory; empty if they are unknown."""
        return {}

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Report all events in order, at last the whole network under the name ``""``."""


@dataclass
class Network(Source):
    """Network in memory that can run."""

    adapter: Adapter
    second: bool = False  # whether it gets the inputs of the second network
    computed: torch.dtype | None = None  # converts the weights; None: leaves them alone
    own: bool = False  # whether events keep the computed outputs where ``put`` replaces them
    modules: Mapping[str, nn.Module] = field(init=False)
    inferred: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.modules = dict(self.adapter.model.named_modules())
        self.dtype = self.computed or dtype_of(self.adapter.model)

    @property
    def quantized(self) -> str:
        """Share of the weights that are integers, in words; empty without integers."""
        return told_as(*integers(self.adapter.model))

    def computing(self, dtype: torch.dtype) -> Network:
        """Return the network with its weights converted to a dtype, if they have another one."""
        return replace(self, computed=None if dtype == dtype_of(self.adapter.model) else dtype)

    def runs(self, feed: Feed) -> bool:
        """Return whether the network runs in its dtype: some kernels and weight formats support only one."""
        try:
            self.watch(feed, lambda event: None)
        except Exception:
            return False
        return True

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Run the network."""
        with in_dtype(self.adapter.model, self.computed):
            watch(self.adapter, self.arguments(feed), see, with_inputs=with_inputs, put=put, computed=self.own)

    def arguments(self, feed: Feed) -> dict[str, Any]:
        """Return the arguments of a batch on its device and in its dtype."""
        arguments = feed.own if self.second and feed.own is not None else feed.arguments
        device = self.adapter.device
        return {
            name: value.to(device, self.dtype if is_value(value) else None)
            if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }  # fmt: skip


@dataclass
class Compiled(Source):
    """Network compiled by ``torch.compile``: only its output, because hooks on its modules would undo compilation."""

    network: Network
    code: nn.Module
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    inferred: ClassVar[bool] = False
    quantized: str = ""

    def __post_init__(self) -> None:
        self.dtype = self.network.dtype

    @torch.no_grad()
    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Run the compiled code."""
        adapter = self.network.adapter
        with evaluating(self.code):
            output = self.code(**{**adapter.interface.options, **self.network.arguments(feed)})
        see(Event(("", 0), type(self.code).__name__, values_of(output)))


@dataclass
class Recorded(Source):
    """Activations of layers, recorded by another process."""

    activations: Activations
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    inferred: ClassVar[bool] = False
    quantized: str = ""

    def __post_init__(self) -> None:
        self.dtype = next(iter(self.activations.values.values())).dtype
        self._places = {id_: place for place, id_ in enumerate(self.activations.ids)}

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Read the recorded activations of the samples; ``put`` has no effect."""
        if unknown := [id_ for id_ in feed.ids if id_ not in self._places]:
            raise ValueError(f"the recorded activations lack sample {unknown[0]!r}: pass the recorded samples as data")
        rows = [self._places[id_] for id_ in feed.ids]
        for name, values in self.activations.values.items():
            batch = values[rows]
            if feed.mask is not None and batch.dim() == 3:  # padded to the longest of all samples, not of the batch
                tokens = feed.mask.shape[1]
                batch = batch[:, :tokens] if bool(feed.mask[:, 0].all()) else batch[:, -tokens:]
            see(Event((name, 0), "recorded", {"": batch}))
