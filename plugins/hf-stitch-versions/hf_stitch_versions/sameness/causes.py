"""Name the cause of a difference: changes with which the first network equals the second.

A network in another runtime has no modules to compare. Instead, the first network is changed as ports often differ,
until its outputs equal the recorded outputs of the port.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hf_stitch import Adapter, load
from hf_stitch_versions.ports.port import PortError
from hf_stitch_versions.recording import Event, Key, Values
from hf_stitch_versions.sameness.proposals import Change
from hf_stitch_versions.sources import Facts, Feed, Source

MOST = 4
"""Maximum number of changes that are combined."""

BETTER, LIKELY = 0.5, 0.1
"""A change is tried further if it reduces the first difference to the first share, and reported at the second."""


@dataclass
class Replay(Source):
    """Values of a source that are computed once."""

    source: Source
    calls: Collection[Key]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    inferred: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.dtype, self.facts = self.source.dtype, Facts()
        self._events = dict[tuple[Any, ...], list[Event]]()

    def watch(
        self, feed: Feed, see: Callable[[Event], None], with_inputs: Collection[Key] = (),
        put: Mapping[Key, Values] | None = None,
    ) -> None:  # fmt: skip
        """Report the events of a batch again."""
        if feed.ids not in self._events:
            events = self._events[feed.ids] = []
            self.source.watch(feed, lambda event: events.append(event) if event.key in self.calls else None)
        for event in self._events[feed.ids]:
            see(event)


@dataclass(frozen=True, order=True)
class Score:
    """How far two networks agree: the place of the first different call, then its difference, negated."""

    place: float  # infinite if all calls agree
    closeness: float

    def gains(self, other: Score, share: float) -> bool:
        """Return whether the first difference comes later, or shrinks to a share."""
        return self.place > other.place or (self.place == other.place and self.closeness > share * other.closeness)


FAILED = Score(-1, -math.inf)
"""Score of a network that cannot be built, or does not run."""


def changed(adapter: Adapter, changes: Collection[Change]) -> Adapter | None:
    """Return a copy of a network with changes; ``None`` if its class does not support them."""
    model: Any = adapter.model
    config = copy.deepcopy(model.config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        for change in changes:
            if change.config is not None:
                change.config(config.get_text_config())
            if change.weights is not None:
                change.weights(state)
        with torch.random.fork_rng(devices=[]):
            built = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
        built.to(next(model.parameters()).dtype)
        for name, source in built.all_tied_weights_keys.items():  # one tensor would be loaded twice
            state[name] = state[source]
        if built.load_state_dict(state, strict=False).missing_keys:
            return None
        for change in changes:
            if change.modules is not None:
                change.modules(built)
        return load(built.to(adapter.device).eval(), processor=adapter.processor, example_inputs=dict(adapter.example))
    except Exception:  # a class can refuse a setting with any error
        return None


def search(
    adapter: Adapter, changes: Collection[Change], score: Callable[[Adapter, bool, Collection[str]], Score]
) -> tuple[list[Change], bool]:  # fmt: skip
    """Find changes with which a network equals a second network.

    Args:
        adapter: The network.
        changes: Possible changes.
        score: Returns how far a network agrees with the second network, on all samples or on a few, without modules of
            some last names.

    Returns:
        The changes, and whether the networks are the same with all of them. Otherwise, the changes up to the last one
        that moves the first difference to a later call, or reduces it much.

    Raises:
        PortError: If the process of the second network dies.
    """

    def tried(changes: Collection[Change], everywhere: bool = False, left_out: Collection[str] = ()) -> Score:
        network = changed(adapter, changes)
        left_out = {*left_out, *(name for change in changes for name in change.left_out)}
        try:
            return FAILED if network is None else score(network, everywhere, left_out)
        except PortError:
            raise
        except Exception:  # a changed network can fail in any way
            return FAILED

    best, found, sure = tried([]), list[Change](), 0
    if best == FAILED:  # the config does not describe the network
        return [], False
    while math.isfinite(best.place) and len(found) < MOST:
        scores = list[tuple[Score, int, Change]]()
        for number, change in enumerate(changes):
            score_of = tried([*found, change])
            if change.left_out and not score_of.gains(tried(found, left_out=change.left_out), BETTER):
                continue  # the call that is left out was the first difference
            scores.append((score_of, -number, change))
            if math.isinf(score_of.place):
                break
        if not scores or not max(scores, key=lambda each: each[:2])[0].gains(best, BETTER):
            break
        better, _, change = max(scores, key=lambda each: each[:2])
        found.append(change)
        sure = len(found) if better.gains(best, LIKELY) else sure
        best = better
    if found and math.isinf(tried(found, True).place):
        for change in list(found) if len(found) > 1 else []:
            rest = [kept for kept in found if kept is not change]
            found = rest if math.isinf(tried(rest, True).place) else found
        return found, True
    return found[:sure], False
