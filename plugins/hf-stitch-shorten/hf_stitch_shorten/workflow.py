"""Remove blocks of a network without training: :func:`shorten`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import torch
from torch import nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.data import Data, PairedSamples
from hf_stitch.data.overlap import ContentSketch
from hf_stitch.options import Within, checked
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.scoring.measured import as_score, scores_of
from hf_stitch.tasks.base import Answers, Task
from hf_stitch_shorten.forms import check_form
from hf_stitch_shorten.maps import LATER, Change, add_to
from hf_stitch_shorten.plain import CannotBeRebuiltError, computes_otherwise, copied, dropped, renamed, without
from hf_stitch_shorten.result import AGREEMENTS, DROPPED, FULL, SHORTENED, Candidate, Shortened, Size, runs_of
from hf_stitch_shorten.search import Interval, Search, task_of
from hf_stitch_shorten.stacks import RELU

SHARE = 0.25
"""Share of the data that tests, without ``test_data``; and of the rest, share that chooses the blocks."""

RESAMPLES = 1000
"""Number of bootstrap resamples of the test samples."""

FEWEST = 8
"""Least number of samples to fit on, to choose by and to test on."""

DIFFERENT = {False: 1e-5, True: 3e-2}
"""Greatest difference, over the largest output, between the plain network and the mapped one; in half precision."""

NEW_TOKENS = 32
"""Number of tokens that are generated to measure the speed."""


@checked
def shorten(
    model: str | nn.Module | Adapter, data: Data, *,
    remove: int | float | Literal["auto"] = 2,
    matcher: Literal["refit", "refit_later", "replaceme", "drop"] = "refit",
    keep: Iterable[str] = (),
    scattered: bool = True,
    max_loss: Annotated[float, Within(0, 1)] | None = None,
    test_data: Data | None = None,
    metric: str | None = None,
    **options: Unpack[RunOptions],
) -> Shortened:  # fmt: skip
    """Remove blocks of a network without training, and make up for them in the weights of the blocks before them.

    The last projection of the block before removed ones is fitted, by ridge regression towards its current weights, so
    that the stream of activations behind it becomes that behind the removed blocks. All intervals are fitted in one
    pass over the data, and scored on other samples with the outputs of the whole network, with the refit and without
    it; the best is removed. Several intervals that do not touch are tried, too: one block after the other. The result
    is an ordinary network with fewer blocks, and is tested on samples that chose nothing, beside the same blocks only
    dropped.

    Args:
        model: The network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples like those that the network will read; labels are not needed. Maps are fitted on more than
            half of them.
        remove: Number of blocks, their share of all blocks, or ``auto``: as many neighbouring ones as ``max_loss``
            allows, at most half of the longest stack.
        matcher: ``refit``; ``refit_later``, which also refits the projections of the blocks behind removed ones, one
            after the other, towards their streams in the whole network, in a pass for each; ``replaceme``, a
            least-squares map of the output of the projection, folded into it (ReplaceMe, arXiv 2505.02819); or
            ``drop``, no map.
        keep: Names of blocks that stay.
        scattered: Whether several intervals are tried, which takes a search for each block.
        max_loss: Greatest share of outputs that may differ from those of the whole network. Without it, nothing is
            accepted or refused.
        test_data: Samples to test on. Default: a quarter of the data.
        metric: Figure that chooses the blocks. Default: the Kullback-Leibler divergence from the outputs of the whole
            network, without classes or tokens the agreement, or what comes first.
        **options: Options of the run: ``batch_size``, ``seed``, ``progress`` and ``accelerator``, as in
            :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The shorter network with its verdict: ``found.model`` is an adapter, ``found.save_pretrained(folder)`` saves an
        ordinary folder.

    Raises:
        ValueError: If the network has no stack of blocks, its form has to be made plain first, blocks cannot be mapped
            or left out of its config, more blocks are to be removed than there are, or samples are too few.

    Example:
        >>> import torch, transformers, hf_stitch
        >>> config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        ...     intermediate_size=32, image_size=8, patch_size=4, num_labels=3)
        >>> vit = hf_stitch.load(transformers.ViTForImageClassification(config).eval())
        >>> found = shorten(vit, torch.rand(80, 3, 8, 8), remove=1, progress=False)
        >>> len(found.removed), found.model.model.config.num_hidden_layers
        (1, 3)
    """
    if remove == "auto" and max_loss is None:
        raise ValueError("remove='auto' removes as many blocks as max_loss allows: pass max_loss, e.g. 0.05")
    with Run.of(shorten, options, takes=WITHOUT_STATE) as run:
        network = load_on(model, run.processes.device)
        check_form(network)
        task = task_of(network)
        if metric is not None and metric not in task.figures:
            raise ValueError(f"metric {metric!r} is not measured; figures of this network: {', '.join(task.figures)}")
        samples, other = (
            None if each is None else _numbered(task, Samples.of(each), network) for each in (data, test_data)
        )
        assert samples is not None
        rest, test = (samples, other) if other is not None else samples.split(SHARE, run.seed)
        fit, choose = rest.split(SHARE, run.seed)
        for part, what in ((fit, "to fit on"), (choose, "to choose by"), (test, "to test on")):
            if len(part) < FEWEST:
                raise ValueError(f"{len(part)} samples {what} are too few: pass {FEWEST} or more for each purpose")
        job = _Job(network, fit, choose, tuple(keep), matcher, metric, None if max_loss is None else 1 - max_loss, run)
        return job.told(job.shortened(remove, scattered), test)


@dataclass(frozen=True)
class _State:
    """A network on the way: shorter than the original, or it."""

    network: Adapter
    names: Mapping[str, str]  # block -> its name in the original
    removed: tuple[str, ...] = ()  # names in the original
    error: float = 0.0


@dataclass
class _Job:
    """What all steps share, and what they found."""

    network: Adapter
    fit: Samples
    choose: Samples
    keep: tuple[str, ...]
    matcher: str
    metric: str | None
    bound: float | None
    run: Run
    candidates: list[Candidate] = field(default_factory=list)
    cost: float = 0.0
    figure: str = ""  # that chooses
    rows: int = 0
    inputs: int = 0  # of the widest projection

    # -- searching ----------------------------------------------------------------------------------------------------
    def shortened(self, remove: int | float | Literal["auto"], scattered: bool) -> _State:
        """Return the best network without some blocks."""
        search = self._search(self.network)
        self.task = search.task
        if self.network.library in ("transformers", "timm"):
            self.network.blueprint()  # an error before any pass, if there is none
        own = {block: block for stack in search.stacks for block in stack.blocks}
        if unknown := [name for name in self.keep if name not in own]:
            raise ValueError(f"keep names {unknown[0]!r}, which is no block; blocks: {', '.join(own)}")
        count = self._count(remove, search, scattered)
        free = len(own) - len({*self.keep} | {stack.blocks[0] for stack in search.stacks})
        if remove != "auto" and count > free:
            raise ValueError(f"{count} blocks are to be removed, and keep leaves {free}")
        start = _State(self.network, own)
        values, changes = self._scored(search, search.intervals(count))
        first = self._ranked(values)
        if remove == "auto":
            first = self._allowed(first, values)
            count = max(len(each.blocks) for each in first)
        whole = [each for each in first if len(each.blocks) == count]
        found = [self._built(start, search, whole, changes)] if whole else []
        if scattered and count > 1 and remove != "auto":
            state = self._built(start, search, [each for each in first if len(each.blocks) == 1], changes)
            for _ in range(count - 1):
                search = self._search(state.network, state.names)
                values, changes = self._scored(search, search.intervals(1))
                state = self._built(state, search, self._ranked(values), changes)
            found.append(state)
        if not found:
            raise ValueError(f"no {count} blocks that follow each other can be removed: keep fewer, or scattered=True")
        best = found[0] if len(found) == 1 else self._best(found)
        if self.matcher == LATER:
            best = self._caught_up(best)
        chosen = runs_of(best.removed)
        self.candidates = [
            Candidate(each.before, each.blocks, row[self.figure], each.blocks in chosen)
            for each, row in self._map.items()
        ]
        return best

    def _search(self, network: Adapter, names: Mapping[str, str] | None = None) -> Search:
        """Return the search of the intervals of a network."""
        keep = {each for each, name in (names or {}).items() if name in self.keep} or set(self.keep)
        search = Search(network, self.network, keep, self.matcher, self.run)
        if not search.stacks:
            raise ValueError(
                f"{type(network.model).__name__} has no stack of blocks: its cuts are "
                f"{', '.join(network.layers) or 'none'}, and blocks are elements of a list that follow each other"
            )
        if self.matcher != "drop":
            search.find_joints(self.fit)
        return search

    def _count(self, remove: int | float | Literal["auto"], search: Search, scattered: bool) -> int:
        """Return how many blocks to remove, or for ``auto`` how many to try."""
        total = sum(len(stack.blocks) for stack in search.stacks)
        longest = max(len(stack.blocks) - 1 for stack in search.stacks)
        if remove == "auto":
            return max(longest // 2, 1)
        count = remove if isinstance(remove, int) else round(remove * total)
        most = total - len(search.stacks) if scattered else longest
        if not 1 <= count <= most:
            sizes = ", ".join(f"{len(each.blocks)} in {each.name}" for each in search.stacks)
            raise ValueError(
                f"remove={remove!r} are {count} of {total} blocks ({sizes}): 1 to {most} can be removed, because the "
                "first block of a stack stays, and without scattered=True only blocks that follow each other go"
            )
        return count

    def _scored(
        self, search: Search, intervals: Sequence[Interval]
    ) -> tuple[dict[Interval, dict[str, float]], dict[Interval, Change | None]]:  # fmt: skip
        """Fit and score intervals; those of the whole network choose the figure."""
        if not intervals:
            raise ValueError(self._unmapped(search))
        changes = search.changes(self.fit, intervals)
        given = {each: changes.get(each) for each in intervals}
        values, kept, figure = search.scored(self.choose, given, self.figure or self.metric)
        self.cost += search.cost
        if not self.figure:
            self.rows, self._map, self.figure = search.rows, values, figure
            self.inputs = max((change.weight.shape[1] for change in changes.values()), default=0)
        return values, kept

    def _unmapped(self, search: Search) -> str:
        """Tell why no interval can be removed."""
        name = type(search.network.model).__name__
        if set(self.keep) >= {block for stack in search.stacks for block in stack.blocks[1:]}:
            return f"keep names all blocks of {name} that could be removed"
        layers = search.stacks[0].blocks
        return (
            f"no block of {name} adds the output of a projection to its stream as it is: a norm, experts or another "
            "function follows. "
            "Use matcher='drop', or keep two networks joined by a map of the whole stream: hf_stitch.stitch(model, "
            f"model, data, source_layer={layers[0]!r}, target_layer={layers[-1]!r})"
        )

    def _ranked(self, values: Mapping[Interval, Mapping[str, float]]) -> list[Interval]:
        """Return intervals, the best one first."""
        sign = -1 if self.task.figures.get(self.figure, True) else 1
        return sorted(values, key=lambda each: sign * values[each][self.figure])

    def _allowed(
        self, ranked: Sequence[Interval], values: Mapping[Interval, Mapping[str, float]]
    ) -> list[Interval]:  # fmt: skip
        """Return the intervals without which the agreement meets the bound."""
        assert self.bound is not None
        row = next(iter(values.values()))
        name = next((each for each in AGREEMENTS if each in row), next(iter(row)))
        found = [each for each in ranked if values[each][name] >= self.bound]
        if not found:
            best = max(row[name] for row in values.values())
            raise ValueError(
                f"no block can be removed: {name.replace('_', ' ')} with the whole network is at most {best:.3f}, and "
                f"max_loss asks for {self.bound:g}"
            )
        return found

    # -- building -----------------------------------------------------------------------------------------------------
    def _built(
        self, state: _State, search: Search, ranked: Sequence[Interval], changes: Mapping[Interval, Change | None]
    ) -> _State:  # fmt: skip
        """Return the plain network without the best interval whose plain network computes the same."""
        why = ""
        for interval in ranked:
            try:
                return self._without(state, search, interval, changes.get(interval))
            except CannotBeRebuiltError as error:
                why = why or str(error)
        raise CannotBeRebuiltError(why)

    def _without(self, state: _State, search: Search, interval: Interval, change: Change | None) -> _State:
        """Return the plain network without an interval."""
        coarse = next(state.network.model.parameters()).dtype in (torch.float16, torch.bfloat16)
        error = float("inf")
        for short in without(state.network, interval.stack.name, interval.places):
            if change is not None:
                before, end = search.joints[interval.before], search.joints[interval.end]
                projection: Any = short.model.get_submodule(before.projection)
                if projection.weight.numel() != change.weight.numel():  # blocks of other kinds are in other places
                    continue
                add_to(projection, change.weight, change.bias)
                if before.tail not in (None, RELU):
                    weights = state.network.model.get_submodule(str(end.tail)).state_dict()
                    short.model.get_submodule(str(before.tail)).load_state_dict(weights)
            error = search.difference(short, self.choose, interval, change)
            if error <= DIFFERENT[coarse]:
                break
        else:
            raise computes_otherwise(state.network, f"without {interval.blocks[0]} (outputs differ by {error:.2g})")
        rename = renamed({interval.stack.name: interval.places})
        names = {new: name for block, name in state.names.items() if (new := rename(block)) is not None}
        gone = (*state.removed, *(state.names[block] for block in interval.blocks))
        order = list(self.network.layers)
        return _State(short, names, tuple(sorted(gone, key=order.index)), max(error, state.error))

    def _caught_up(self, state: _State) -> _State:
        """Refit the projections of the blocks behind the first removed one, in place, if outputs come closer by it."""
        short = copied(state.network)
        search = self._search(short, state.names)
        first = {stack: min(places) for stack, places in self._places(state.removed).items()}
        for block, original in state.names.items():
            stack, _, place = original.rpartition(".")
            if block in search.joints and int(place) >= first.get(stack, int(place) + 1) - 1:
                end = int(place)  # removed blocks that follow are made up for by this one
                while f"{stack}.{end + 1}" in state.removed:
                    end += 1
                change = search.catch_up(self.fit, block, f"{stack}.{end}")
                add_to(short.model.get_submodule(search.joints[block].projection), change.weight, change.bias)
        self.cost += search.cost
        return self._best([replace(state, network=short), state])

    # -- judging ------------------------------------------------------------------------------------------------------
    def _best(self, states: Sequence[_State]) -> _State:
        """Return the state whose outputs on the samples to choose by are best."""
        networks = {str(place): each.network for place, each in enumerate(states)}
        drawn = self._drawn(networks, self.choose, 0)
        sign = 1 if self.task.figures.get(self.figure, True) else -1
        return max(states, key=lambda each: sign * drawn[str(states.index(each))][self.figure][0])

    def _drawn(self, networks: Mapping[str, Adapter], samples: Samples, resamples: int) -> dict[str, dict[str, Any]]:
        """Return the figures of networks against the whole one, on all samples and on resamples."""
        measured: dict[str, list[Answers]] = {}
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, "testing"):
                inputs = self.task.inputs(self.network, batch.samples)
                outputs = {name: each.forward(inputs) for name, each in networks.items()}
                side = batch, inputs
                found = self.task.measure({"target": self.network.forward(inputs), **outputs}, side, side)
                for name, row in found.items():
                    measured.setdefault(name, []).append(row)
                self.cost += (1 + len(networks)) * len(batch.samples)
        gathered = self.run.processes.gather(measured)
        parts = {name: [row for part in gathered for row in part[name]] for name in gathered[0]}
        return self.task.drawn(self.task.joined(parts, samples), resamples=resamples, seed=self.run.seed)

    def told(self, state: _State, test: Samples) -> Shortened:
        """Test a shorter network, beside the same blocks dropped, and tell."""
        networks = {SHORTENED: state.network}
        if self.matcher != "drop":
            networks[DROPPED] = dropped(state.network, self.network, self._places(state.removed))
        drawn = self._drawn(networks, test, RESAMPLES)
        rows = {**{name: drawn[name] for name in networks}, **({FULL: drawn["target"]} if "target" in drawn else {})}
        gain = None
        if self.matcher != "drop":
            sign = 1 if self.task.figures.get(self.figure, True) else -1
            gain = as_score(sign * (drawn[SHORTENED][self.figure] - drawn[DROPPED][self.figure]))
        shared = ContentSketch.of(self.fit, self.choose).share(test)
        result = Shortened(
            str(self.network.reference), state.removed, self.matcher, self.task.name, len(test), test.fingerprint,
            self.rows, self.figure, scores_of(rows), gain, self.bound, tuple(self.candidates),
            self._sizes({FULL: self.network, SHORTENED: state.network}, test), state.error,
            self.cost / (len(self.fit) + len(self.choose)), (), state.network,
        )  # fmt: skip
        return replace(result, notes=tuple(self._notes(result, shared or 0.0)))

    def _places(self, removed: Sequence[str]) -> dict[str, list[int]]:
        """Return the places of blocks in their lists."""
        found: dict[str, list[int]] = {}
        for name in removed:
            stack, _, place = name.rpartition(".")
            found.setdefault(stack, []).append(int(place))
        return found

    def _notes(self, result: Shortened, shared: float) -> list[str]:
        """Return what to know."""
        notes = []
        if result.gain is not None and self.rows < 2 * self.inputs:
            notes.append(
                f"{self.rows} rows are fewer than twice the {self.inputs} inputs of a projection: more data help more "
                "than another interval"
            )
        if result.gain is not None and result.gain.value == result.gain.low == result.gain.high == 0:
            notes.append("no map was better than none on samples that fitted nothing: the blocks are only dropped")
        elif result.gain is not None and not result.gain.low > 0:
            notes.append(
                "the map does not help on the test samples: it is not needed, or they come from elsewhere than the "
                "data it was fitted on"
            )
        if shared:
            notes.append(f"{shared:.0%} of the test samples are among those that fitted or chose: scores are too good")
        own, whole = result.scores[SHORTENED], result.scores.get(FULL, {})
        if "accuracy" in whole and own["accuracy"].value > whole["accuracy"].value:
            notes.append("the accuracy rises although predictions change: it says little about what was lost")
        if self.task.name == "feature-extraction":
            notes.append("outputs are other ones now: if they are kept, as in an index, compute all of them again")
        return notes

    def _sizes(self, networks: Mapping[str, Adapter], test: Samples) -> dict[str, Size]:
        """Measure size and speed."""
        batch = next(iter(test.batches(min(16, len(test)))))
        found = {}
        for name, each in networks.items():
            inputs = self.task.inputs(each, batch.samples)
            with torch.no_grad():
                forward = min(_seconds(partial(each.forward, inputs), each) for _ in range(3))
            found[name] = Size(sum(p.numel() for p in each.model.parameters()), forward, _generation(each, inputs))
        return found


def _numbered(task: Task, samples: Samples, network: Adapter) -> Samples:
    """Return samples whose labels are numbered as the classes of a network, and warn of others."""
    config = getattr(network.model, "config", None)
    numbered = task.numbered(samples, config)
    task.warn_of_labels(numbered, config)
    return numbered


def _seconds(work: Callable[[], Any], network: Adapter) -> float:
    """Return how long something takes."""
    begin = time.perf_counter()
    work()
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)
    return time.perf_counter() - begin


def _generation(network: Adapter, inputs: Mapping[str, Any]) -> float | None:
    """Return how many tokens a causal language model generates in a second."""
    model: Any = network.model
    if network.task != "text-generation" or not hasattr(model, "generate"):
        return None
    ids = inputs["input_ids"][:1, :4]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    try:
        return NEW_TOKENS / min(_seconds(partial(model.generate, ids, **options), network) for _ in range(2))
    except Exception:  # the code of the network can raise anything, and some generate only in its own library
        return None
