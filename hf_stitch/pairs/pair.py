"""Two networks with pairs of layers: :class:`Pair`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.checks import check_comparable, layer_names, padded_alike
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
    """Outputs of one network for a batch."""

    inputs: Mapping[str, Any]
    activations: Mapping[str, Representation]  # by layer
    output: Any  # of the whole network; None after a partial run


@dataclass(frozen=True)
class Outputs:
    """Outputs of both networks for a batch, each run once."""

    inputs: Mapping[str, Any]
    x: Mapping[str, Representation]
    y: Mapping[str, Representation]
    source: Any
    target: Any


@dataclass(frozen=True, eq=False)
class Pair:
    """Source and target networks to stitch, with pairs of layers, without samples.

    Attributes:
        source: The network of the front halves.
        target: The network of the back halves.
        pooling: The pooling of all stitches.
        task: Task of the stitched models; ``None`` without a head.
        cells: The pairs of layers.
        align: How positions of texts correspond.
        kept: Cache of objects derived from the pair, for example copies of its halves.

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
        """Load two networks and check that they fit; with ``own``, maps also use the embeddings of target tokens."""
        a, b = load_on(source, run.processes.device), load_on(target, run.processes.device)
        if align == "prefix":
            a = PrefixAdapter(a, b, own=own)
        elif own:
            raise ValueError("own=True requires align='prefix'")
        check_comparable(a, b, pooling)
        if pooling == "none" and align == "tokens" and a.interface.modality == "text":
            a, b = padded_alike(a, b)
        task_name = scored_task(b, task) if scored else task_of(b, task)
        if task_named(task_name).per_token and pooling in POOLED:
            raise ValueError(
                f"pooling={pooling!r} keeps one token per text, but {task_name} has predictions for each token; use "
                "pooling='none'"
            )
        return cls(a, b, pooling, task_name, align=align)

    def at(self, cells: Iterable[Cell]) -> Self:
        """Return the pair with these pairs of layers, verified as cuts."""
        distinct = tuple(dict.fromkeys(cells))
        for la, lb in distinct:
            self.source.cut(la)  # raises an error if the layer is not a cut
            self.target.cut(lb)
        return replace(self, cells=distinct)

    def over(self, layers_a: Iterable[str] | None, layers_b: Iterable[str] | None) -> Self:
        """Return the pair with all pairs of the layers of both networks, by default all cuts."""
        names_a = layer_names("layers_a", self.source.layers if layers_a is None else layers_a)
        names_b = layer_names("layers_b", self.target.layers if layers_b is None else layers_b)
        return self.at((a, b) for b in names_b for a in names_a)

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
        """Pooling, alignment and task settings as JSON values for a recipe."""
        alignment = {} if self.align == "tokens" else {"align": self.align, "own": self.source.embedding_width > 0}
        return {"pooling": self.pooling, **alignment, **task_named(self.task).record}

    @property
    def hashes(self) -> dict[str, Any]:
        """Hashes of the weights of both networks."""
        return {name: getattr(self, name).pinned.weights_hash for name in ("source", "target")}

    def specs(self, cell: Cell) -> tuple[RepresentationSpec, RepresentationSpec]:
        """Return the specs at a pair of layers."""
        return self.source.spec(cell[0]), self.target.spec(cell[1])

    def identity(self, cell: Cell, means: Mapping[str, Tensor] | None = None) -> StitchingLayer:
        """Return the stitching layer between two layers with identity maps."""
        specs = self.specs(cell)
        maps = {part: IdentityStitch(*widths) for part, widths in part_widths(*specs, self.pooling).items()}
        return StitchingLayer(*specs, self.pooling, maps["body"], maps.get("prefix"), means)

    def run(self, batch: Batch, twin: Batch | None = None, *, complete: bool = False) -> Outputs:
        """Run both networks once on a batch, to their deepest layers or, if ``complete``, to their ends.

        Args:
            batch: Raw samples.
            twin: Samples of the target, if they differ.
            complete: Whether to run the networks to their ends. A source that reads the tokens of the target does not
                have an output.
        """
        ran_source, twin = self.run_source(batch, complete=complete), twin or batch
        inputs = task_named(self.task).inputs(self.target, twin.samples)
        ran_target = run_to(self.target, inputs, self.layers_b, twin, "target", complete=complete)
        return Outputs(
            ran_target.inputs, ran_source.activations, ran_target.activations, ran_source.output, ran_target.output
        )

    def run_source(self, batch: Batch, *, complete: bool) -> Ran:
        """Run the source once on a batch, as :meth:`run` does."""
        inputs = task_named(self.task).inputs(self.source, batch.samples)
        return run_to(self.source, inputs, self.layers_a, batch, "source", complete=complete)

    def finish(self, mapped: Representation, layer: str, like: Representation) -> Any:
        """Run the target from a layer on mapped activations, with the dtype and context of ``like``."""
        context = like.context if self.target.interface.beside else {}
        return self.target.decode(mapped.replace(values=mapped.values.to(like.values.dtype), context=context), layer)

    @torch.no_grad()
    def rehearse(self, train: PairedSamples, test: Samples) -> None:
        """Run one sample through both networks and every cut, so that errors occur before all data are read."""
        ((_, batch, twin),) = train.take(1).batches(Run(1, progress=False), "rehearsing")
        outputs = self.run(batch, twin, complete=self.task is not None)
        for side, adapter, representations in (("source", self.source, outputs.x), ("target", self.target, outputs.y)):
            for layer, representation in representations.items():
                if representation.spec != adapter.spec(layer):
                    raise ValueError(
                        f"layer {layer!r} of the {side} outputs {representation.spec} for these samples, expected "
                        f"{adapter.spec(layer)}; load the network with example_inputs of the size of the samples, or "
                        "resize the samples"
                    )
        for la, lb in self.cells:
            paired_rows(outputs.x[la], outputs.y[lb], self.pooling)
        for lb in self.layers_b:
            la = next(a for a, b in self.cells if b == lb)
            mapped = self.identity((la, lb))(outputs.x[la])
            try:
                self.finish(mapped, lb, outputs.y[lb])
            except Exception as error:
                raise ValueError(
                    f"the target cannot run from layer {lb!r} on activations with pooling={self.pooling!r} "
                    f"({type(error).__name__}: {error}); use another pooling or layer"
                ) from error
        if self.task is not None:
            task_named(self.task).check_labels(test, logits_of(outputs.target).shape[-1])


