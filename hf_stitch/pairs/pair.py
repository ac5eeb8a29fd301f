"""Two networks that meet at pairs of layers: :class:`Pair`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.checks import check_meet, layer_names, padded_alike
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.representation import Pooling, Representation, RepresentationSpec, all_set, finite
from hf_stitch.running import Run
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import POOLED, paired_rows, part_widths
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import task_named, task_of

Cell = tuple[str, str]
"""Layer of the source, layer of the target."""
Align = Literal["tokens", "prefix"]
ALIGN: tuple[str, ...] = get_args(Align)


class Ran(NamedTuple):
    """What one network outputs for a batch."""

    inputs: Mapping[str, Any]
    found: Mapping[str, Representation]  # by layer
    output: Any  # of the whole network; None if it did not run to its end


@dataclass(frozen=True)
class Outputs:
    """What both networks output for a batch, each run once."""

    inputs: Mapping[str, Any]
    x: Mapping[str, Representation]
    y: Mapping[str, Representation]
    source: Any
    target: Any


@dataclass(frozen=True, eq=False)
class Pair:
    """A source and a target that stitches join, with the pairs of layers between which they run. It has no samples.

    Attributes:
        source: The network of the front halves.
        target: The network of the back halves.
        pooling: The pooling of all stitches.
        task: Task of the stitched models; ``None`` without a head.
        cells: The pairs of layers.
        align: How positions of texts correspond.
        kept: What is made of the pair once and used again, such as copies of its halves.

    Example:
        >>> import hf_stitch
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> pair = Pair(a, b).at([("1", "0"), ("1", "1")])
        >>> pair.layers_a, pair.layers_b
        (('1',), ('0', '1'))
        >>> pair.identity(("1", "0")).widths
        (8, 8)
    """

    source: Adapter
    target: Adapter
    pooling: Pooling = "none"
    task: str | None = None
    cells: tuple[Cell, ...] = ()
    align: Align = "tokens"
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, run: Run, source: str | nn.Module | Adapter, target: str | nn.Module | Adapter, *, pooling: Pooling,
        task: str | None = "auto", scored: bool = False, align: Align = "tokens", own: bool = False,
    ) -> Self:  # fmt: skip
        """Load two networks and check that they meet; with ``own``, maps also take the embedding of target tokens."""
        a, b = load_on(source, run.processes.device), load_on(target, run.processes.device)
        if align == "prefix":
            a = PrefixAdapter(a, b, own=own)
        elif own:
            raise ValueError("own=True belongs to align='prefix': with one tokenizer the source knows the token")
        check_meet(a, b, pooling)
        if pooling == "none" and align == "tokens" and a.interface.modality == "text":
            a, b = padded_alike(a, b)
        found = scored_task(b, task) if scored else task_of(b, task)
        if task_named(found).per_token and pooling in POOLED:
            raise ValueError(
                f"pooling={pooling!r} leaves one token per text, and {found} predicts something at each: use "
                "pooling='none'"
            )
        return cls(a, b, pooling, found, align=align)

    def at(self, cells: Iterable[Cell]) -> Self:
        """Return the pair with these pairs of layers, verified as cuts."""
        chosen = tuple(dict.fromkeys(cells))
        for la, lb in chosen:
            self.source.cut(la)
            self.target.cut(lb)
        return replace(self, cells=chosen)

    def over(self, layers_a: Iterable[str] | None, layers_b: Iterable[str] | None) -> Self:
        """Return the pair with all pairs of some layers of both, by default of all cuts."""
        of_a = layer_names("layers_a", self.source.layers if layers_a is None else layers_a)
        of_b = layer_names("layers_b", self.target.layers if layers_b is None else layers_b)
        return self.at((a, b) for b in of_b for a in of_a)

    @property
    def layers_a(self) -> tuple[str, ...]:
        """Layers of the source."""
        return tuple(dict.fromkeys(a for a, _ in self.cells))

    @property
    def layers_b(self) -> tuple[str, ...]:
        """Layers of the target."""
        return tuple(dict.fromkeys(b for _, b in self.cells))

    @property
    def record(self) -> dict[str, Any]:
        """How the networks meet and are read, as JSON values for a recipe."""
        aligned = {} if self.align == "tokens" else {"align": self.align, "own": self.source.embedding_width > 0}
        return {"pooling": self.pooling, **aligned, **task_named(self.task).record}

    @property
    def hashes(self) -> dict[str, Any]:
        """Hashes of the weights of both networks."""
        return {name: getattr(self, name).pinned.weights_hash for name in ("source", "target")}

    def specs(self, cell: Cell) -> tuple[RepresentationSpec, RepresentationSpec]:
        """Return the specs at a pair of layers."""
        return self.source.spec(cell[0]), self.target.spec(cell[1])

    def identity(self, cell: Cell, means: Mapping[str, Tensor] | None = None) -> StitchingLayer:
        """Return the stitching layer between two layers whose maps are identities."""
        specs = self.specs(cell)
        maps = {part: IdentityStitch(*widths) for part, widths in part_widths(*specs, self.pooling).items()}
        return StitchingLayer(*specs, self.pooling, maps["body"], maps.get("prefix"), means)

    def run(self, batch: Batch, twin: Batch | None = None, *, complete: bool = False) -> Outputs:
        """Run both networks once on a batch, to their deepest layers or, if ``complete``, to their ends.

        Args:
            batch: Raw samples.
            twin: Samples of the target, if it takes other ones.
            complete: Whether to run the networks to their ends, where a source that reads the tokens of the target has
                no output.
        """
        own, twin = self.run_source(batch, complete=complete), twin or batch
        inputs = task_named(self.task).inputs(self.target, twin.samples)
        other = run_to(self.target, inputs, self.layers_b, twin, "target", complete=complete)
        return Outputs(other.inputs, own.found, other.found, own.output, other.output)

    def run_source(self, batch: Batch, *, complete: bool) -> Ran:
        """Run the source once on a batch, as :meth:`run` does."""
        inputs = task_named(self.task).inputs(self.source, batch.samples)
        return run_to(self.source, inputs, self.layers_a, batch, "source", complete=complete)

    def finish(self, mapped: Representation, layer: str, like: Representation) -> Any:
        """Run the target from a layer on mapped activations, in the dtype of its own, with what it reads beside."""
        beside = like.context if self.target.interface.beside else {}
        return self.target.decode(mapped.replace(values=mapped.values.to(like.values.dtype), context=beside), layer)

    @torch.no_grad()
    def rehearse(self, train: PairedSamples, test: Samples) -> None:
        """Run one sample through both networks and every cut, so that errors occur before all data are read."""
        ((_, batch, twin),) = train.take(1).batches(Run(1, progress=False), "rehearsing")
        found = self.run(batch, twin, complete=self.task is not None)
        for side, adapter, representations in (("source", self.source, found.x), ("target", self.target, found.y)):
            for layer, representation in representations.items():
                if representation.spec != adapter.spec(layer):
                    raise ValueError(
                        f"on these samples layer {layer!r} of the {side} outputs {representation.spec}, but the "
                        f"network is cut for {adapter.spec(layer)}: load it with example_inputs of the size of the "
                        "samples, or resize the samples"
                    )
        for la, lb in self.cells:
            paired_rows(found.x[la], found.y[lb], self.pooling)
        for lb in self.layers_b:
            la = next(a for a, b in self.cells if b == lb)
            mapped = self.identity((la, lb))(found.x[la])
            try:
                self.finish(mapped, lb, found.y[lb])
            except Exception as error:
                raise ValueError(
                    f"the target cannot run from layer {lb!r} on the activations that pooling={self.pooling!r} leaves "
                    f"({type(error).__name__}: {error}); use another pooling or layer"
                ) from error
        if self.task is not None:
            task_named(self.task).check_labels(test, logits_of(found.target).shape[-1])


def run_to(
    adapter: Adapter, inputs: Mapping[str, Any], layers: Collection[str], batch: Batch, side: str, *, complete: bool
) -> Ran:
    """Run a network once on the inputs of a batch, to the deepest of some layers or to its end, and check the layers.

    A source that reads the tokens of the target has no end. Layers need not be cuts.
    """
    kept: dict[str, Representation] = {}

    def keep(name: str, representation: Representation) -> None:
        kept[name] = representation.replace(values=representation.values.clone())

    output = adapter.run_with_callback(inputs, layers, keep, complete=complete and adapter.completes)
    check_finite(kept, batch, f" of the {side}")
    return Ran(inputs, kept, output)


def scored_task(target: Adapter, task: str | None) -> str:
    """Return the task of stitched models that are scored by their logits; a ValueError if the target has none."""
    found = task_of(target, task)
    if found is None:
        raise ValueError(
            f"stitched models are scored by the logits of the target, but its task is {found!r}: pass task=, for "
            "example task='image-classification'"
        )
    return found


def check_finite(found: Mapping[str, Representation], batch: Batch, of: str = "") -> None:
    """Check that the activations of layers are finite, except at padding; the error names the first sample."""
    if all_set([finite(each.values) for each in found.values()]):
        return
    for name, one in found.items():
        real = one.values if one.mask is None else torch.where(one.mask[..., None], one.values, 0)
        bad = ~torch.isfinite(real).flatten(1).all(1)
        if bool(bad.any()):
            raise ValueError(
                f"layer {name!r}{of} is NaN or infinite for {int(bad.sum())} samples of a batch of {len(batch.ids)}; "
                f"the first is {batch.ids[int(bad.nonzero()[0])]!r}"
            )
