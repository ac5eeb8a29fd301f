"""Whether two networks are the same: :func:`same`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from hf_stitch import Activations, Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.data import Data
from hf_stitch.options import Positive, checked
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch_versions import evidence
from hf_stitch_versions.distances import Deviation, Deviations, join
from hf_stitch_versions.inputs import differences, feeds, for_second
from hf_stitch_versions.pairing import Pairing, Trace, pair, trace
from hf_stitch_versions.recording import Event, Key, dtype_of
from hf_stitch_versions.result import Finding, Module, Sameness
from hf_stitch_versions.sources import EXACT, Feed, Network, Recorded, Source

BATCH = 8
"""Samples per forward: the values of all modules are in memory at the same time."""

FINDINGS = 8
"""Most findings that are looked for, one after the other."""

INEXACT = 16
"""Multiple of the rounding of its dtype that is the least null of a network that does not run in float64."""

OTHER_WIDTHS = 0.5
"""Share of pairs of other shapes from which on two networks are not versions of one."""


@checked
def same(
    a: str | nn.Module | Adapter, b: str | Path | nn.Module | Adapter | Activations, data: Data | None = None, *,
    tolerance: Positive = 4.0, **options: Unpack[RunOptions],
) -> Sameness:  # fmt: skip
    """Tell whether two networks are the same, and where they first differ.

    The first network, computed in float64, is the reference. What rounding does to each of its modules in its own dtype
    (that of the second network if this is coarser) is the null. The first module of the second network that differs by
    more than ``tolerance`` times its null is looked at: if its inputs differ, too, it is not the cause, but what called
    it. Then its output is replaced by that of the reference, and the next difference is looked for.

    Args:
        a: The first network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The second network; or a file of an exported one (``….onnx``), or recorded activations of layers that have
            the names of the first network's (:class:`hf_stitch.Activations`, or a file of them).
        data: Raw samples; some tens suffice. Default: random inputs within the bounds of the first network, of several
            lengths, padded on both sides.
        tolerance: Multiple of the null from which on a module differs.
        **options: Options of the run: ``batch_size`` (here 8), ``seed`` (of random inputs), ``progress`` and
            ``accelerator``, as in :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The answer in a sentence, the modules that compute something else, and a table of all modules.

    Raises:
        ValueError: If the networks have other widths (then use :func:`hf_stitch.compare`), the second one does not run
            on the inputs of the first, recorded activations are of other samples or of no layer of the first network.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import LayerNorm, Linear, Sequential
        >>> net = Sequential(Linear(4, 8), LayerNorm(8), Linear(8, 2))
        >>> port = Sequential(Linear(4, 8), LayerNorm(8, eps=1e-3), Linear(8, 2))
        >>> _ = port.load_state_dict(net.state_dict())
        >>> a, b = (hf_stitch.load(each, example_inputs=torch.randn(2, 4)) for each in (net, port))
        >>> found = same(a, b, torch.randn(20, 4), progress=False)
        >>> found.is_same, found.findings[0].module, found.findings[0].settings
        (False, '1', ('eps 1e-05 against 0.001',))
        >>> same(a, a).is_same
        True
    """
    options.setdefault("batch_size", BATCH)
    with Run.of(same, options, takes=WITHOUT_STATE) as run:
        first = load_on(a, run.processes.device)
        other = _source(b, run)
        samples = None if data is None else Samples.of(data)
        return _Comparison(first, other, samples, tolerance, run).answer()


def _source(b: Any, run: Run) -> Adapter | Source:
    """Return the second network, or what reads its file."""
    place = Path(b) if isinstance(b, (str, Path)) else None
    if place is not None and place.suffix == ".onnx":
        from hf_stitch_versions.exports import Onnx

        return Onnx(place)
    if place is not None and place.suffix in (".npz", ".safetensors"):
        return Recorded(Activations.load(place))
    if isinstance(b, Activations):
        return Recorded(b)
    return load_on(str(b) if isinstance(b, Path) else b, run.processes.device)


class _Comparison:
    """Two networks, what they read, and the passes that compare them."""

    def __init__(self, a: Adapter, b: Adapter | Source, samples: Samples | None, tolerance: float, run: Run) -> None:
        self.a, self.b = a, b if isinstance(b, Adapter) else None
        self.samples, self.tolerance, self.run = samples, tolerance, run
        self.first = next(iter(self.feeds()))
        self.inputs = differences(self.first, a, self.b) if self.b is not None else []
        self.reference = _widest(Network(a), self.first)
        self.source: Source = _widest(Network(b, second=True), self.first) if isinstance(b, Adapter) else b
        self.dtypes = dtype_of(a.model), dtype_of(b.model) if isinstance(b, Adapter) else self.source.dtype
        coarse = max(self.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self.rounding = float(torch.finfo(coarse).eps) if self.dtypes[0] != self.dtypes[1] else 0.0
        if self.dtypes[0] == self.dtypes[1] and self.source.dtype == self.reference.dtype == EXACT:
            coarse = torch.float32  # nothing but float64 computed: the null of a coarse dtype would hide differences
        self.rounded = Network(a, computed=coarse if coarse != self.dtypes[0] else None)
        self.coarse = coarse
        self.floor = float(torch.finfo(coarse).eps) * (1 if self.reference.dtype == EXACT else INEXACT)

    def feeds(self) -> Iterable[Feed]:
        """Return the batches of this process, whose arguments the second network takes by its own names."""
        for feed in feeds(self.a, self.b, self.samples, self.run):
            own, b = feed.own, self.b
            if b is not None and (own is None or differences(feed, self.a, b)):
                feed = replace(feed, own=for_second(feed.arguments, self.a, b))
            yield feed

    def answer(self) -> Sameness:
        """Compare, find, and repair what was found until nothing else differs."""
        calls = self.calls = self.paired()
        own = {key: key for key in self.order}
        null = self.measure(self.rounded, own)
        found = first = self.measure(self.source, calls.calls)
        self.check(first)
        findings, repaired = list[Finding](), list[Key]()
        while (seen := self.differing(found, null, repaired)) is not None and len(findings) < FINDINGS:
            key = self.cause(seen, own, repaired)
            repaired.append(key)
            before, found = found, self.measure(self.source, calls.calls, put=repaired)
            findings.append(self.finding(key, seen, before, null, found))
        rows = [self.row(key, first, found, null) for key in self.order if key in first]
        return Sameness(
            str(self.a.reference), str(self.b.reference if self.b else self.source), self.tolerance,
            _name(self.reference.dtype), _name(self.coarse), self.n,
            None if self.samples is None else self.samples.fingerprint, tuple(self.inputs),
            tuple(evidence.settings(self.a, self.b)), tuple(findings), seen is None, tuple(rows), calls.missing,
            calls.extra, calls.by_names,
        )  # fmt: skip

    # -- passes --------------------------------------------------------------------------------------------------------
    def paired(self) -> Pairing:
        """Run both networks on the first batch, and pair their calls."""
        sides = list[list[Trace]]()
        self.parents = dict[Key, Key | None]()
        self.kinds = dict[Key, str]()
        for source in (self.reference, self.source):
            traces = list[Trace]()

            def see(event: Event, traces: list[Trace] = traces, source: Source = source) -> None:
                traces.append(trace(event, source.modules.get(event.key[0]), self.first.mask))
                if source is self.reference:
                    self.parents[event.key], self.kinds[event.key] = event.parent, event.kind

            source.watch(self.first, see)
            sides.append(traces)
        self.order = [each.key for each in sides[0]]
        return pair(*sides)

    def measure(
        self, source: Source, calls: Mapping[Key, Key], *, with_inputs: Collection[Key] = (), put: Collection[Key] = ()
    ) -> Deviations:
        """Return how much a network deviates from the reference at paired calls; outputs of some are put right."""
        back = {theirs: mine for mine, theirs in calls.items()}
        sums: Deviations = {}
        self.n = 0
        for feed in self.feeds():
            kept = dict[Key, Event]()

            def keep(event: Event, kept: dict[Key, Event] = kept) -> None:
                if event.key in calls:
                    copies = {place: value.clone() for place, value in event.outputs.items()}
                    kept[event.key] = replace(event, outputs=copies)

            self.reference.watch(feed, keep, with_inputs)

            def see(event: Event, kept: dict[Key, Event] = kept, feed: Feed = feed) -> None:
                if (mine := back.get(event.key)) in kept:
                    sums.setdefault(mine, Deviation()).add(kept[mine], event, feed.mask)

            theirs = {calls[key] for key in with_inputs if key in calls}
            source.watch(feed, see, theirs, {calls[key]: kept[key].outputs for key in put})
            self.n += len(feed.ids)
        self.n = sum(self.run.processes.gather(self.n))
        return join(self.run.processes.gather(sums))

    # -- looking -------------------------------------------------------------------------------------------------------
    def check(self, found: Deviations) -> None:
        """Refuse networks of which nothing, or mostly outputs of other shapes, can be paired."""
        if not found or (len(found) == 1 and len(self.order) > 2):
            raise ValueError(
                "no module of the first network has a partner in the second, neither by its name nor by its values: "
                "these are no versions of one network. Compare them with hf_stitch.compare"
            )
        shapes = sum(math.isinf(each.output) for each in found.values())
        if shapes > OTHER_WIDTHS * len(found) and self.calls.by_names and self.differ_in_width():
            raise ValueError(
                f"{shapes} of {len(found)} outputs have other shapes: the networks have other widths and are no "
                "versions of one network. Compare them with hf_stitch.compare"
            )

    def differ_in_width(self) -> bool:
        """Return whether most weights of the same name have other shapes."""
        mine, theirs = (dict(each.model.named_parameters()) for each in (self.a, self.b) if each is not None)
        common = [name for name in mine if name in theirs]
        return 2 * sum(mine[name].shape != theirs[name].shape for name in common) > len(common)

    def differing(self, found: Deviations, null: Deviations, repaired: Collection[Key]) -> Key | None:
        """Return the first call whose output differs, outside of what is repaired.

        Modules that were paired by their values count only if the outputs of the networks differ, too: a pair may be
        wrong.
        """
        end = self.order[-1]
        keys = [key for key in self.order if key in found and not any(self.inside(key, each) for each in repaired)]
        far = [key for key in keys if found[key].output > self.limit(null[key].output)]
        return far[0] if far and (self.calls.by_names or end in far) else None

    def cause(self, seen: Key, own: Mapping[Key, Key], repaired: Collection[Key]) -> Key:
        """Return the call that makes a difference: the innermost around its first sight whose inputs are equal."""
        around = [seen]
        while (parent := self.parents.get(around[-1])) is not None:
            around.append(parent)
        around = [key for key in around if key in self.calls.calls]
        found = self.measure(self.source, self.calls.calls, with_inputs=around, put=repaired)
        null = self.measure(self.rounded, own, with_inputs=around)
        self.evidence = found
        return next((key for key in around if found[key].input <= self.limit(null[key].input)), self.order[-1])

    def inside(self, key: Key | None, other: Key) -> bool:
        """Return whether a call is another, or was made inside of it."""
        while key is not None:
            if key == other:
                return True
            key = self.parents.get(key)
        return False

    def limit(self, null: float) -> float:
        """Return the largest difference that counts as rounding."""
        return self.tolerance * max(null, self.floor)

    # -- telling -------------------------------------------------------------------------------------------------------
    def finding(self, key: Key, seen: Key, before: Deviations, null: Deviations, after: Deviations) -> Finding:
        """Tell what differs in a module, and whether its output of the first network restores the outputs."""
        name, other = key[0], self.calls.calls[key][0]
        one, two = self.reference.modules.get(name), self.source.modules.get(other)
        weights, settings = list[str](), list[str]()
        if one is not None and two is not None:
            weights, settings = evidence.weights(one, two, self.rounding), evidence.attributes(one, two)
        differ, of = self.evidence[key].masks
        end = self.order[-1]
        restored: bool | None = False
        if key != end and end in after:
            far, near = (each[end].output > self.limit(null[end].output) for each in (before, after))
            restored = not near if far else None
        ratio = before[seen].output / max(null[seen].output, self.floor)
        return Finding(
            name, other, self.kinds[key], seen[0], ratio, tuple(weights), tuple(settings), differ / of if of else 0.0,
            restored,
        )  # fmt: skip

    def row(self, key: Key, first: Deviations, last: Deviations, null: Deviations) -> Module:
        """Return what a call adds to the table."""
        rounding = max(null[key].output, self.floor)
        other = self.calls.calls[key][0]
        return Module(key[0], other, key[1], self.kinds[key], first[key].output, rounding, last[key].output)


def _widest(network: Network, feed: Feed) -> Network:
    """Return a network in float64, if it runs so; else as it is."""
    exact = network.computing(EXACT)
    if exact.runs(feed):
        return exact
    if not network.runs(feed):
        network.watch(feed, lambda event: None)  # raises its error
    return network


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