def run_to(
    adapter: Adapter, inputs: Mapping[str, Any], layers: Collection[str], batch: Batch, side: str, *, complete: bool
) -> Ran:
    """Run a network once on the inputs of a batch, to the deepest layer or to its end, and check the activations.

    A source that reads the tokens of the target does not run to an end. Layers need not be cuts.
    """
    activations: dict[str, Representation] = {}

    def keep(name: str, representation: Representation) -> None:
        activations[name] = representation.replace(values=representation.values.clone())

    output = adapter.run_with_callback(inputs, layers, keep, complete=complete and adapter.completes)
    check_finite(activations, batch, f" of the {side}")
    return Ran(inputs, activations, output)


def scored_task(target: Adapter, task: str | None) -> str:
    """Return the task of stitched models that are scored by logits; raise an error for a target without a task."""
    name = task_of(target, task)
    if name is None:
        raise ValueError(
            f"scoring requires a task of the target, got {name!r}; pass task=, for example task='image-classification'"
        )
    return name


def check_finite(activations: Mapping[str, Representation], batch: Batch, of: str = "") -> None:
    """Raise an error if activations of layers are not finite, except at padding; it names the first sample."""
    if all_set([finite(representation.values) for representation in activations.values()]):
        return
    for name, x in activations.items():
        values = x.values if x.mask is None else torch.where(x.mask[..., None], x.values, 0)
        bad = ~torch.isfinite(values).flatten(1).all(1)
        if bool(bad.any()):
            raise ValueError(
                f"layer {name!r}{of} is NaN or infinite for {int(bad.sum())} samples of a batch of {len(batch.ids)}; "
                f"the first is {batch.ids[int(bad.nonzero()[0])]!r}"
            )
