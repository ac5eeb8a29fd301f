"""Compare two networks module by module: the null, the first difference, its cause, and further differences."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters.cutting.forwards import is_compiled
from hf_stitch.running import Run
from hf_stitch_versions.inputs import Vocabulary, differences, feeds, for_second, longer_feeds, unpadded
from hf_stitch_versions.ports.port import PortError
from hf_stitch_versions.recording import Event, Key, dtype_of
from hf_stitch_versions.sameness import evidence
from hf_stitch_versions.sameness.causes import Replay, Score, changed, search
from hf_stitch_versions.sameness.distances import Deviation, Deviations, join
from hf_stitch_versions.sameness.pairing import Trace, pair, trace
from hf_stitch_versions.sameness.proposals import OF_LENGTHS, Change, proposals, transposed
from hf_stitch_versions.sameness.result import FINDINGS, Cause, Finding, Module, Sameness
from hf_stitch_versions.sources import EXACT, Compiled, Feed, Network, Recorded, Source

COMPILED = "compiled code"
"""Name of a whole compiled network in place of the name of a module."""

INEXACT = 16
"""Minimum null of a network that does not run in float64, in units of the rounding error of its dtype."""

NEAR = 8
"""Number of modules after the last one that agrees, among which a fault in the weights of a port is searched."""

OTHER_WIDTHS = 0.5
"""Share of pairs with different shapes above which two networks are not versions of one network."""


@dataclass(frozen=True)
class Null:
    """Effect of rounding alone on a call."""

    output: float
    input: float


@dataclass(frozen=True)
class Look:
    """Network to compare with a reference."""

    source: Source
    calls: Mapping[Key, Key]  # calls of the reference -> of the source
    put: Collection[Key] = ()  # calls of the reference with outputs that replace outputs of the source

    def compare(
        self, events: Mapping[Key, Event], feed: Feed, deviations: Deviations, with_inputs: Collection[Key]
    ) -> None:  # fmt: skip
        """Run on a batch, and add the deviation of every call from the recorded events of the reference."""
        own_call = {theirs: own_key for own_key, theirs in self.calls.items()}

        def see(event: Event) -> None:
            if (own_key := own_call.get(event.key)) is not None and own_key in events:
                reference = events[own_key]
                if self.source.inferred:  # without masks
                    reference = replace(reference, masks={})
                deviations.setdefault(own_key, Deviation()).add(reference, event, feed.mask)

        theirs = {self.calls[key] for key in with_inputs if key in self.calls}
        self.source.watch(feed, see, theirs, {self.calls[key]: events[key].outputs for key in self.put})


class Comparison:
    """Two networks, their inputs, and the passes that compare them.

    Args:
        a: The first network.
        b: The second network, or the source of its events.
        samples: Raw samples; ``None`` for random inputs.
        tolerance: Multiple of the null above which a module differs.
        run: Options and processes of the run.
        code: The second network compiled by ``torch.compile``, because adapters unwrap it.
    """

    def __init__(
        self, a: Adapter, b: Adapter | Source, samples: Samples | None, tolerance: float, run: Run,
        code: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.a, self.b, self.code = a, b if isinstance(b, Adapter) else None, code
        self.samples, self.tolerance, self.run = samples, tolerance, run
        self.padded = isinstance(b, Adapter) or b.facts.padded
        self.random = None if samples is not None else list(feeds(a, self.b, None, run))
        self.inputs = list[str]()
        self.vocabulary = None if self.b is None else Vocabulary(a, self.b)
        self.first = next(iter(self.feeds()))
        self.reference = _widest(Network(a), self.first)
        self.source: Source = _widest(Network(b, second=True), self.first) if isinstance(b, Adapter) else b
        self.bound = ""
        if self.random is not None and not isinstance(self.source, Recorded):
            longer, self.bound = longer_feeds(a, self.b, (self.reference, self.source), run.seed)
            self.random += longer
        self.units()

    def units(self) -> None:
        """Choose the dtype that defines the null, and the minimum null."""
        dtypes = dtype_of(self.a.model), dtype_of(self.b.model) if self.b is not None else self.source.dtype
        self.coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self.rounding = float(torch.finfo(self.coarse).eps) if dtypes[0] != dtypes[1] else 0.0
        exact = self.reference.dtype == EXACT
        if dtypes[0] == dtypes[1] and exact and self.source.dtype == EXACT:
            self.coarse = torch.float32  # both run in float64: the null of a coarse dtype would hide differences
        self.floor = float(torch.finfo(self.coarse).eps) * (1 if exact else INEXACT)

    def given(self) -> Iterable[Feed]:
        """Return the batches of this process, padded if both networks accept it; random batches are created once."""
        batches = feeds(self.a, self.b, self.samples, self.run) if self.random is None else self.random
        return batches if self.padded else (single for feed in batches for single in unpadded(feed))

    def feeds(self) -> Iterable[Feed]:
        """Return the batches of this process, with the first network's inputs for both if their own inputs differ."""
        for feed in self.given():
            if self.b is not None and (feed.own is None or (reasons := differences(feed, self.a, self.b))):
                self.inputs = self.inputs or ([] if feed.own is None else reasons)
                feed = replace(feed, own=for_second(feed.arguments, self.a, self.b))
            if self.vocabulary is not None and feed.own is not None:
                self.vocabulary.check(feed.ids, feed.own)
            yield feed

    def answer(self) -> Sameness:
        """Find and repair differences until the networks agree."""
        self.pair()
        rounded, unrepaired = self.look()
        if any(math.isinf(deviation.output) for deviation in unrepaired.values()) and self.as_they_are():
            rounded, unrepaired = self.look()
        if not any(self.run.processes.gather(self.finite)):
            self.bound = "modules before the outputs, because the outputs of the first network are not finite"
        self.check(unrepaired)
        self.null, deviations = self.nulls(rounded), unrepaired
        if self.differing(unrepaired, ()):
            self.null = self.nulls(rounded, self.rounded_second())
        findings, repaired = list[Finding](), list[Key]()
        differing = self.differing(unrepaired, ())
        inside = [key for key in differing if self.hidden(key, differing)] if self.sure else []
        quantized = self.quantized() if differing else ""
        limit = 0 if quantized and self.source.inferred else FINDINGS
        causes, explained, searched = list[Cause](), False, 0
        first: Key | None = self.end
        unseen = list(self.source.facts.unseen)
        try:
            while (first := self.next(deviations, repaired)) is not None and len(findings) < limit:
                if self.source.inferred and first != self.end and self.wrong(first, deviations, repaired):
                    self.unpair([first])
                    continue
                key = self.cause(first, repaired)
                same_cause = self.alike(key, repaired)
                repaired += [key, *same_cause]
                before, deviations = deviations, self.repaired(repaired)
                self.add(findings, self.finding(key, first, before, deviations), [key, *same_cause])
                if self.source.facts.runtime and not searched:  # a port: a cause that explains all ends the search
                    searched = len(self.calls)
                    causes, explained = self.causes(with_weights=bool(findings[0].weights))
                    if explained:
                        break
            if findings and not quantized and len(self.calls) != searched and not explained:
                causes, explained = self.causes(with_weights=bool(findings[0].weights))
        except PortError as error:  # the differences found so far are known
            unseen.append(f"the search ended early: {error}")
        rows = [
            Module(key[0], self.calls[key][0], key[1], self.kinds[key], unrepaired[key].output, self.null[key].output,
                   deviations[key].output)
            for key in self.order if key in unrepaired and key in self.calls
        ]  # fmt: skip
        if first is None and self.b is not None and (self.code is not None or is_compiled(self.b.model)):
            rows.append(self.compiled(self.b))
            findings += self.compiled_finding(rows[-1])
        return Sameness(
            str(self.a.reference), str(self.b.reference if self.b else self.source), self.tolerance,
            _name(self.reference.dtype), _name(self.coarse), self.n,
            None if self.samples is None else self.samples.fingerprint,
            tuple(next(filter(None, self.run.processes.gather(self.inputs)), [])),
            tuple(self.settings()), tuple(findings), (first is None or explained) and self.whole, tuple(rows),
            self.missing, self.extra, tuple(dict.fromkeys(key[0] for key in inside)), self.by_names, self.bound,
            quantized, tuple(causes), explained, self.source.facts.runtime, tuple(unseen),
        )  # fmt: skip

    # -- passes --------------------------------------------------------------------------------------------------------
    def pair(self) -> None:
        """Run both networks on the first batch, and pair their calls."""
        sides = list[list[Trace]]()
        self.parents, self.kinds = dict[Key, Key | None](), dict[Key, str]()
        for source in (self.reference, self.source):
            traces = list[Trace]()

            def see(event: Event, traces: list[Trace] = traces, source: Source = source) -> None:
                traces.append(trace(event, source.modules.get(event.key[0]), self.first.mask))
                if source is self.reference:
                    self.parents[event.key], self.kinds[event.key] = event.parent, event.kind

            source.watch(self.first, see)
            sides.append(traces)
        self.order = [call.key for call in sides[0]]
        self.shows_modules = len(sides[1]) > 1
        pairing = self.run.processes.agree(pair(*sides, sized=self.source.inferred))
        self.calls, self.by_names = pairing.calls, pairing.by_names
        self.end = next((key for key in reversed(self.order) if key in self.calls), self.order[-1])
        self.missing, self.extra = pairing.missing, pairing.extra

    def look(self, with_inputs: Collection[Key] = (), put: Collection[Key] = ()) -> list[Deviations]:
        """Return the deviations of the rounded first network and of the second network from the first."""
        own_calls = {key: key for key in self.calls}
        looks = [Look(self.reference.computing(self.coarse), own_calls), Look(self.source, self.calls, put)]
        return self.measure(self.reference, looks, with_inputs)

    def repaired(self, put: Collection[Key]) -> Deviations:
        """Return the deviations of the second network with the outputs of some calls repaired."""
        return self.measure(self.reference, [Look(self.source, self.calls, put)])[0]

    def rounded_second(self, with_inputs: Collection[Key] = ()) -> Deviations:
        """Return the effect of rounding in the second network, by the calls of the first; nothing for a file."""
        if not isinstance(self.source, Network) or self.source.dtype != EXACT:
            return {}
        look = Look(self.source.computing(self.coarse), {key: key for key in self.calls.values()})
        (deviations,) = self.measure(self.source, [look], [self.calls[key] for key in with_inputs])
        return {key: deviations[call_b] for key, call_b in self.calls.items() if call_b in deviations}

    def nulls(self, *rounded: Deviations) -> dict[Key, Null]:
        """Return the null of each call: the largest finite effect of rounding, with a minimum."""
        equal = Deviation()

        def largest(key: Key, side: str) -> float:
            effects = (getattr(deviations.get(key, equal), side) for deviations in rounded)
            return max([self.floor, *filter(math.isfinite, effects)])

        return {key: Null(largest(key, "output"), largest(key, "input")) for key in self.calls}

    def as_they_are(self) -> bool:
        """Switch networks back to their own dtype if float64 changes which values are finite; return whether any was.

        Attention with its softmax in float32 turns a mask with the smallest float64 number into NaN.
        """
        switched = False
        for side, keys in (("reference", self.calls.keys()), ("source", self.calls.values())):
            network = getattr(self, side)
            if isinstance(network, Network) and network.computed is not None:
                unconverted = replace(network, computed=None)
                (deviations,) = self.measure(unconverted, [Look(network, {key: key for key in keys})])
                if any(math.isinf(deviation.output) for deviation in deviations.values()):
                    setattr(self, side, unconverted)
                    switched = True
        self.units()
        return switched

    def measure(
        self, reference: Source, looks: Sequence[Look], with_inputs: Collection[Key] = (),
        batches: Iterable[Feed] | None = None,
    ) -> list[Deviations]:  # fmt: skip
        """Return the deviations of each source from a reference, which runs once for all sources."""
        sums: list[Deviations] = [{} for _ in looks]
        self.finite = False  # whether an output of the reference is finite
        calls = {key for look in looks for key in look.calls}
        n = 0
        for feed in self.feeds() if batches is None else batches:
            events = dict[Key, Event]()

            def record(event: Event, events: dict[Key, Event] = events) -> None:
                if event.key == self.order[-1]:
                    self.finite |= not event.outputs or any(
                        bool(value.isfinite().any()) for value in event.outputs.values()
                    )
                if event.key in calls:
                    copies = {place: value.clone() for place, value in event.outputs.items()}
                    events[event.key] = replace(event, outputs=copies)

            reference.watch(feed, record, with_inputs)
            for look, deviations in zip(looks, sums, strict=True):
                look.compare(events, feed, deviations, with_inputs)
            n += len(feed.ids)
        if batches is None:
            self.n = n if self.samples is None else sum(self.run.processes.gather(n))
        return [join(self.run.processes.gather(deviations)) for deviations in sums]

    # -- looking -------------------------------------------------------------------------------------------------------
    def check(self, deviations: Deviations) -> None:
        """Raise an error for networks without pairs, or with mostly different shapes."""
        unnamed = isinstance(self.source, Recorded) and not self.by_names
        has_outputs_only = len(self.order) <= 2 or not self.shows_modules
        inner = not has_outputs_only and not self.source.facts.runtime  # the outputs of a port suffice
        if unnamed or (inner and not set(deviations) - {self.order[-1]}):
            raise ValueError(
                "expected versions of one network, but none of their modules could be paired by names or values. "
                "Compare them with hf_stitch.compare"
            )
        shapes = sum(math.isinf(deviation.output) for deviation in deviations.values())
        if shapes > OTHER_WIDTHS * len(deviations) and self.by_names and self.b and _differ_in_width(self.a, self.b):
            raise ValueError(
                f"expected versions of one network, but {shapes} of {len(deviations)} outputs differ in shape: the "
                "networks have different widths. Compare them with hf_stitch.compare"
            )

    def differing(self, deviations: Deviations, repaired: Collection[Key]) -> list[Key]:
        """Return the calls with different outputs, in order, outside of repaired calls."""
        keys = [
            key
            for key in self.order
            if key in deviations and key in self.calls and not any(self.inside(key, call) for call in repaired)
        ]
        return [key for key in keys if deviations[key].output > self.tolerance * self.null[key].output]

    def next(self, deviations: Deviations, repaired: Collection[Key]) -> Key | None:
        """Return the first difference that is not hidden.

        Uncertain pairs are dropped if the outputs of the networks agree.
        """
        differing = self.differing(deviations, repaired)
        if self.end not in differing and not self.sure:
            self.unpair(differing)
        return next((key for key in differing if key in self.calls and not self.hidden(key, differing)), None)

    @property
    def whole(self) -> bool:
        """Whether the outputs are paired, or need not be: modules are paired by names, or layers were recorded."""
        return self.by_names or self.order[-1] in self.calls or isinstance(self.source, Recorded)

    @property
    def sure(self) -> bool:
        """Whether pairs are certain: by names, in a network with known modules."""
        return self.by_names and not self.source.inferred

    def hidden(self, key: Key, far: Collection[Key]) -> bool:
        """Return whether layers were fused: the parent module and the network do not show the difference.

        A second layer inside the parent then compensates for it: it has changed as well, or is missing.
        """
        parent = self.parents.get(key)
        if not self.sure or parent is None or parent not in self.calls or parent in far or self.end in far:
            return False
        siblings = [inner for inner in self.order if inner != parent and self.inside(inner, parent)]
        return sum(inner not in self.calls or self.changed(inner) for inner in siblings) > 1

    def changed(self, key: Key) -> bool:
        """Return whether a leaf module has a different class or different weights."""
        module_a, module_b = self.reference.modules.get(key[0]), self.source.modules.get(self.calls[key][0])
        if module_a is None or module_b is None or any(True for _ in module_a.children()):
            return False
        return type(module_a) is not type(module_b) or bool(evidence.weights(module_a, module_b, self.rounding))

    def wrong(self, key: Key, before: Deviations, repaired: Collection[Key]) -> bool:
        """Return whether the pair of a call is wrong, from the effect of repairing it.

        It is wrong if no other call receives the difference, the call cannot be repaired, calls that agreed now
        differ, or the difference of the network's outputs doubles.
        """
        if not self.arrives(key):
            return True
        after = self.repaired([*repaired, key])

        def ratio(deviations: Deviations, key: Key) -> float:
            return deviations[key].output / (self.tolerance * self.null[key].output)

        broken = any(ratio(before, call) <= 1 and ratio(after, call) > 2 for call in after)
        return broken or ratio(after, key) > 1 or ratio(after, self.end) > 2 * ratio(before, self.end)

    def arrives(self, key: Key) -> bool:
        """Return whether the calls that receive an output in the first network receive different values in the second.

        It is true if no paired call receives the output, or if the second network does not show its inputs.
        """
        events = dict[Key, Event]()
        later = [call for call in self.order[self.order.index(key) + 1 :] if call in self.calls]

        def record(event: Event) -> None:
            events[event.key] = replace(event, outputs={place: v.clone() for place, v in event.outputs.items()})

        self.reference.watch(self.first, record, later)
        outputs = events[key].outputs.values()
        readers = [
            call for call in later
            if any(torch.equal(x, y) for x in events[call].inputs.values() for y in outputs if x.shape == y.shape)
        ]  # fmt: skip
        (found,) = self.measure(self.reference, [Look(self.source, self.calls)], readers)
        equal = [
            bool(found[call].inputs) and found[call].input <= self.tolerance * self.null[call].input
            for call in readers if call in found
        ]  # fmt: skip
        return not equal or not all(equal)

    def unpair(self, keys: Collection[Key]) -> None:
        """Drop wrong pairs."""
        self.calls = {key: call_b for key, call_b in self.calls.items() if key not in keys}
        self.missing += tuple(dict.fromkeys(key[0] for key in keys))

    def cause(self, seen: Key, repaired: Collection[Key]) -> Key:
        """Return the cause of a difference: the innermost call around the first differing output with equal inputs.

        Masks count as inputs. Unequal masks that the cause passes to one of its modules are reported.
        """
        around = [seen]
        while (parent := self.parents.get(around[-1])) is not None:
            around.append(parent)
        around = [key for key in around if key in self.calls]
        rounded, second = self.look(around, repaired)
        null = self.nulls(rounded)
        if second[seen].input > self.tolerance * null[seen].input:
            null = self.nulls(rounded, self.rounded_second(around))
        for key, inner in zip(around, [None, *around], strict=False):
            self.received, self.handed = second[key], second[inner or key]
            if self.received.input <= self.tolerance * null[key].input and not self.received.masks[0]:
                return key
        return around[-1]

    def inside(self, key: Key | None, outer: Key) -> bool:
        """Return whether a call equals a second call or was made inside of it."""
        while key is not None and key != outer:
            key = self.parents.get(key)
        return key is not None

    def facts(self, key: Key) -> tuple[list[str], list[str]]:
        """Return the weights and settings of a module that differ; nothing unless both modules are in memory."""
        module_a, module_b = self.reference.modules.get(key[0]), self.source.modules.get(self.calls[key][0])
        if module_a is not None and module_b is None:
            theirs = self.source.weights(self.calls[key][0])
            return evidence.unequal(dict(module_a.state_dict()), theirs, max(self.rounding, evidence.SAME)), []
        if module_a is None or module_b is None:
            return [], []
        return evidence.weights(module_a, module_b, self.rounding), evidence.attributes(module_a, module_b)

    def add(self, findings: list[Finding], finding: Finding, keys: Collection[Key]) -> None:
        """Add a finding at some calls, or merge it into a finding with the same class and settings."""

        def kind(candidate: Finding) -> tuple[str, Sequence[str], bool]:
            return candidate.kind, candidate.settings, bool(candidate.weights)

        first = next(
            (i for i, earlier in enumerate(findings) if finding.settings and kind(earlier) == kind(finding)), None
        )
        names = {key[0] for key in keys}
        if first is not None:
            names |= {findings[first].module, *findings[first].places}
        places = tuple(dict.fromkeys(key[0] for key in self.order if key[0] in names)) if len(names) > 1 else ()
        if first is None:
            findings.append(replace(finding, places=places))
        else:
            findings[first] = replace(findings[first], places=places, restored=finding.restored)

    def alike(self, key: Key, repaired: Collection[Key]) -> list[Key]:
        """Return further calls of the same class with the same difference, and different outputs for equal inputs."""
        weights, settings = self.facts(key)
        if not settings or not isinstance(self.source, Network):
            return []
        same_kind = [
            call for call in self.calls
            if self.kinds[call] == self.kinds[key] and not any(self.inside(call, one) for one in (key, *repaired))
        ]  # fmt: skip
        facts = {call[0]: self.facts(call) for call in same_kind}
        candidates = [
            call for call in same_kind
            if facts[call[0]][1] == settings and bool(facts[call[0]][0]) == bool(weights)
        ]  # fmt: skip
        if not candidates:
            return []
        look = Look(replace(self.source, own=True), self.calls, [*repaired, key, *candidates])
        (deviations,) = self.measure(self.reference, [look], candidates)
        return [
            call for call in candidates if call in deviations
            and deviations[call].output > self.tolerance * self.null[call].output
            and deviations[call].input <= self.tolerance * self.null[call].input
        ]  # fmt: skip

    def quantized(self) -> str:
        """Describe which network is quantized; nothing if both are quantized alike."""
        first, second = self.reference.quantized, self.source.quantized
        if first == second:
            return ""
        return f"The second network is quantized: {second}" if second else f"The first network is quantized: {first}"

    def causes(self, *, with_weights: bool) -> tuple[list[Cause], bool]:
        """Return changes of the first network with which it equals the second, and whether it does with all of them.

        For a second network in memory, only the values of its config are tried; if the first module that differs has
        other weights, also changes of weights.
        """
        port = self.source.facts.config
        in_memory = isinstance(self.source, Network)
        if in_memory:
            config: Any = getattr(self.b.model if self.b else None, "config", None)
            port = config.get_text_config().to_dict() if hasattr(config, "get_text_config") else {}
        changes = list(proposals(self.a.model, port, only_settings=in_memory))
        if with_weights:
            changes = [change for change in changes if change.modules is None]
        if not changes or isinstance(self.source, Recorded):
            return [], False
        replay = Replay(self.source, set(self.calls.values()))
        batches = list(self.feeds())
        if any(feed.mask is not None and not bool(feed.mask.all()) for feed in batches):
            alone = [single for feed in batches for single in unpadded(feed)]
            (found,) = self.measure(self.reference, [Look(replay, self.calls)], batches=alone)
            if not self.differing(found, ()):
                return [Cause("padding", "on texts without padding")], True
        for few in ([feed] for feed in (batches[0], *reversed(batches))):  # the last ones are the longest
            (found,) = self.measure(self.reference, [Look(replay, self.calls)], batches=few)
            if self.differing(found, ()):
                break
        differing = self.differing(found, ())
        agree = [place for place, key in enumerate(self.order) if key in found and key not in differing]
        near = [] if in_memory or not agree else self.order[agree[-1] + 1 :][:NEAR]
        changes += transposed(self.a.model, dict.fromkeys(key[0] for key in near if key not in self.calls))
        if few[0] is not batches[0]:  # equal on short texts
            changes = [change for change in changes if change.kind in OF_LENGTHS]

        def score(network: Adapter, everywhere: bool, left_out: Collection[str]) -> Score:
            reference = Network(network, computed=self.reference.computed)
            look = Look(replay, self.calls)
            (found,) = self.measure(reference, [look], batches=batches if everywhere else few)
            keys = [key for key in self.differing(found, ()) if key[0].rpartition(".")[2] not in left_out]
            first = next(iter(keys), None)
            if first is None:
                return Score(math.inf, 0.0)
            return Score(self.order.index(first), -found[first].output / self.null[first].output)

        made, explained = search(self.a, changes, score)
        return [Cause(change.kind, f"with {change.text}", self.origin(change, few)) for change in made], explained

    def origin(self, change: Change, batches: Sequence[Feed]) -> str:
        """Return the first module of the first network that a change of it affects, also if it has no pair."""
        if (network := changed(self.a, [change])) is None:  # it requires the changes before it
            return ""
        look = Look(Network(network, computed=self.reference.computed), {key: key for key in self.order})
        (found,) = self.measure(self.reference, [look], batches=batches)
        exact = torch.finfo(self.reference.dtype).eps ** 0.5  # a change has more effect than rounding in float64
        return next((key[0] for key in self.order if key in found and found[key].output > exact), "")

    # -- reports -------------------------------------------------------------------------------------------------------
    def settings(self) -> list[str]:
        """Return the settings that differ between the networks and their paired modules, with or without an effect."""
        pairs = dict.fromkeys((mine[0], theirs[0]) for mine, theirs in self.calls.items())
        modules = [(name, self.reference.modules.get(name), self.source.modules.get(name_b)) for name, name_b in pairs]
        return evidence.settings(self.a, self.b) + [
            f"{name}: {text}" if name else text
            for name, x, y in modules if x is not None and y is not None for text in evidence.values(x, y)
        ]  # fmt: skip

    def finding(self, key: Key, seen: Key, before: Deviations, after: Deviations) -> Finding:
        """Return the difference of a module, and whether its output from the first network restores the outputs."""
        name, name_b, end = key[0], self.calls[key][0], self.end
        in_memory = name in self.reference.modules and name_b in self.source.modules
        known = in_memory or bool(self.source.weights(name_b))
        weights, settings = self.facts(key)
        compared = [*["weights"] * known, *["input"] * bool(self.received.inputs)]
        unequal, positions = self.handed.masks
        restored: bool | None = False
        if key != end and end in after:
            was_different, is_different = (
                deviations[end].output > self.tolerance * self.null[end].output for deviations in (before, after)
            )
            restored = not is_different if was_different else None
        ratio = before[seen].output / self.null[seen].output
        return Finding(
            name, name_b, self.kinds[key], seen[0], ratio, tuple(compared), tuple(weights), tuple(settings),
            unequal / positions if positions else 0.0, restored,
        )  # fmt: skip

    def compiled(self, b: Adapter) -> Module:
        """Return the difference of the output of compiled code; earlier passes ran its modules uncompiled."""
        end = self.end
        code = Compiled(Network(b, second=True), b.model if self.code is None else self.code)
        looks = [Look(self.reference.computing(code.dtype), {end: end}), Look(code, {end: ("", 0)})]
        null, difference = (deviations[end].output for deviations in self.measure(self.reference, looks))
        return Module(
            COMPILED, COMPILED, 0, "torch.compile", difference, max(null, torch.finfo(code.dtype).eps), difference
        )

    def compiled_finding(self, row: Module) -> list[Finding]:
        """Return a finding if the output of compiled code differs from its modules."""
        if row.ratio <= self.tolerance:
            return []
        code = ("the modules agree, but the code from torch.compile differs",)
        return [Finding(COMPILED, COMPILED, row.kind, COMPILED, row.ratio, ("weights", "input"), (), code, 0.0, False)]


def _widest(network: Network, feed: Feed) -> Network:
    """Return a network in float64 if it runs in this dtype; else unchanged."""
    exact = network.computing(EXACT)
    if exact.runs(feed):
        return exact
    try:
        network.watch(feed, lambda event: None)
    except Exception as error:
        first_problem = (
            f"first network does not run on a batch of {len(feed.ids)} (pass data; for single samples, batch_size=1)"
        )
        problem = "second network does not run on the inputs of the first" if network.second else first_problem
        raise ValueError(f"the {problem}: {type(error).__name__}: {error}") from error
    return network


def _differ_in_width(a: Adapter, b: Adapter) -> bool:
    """Return whether most weights of the same name have different shapes."""
    weights_a, weights_b = (dict(adapter.model.named_parameters()) for adapter in (a, b))
    common = [name for name in weights_a if name in weights_b]
    return 2 * sum(weights_a[name].shape != weights_b[name].shape for name in common) > len(common)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
