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
from hf_stitch.tasks.heads import WITHOUT_HEAD
from hf_stitch.tasks.vectors import SMALLEST_POOL
from hf_stitch_shorten.forms import check_form
from hf_stitch_shorten.maps import LATER, Change, add_to
from hf_stitch_shorten.plain import CannotBeRebuiltError, copied, dropped, rebuild_error, renamed, without
from hf_stitch_shorten.result import AGREEMENTS, DROPPED, FULL, SHORTENED, Candidate, Shortened, Size, runs_of
from hf_stitch_shorten.search import Interval, Search, task_of
from hf_stitch_shorten.stacks import RELU

SHARE = 0.25
"""Share of test samples without ``test_data``, and share of the remaining samples that choose the blocks."""

RESAMPLES = 1000
"""Number of bootstrap resamples of the test samples."""

FEWEST = 8
"""Minimum number of samples for fitting, choosing and testing, each."""

TOLERANCE, HALF_TOLERANCE = 1e-5, 3e-2
"""Maximum difference between rebuilt and mapped network, over the largest output: in float32, in half precision."""

NEW_TOKENS = 32
"""Number of generated tokens for measuring the speed."""


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
    """Remove blocks of a network without training, and compensate for them in the weights of the blocks before them.

    The last projection before the removed blocks is refitted by ridge regression towards its current weights, so that
    the stream of activations after it approximates the stream after the removed blocks. All intervals are fitted in one
    pass over the data. They are scored on held-out samples against the outputs of the whole network, with and without
    the refit, and the best interval is removed. Sets of several intervals are also tried, one block at a time. The
    result is an ordinary network with fewer blocks. It is tested on samples not used for fitting or choosing, next to a
    baseline with the same blocks only dropped.

    Args:
        model: The network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        data: Raw samples from the data that the network will run on; labels are not required. Maps are fitted on more
            than half of them.
        remove: Number of blocks, their share of all blocks, or ``auto``: as many consecutive blocks as ``max_loss``
            allows, at most half of the longest stack.
        matcher: ``refit``; ``refit_later``, which also refits the projections of the blocks after removed blocks, in
            sequence, towards their streams in the whole network, with one pass per block; ``replaceme``, a
            least-squares map of the output of the projection, folded into it (ReplaceMe, arXiv 2505.02819); or
            ``drop``, without a map.
        keep: Names of blocks that stay.
        scattered: Whether to try several intervals, with one search per block.
        max_loss: Maximum share of outputs that may differ from the outputs of the whole network. Without it,
            ``accepted`` is ``None``.
        test_data: Samples to test on. Default: a quarter of the data.
        metric: Metric that chooses the blocks. Default: the Kullback-Leibler divergence from the outputs of the whole
            network; without classes or tokens, the agreement or the first metric of the task.
        **options: Options of the run: ``batch_size``, ``seed``, ``progress`` and ``accelerator``, as in
            :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The shorter network with its verdict: ``shortened.model`` is an adapter, ``shortened.save_pretrained(folder)``
        saves an ordinary folder.

    Raises:
        ValueError: If the network lacks a stack of blocks, its weights are not plain numbers, blocks cannot be mapped
            or removed from its config, ``remove`` is larger than the number of blocks, or there are too few samples.

    Example:
        >>> import torch, transformers, hf_stitch
        >>> config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        ...     intermediate_size=32, image_size=8, patch_size=4, num_labels=3)
        >>> vit = hf_stitch.load(transformers.ViTForImageClassification(config).eval())
        >>> shortened = shorten(vit, torch.rand(80, 3, 8, 8), remove=1, progress=False)
        >>> len(shortened.removed), shortened.model.model.config.num_hidden_layers
        (1, 3)
    """
    if remove == "auto" and max_loss is None:
        raise ValueError("remove='auto' requires max_loss: pass max_loss, e.g. 0.05")
    with Run.of(shorten, options, takes=WITHOUT_STATE) as run:
        network = load_on(model, run.processes.device)
        check_form(network)
        task = task_of(network)
        if metric is not None and metric not in task.figures:
            raise ValueError(f"metric must be one of {', '.join(task.figures)}, got {metric!r}")
        samples, separate_test = (
            None if dataset is None else _numbered(task, Samples.of(dataset), network) for dataset in (data, test_data)
        )
        assert samples is not None
        rest, test = (samples, separate_test) if separate_test is not None else samples.split(SHARE, run.seed)
        fit, choose = rest.split(SHARE, run.seed)
        for split, purpose in ((fit, "to fit on"), (choose, "to choose by"), (test, "to test on")):
            least = SMALLEST_POOL if task.name == WITHOUT_HEAD and split is test else FEWEST
            if len(split) < least:
                raise ValueError(
                    f"{len(split)} samples {purpose} are too few, at least {least} are required: pass more data, of "
                    "which a quarter is for testing, or test_data"
                )
        job = _Job(network, fit, choose, tuple(keep), matcher, metric, None if max_loss is None else 1 - max_loss, run)
        return job.report(job.search(remove, scattered), test)


@dataclass(frozen=True)
class _State:
    """The original network, or an intermediate shorter network."""

    network: Adapter
    names: Mapping[str, str]  # block -> its name in the original
    removed: tuple[str, ...] = ()  # names in the original
    error: float = 0.0


@dataclass
class _Job:
    """Options and intermediate results of one call of :func:`shorten`."""

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
    figure: str = ""  # the metric that chooses
    rows: int = 0
    inputs: int = 0  # number of inputs of the widest projection

    # -- searching ----------------------------------------------------------------------------------------------------
    def search(self, remove: int | float | Literal["auto"], scattered: bool) -> _State:
        """Return the best network without some blocks."""
        search = self._search(self.network)
        self.task = search.task
        if self.network.library in ("transformers", "timm"):
            self.network.blueprint()  # only to raise an error now if the network cannot be rebuilt
        names = {block: block for stack in search.stacks for block in stack.blocks}
        if unknown := [name for name in self.keep if name not in names]:
            raise ValueError(f"keep contains {unknown[0]!r}, which is not a block; blocks: {', '.join(names)}")
        count = self._count(remove, search, scattered)
        removable = len(names) - len({*self.keep} | {stack.blocks[0] for stack in search.stacks})
        if remove != "auto" and count > removable:
            raise ValueError(f"{count} blocks are to be removed, but keep leaves only {removable}")
        original = _State(self.network, names)
        values, changes = self._scored(search, search.intervals(count))
        ranked = self._ranked(values)
        if remove == "auto":
            ranked = self._allowed(ranked, values)
            count = max(len(interval.blocks) for interval in ranked)
        longest = [interval for interval in ranked if len(interval.blocks) == count]
        states = [self._rebuild_best(original, search, longest, changes)] if longest else []
        if scattered and count > 1 and remove != "auto":
            single_blocks = [interval for interval in ranked if len(interval.blocks) == 1]
            state = self._rebuild_best(original, search, single_blocks, changes)
            for _ in range(count - 1):
                search = self._search(state.network, state.names)
                values, changes = self._scored(search, search.intervals(1))
                state = self._rebuild_best(state, search, self._ranked(values), changes)
            states.append(state)
        if not states:
            raise ValueError(f"{count} consecutive blocks cannot be removed: keep fewer blocks, or pass scattered=True")
        best = states[0] if len(states) == 1 else self._best(states)
        if self.matcher == LATER:
            best = self._refit_later(best)
        removed_runs = runs_of(best.removed)
        self.candidates = [
            Candidate(interval.before, interval.blocks, row[self.figure], interval.blocks in removed_runs)
            for interval, row in self._map.items()
        ]
        return best

    def _search(self, network: Adapter, names: Mapping[str, str] | None = None) -> Search:
        """Return the search of the intervals of a network."""
        keep = {block for block, name in (names or {}).items() if name in self.keep} or set(self.keep)
        search = Search(network, self.network, keep, self.matcher, self.run)
        if not search.stacks:
            raise ValueError(
                f"{type(network.model).__name__} does not contain a stack of blocks (consecutive cuts in a list of "
                f"modules): its cuts are {', '.join(network.layers) or 'none'}"
            )
        if self.matcher != "drop":
            search.find_joints(self.fit)
        return search

    def _count(self, remove: int | float | Literal["auto"], search: Search, scattered: bool) -> int:
        """Return the number of blocks to remove or, for ``auto``, to try."""
        total = sum(len(stack.blocks) for stack in search.stacks)
        longest = max(len(stack.blocks) - 1 for stack in search.stacks)
        if remove == "auto":
            return max(longest // 2, 1)
        count = remove if isinstance(remove, int) else round(remove * total)
        limit = total - len(search.stacks) if scattered else longest
        if not 1 <= count <= limit:
            sizes = ", ".join(f"{len(group.blocks)} in {group.name}" for group in search.stacks)
            raise ValueError(
                f"remove={remove!r} are {count} of {total} blocks ({sizes}): 1 to {limit} can be removed, because the "
                "first block of a stack stays, and removed blocks are consecutive without scattered=True"
            )
        return count

    def _scored(
        self, search: Search, intervals: Sequence[Interval]
    ) -> tuple[dict[Interval, dict[str, float]], dict[Interval, Change | None]]:  # fmt: skip
        """Fit and score intervals; the first call, for the whole network, chooses the metric."""
        if not intervals:
            raise ValueError(self._unmapped(search))
        changes = search.changes(self.fit, intervals)
        candidates = {interval: changes.get(interval) for interval in intervals}
        values, best_changes, figure = search.scored(self.choose, candidates, self.figure or self.metric)
        self.cost += search.cost
        if not self.figure:
            self.rows, self._map, self.figure = search.rows, values, figure
            self.inputs = max((change.weight.shape[1] for change in changes.values()), default=0)
        return values, best_changes

    def _unmapped(self, search: Search) -> str:
        """Explain why intervals cannot be removed."""
        name = type(search.network.model).__name__
        if set(self.keep) >= {block for stack in search.stacks for block in stack.blocks[1:]}:
            return f"keep contains all removable blocks of {name}"
        layers = search.stacks[0].blocks
        return (
            f"the blocks of {name} do not add the output of a projection directly to the stream: a norm, experts or "
            "another function follows. Use matcher='drop', or join two networks by a map of the whole stream: "
            f"hf_stitch.stitch(model, model, data, source_layer={layers[0]!r}, target_layer={layers[-1]!r})"
        )

    def _ranked(self, values: Mapping[Interval, Mapping[str, float]]) -> list[Interval]:
        """Return intervals, best first."""
        sign = -1 if self.task.figures.get(self.figure, True) else 1
        return sorted(values, key=lambda interval: sign * values[interval][self.figure])

    def _allowed(
        self, ranked: Sequence[Interval], values: Mapping[Interval, Mapping[str, float]]
    ) -> list[Interval]:  # fmt: skip
        """Return the intervals that can be removed with an agreement within the bound."""
        assert self.bound is not None
        row = next(iter(values.values()))
        name = next((interval for interval in AGREEMENTS if interval in row), next(iter(row)))
        allowed = [interval for interval in ranked if values[interval][name] >= self.bound]
        if not allowed:
            best = max(row[name] for row in values.values())
            raise ValueError(
                f"{name.replace('_', ' ')} with the whole network is at most {best:.3f} after removing a block, but "
                f"max_loss requires {self.bound:g}: increase max_loss"
            )
        return allowed

    # -- building -----------------------------------------------------------------------------------------------------
    def _rebuild_best(
        self, state: _State, search: Search, ranked: Sequence[Interval], changes: Mapping[Interval, Change | None]
    ) -> _State:  # fmt: skip
        """Return the rebuilt network without the best interval that can be rebuilt with the same outputs."""
        reason = ""
        for interval in ranked:
            try:
                return self._without(state, search, interval, changes.get(interval))
            except CannotBeRebuiltError as error:
                reason = reason or str(error)
        raise CannotBeRebuiltError(reason)

    def _without(self, state: _State, search: Search, interval: Interval, change: Change | None) -> _State:
        """Return the rebuilt network without an interval."""
        is_half = next(state.network.model.parameters()).dtype in (torch.float16, torch.bfloat16)
        error = float("inf")
        for short in without(state.network, interval.stack.name, interval.places):
            if change is not None:
                before, end = search.joints[interval.before], search.joints[interval.end]
                projection: Any = short.model.get_submodule(before.projection)
                if projection.weight.numel() != change.weight.numel():  # a different kind of block at this index
                    continue
                add_to(projection, change.weight, change.bias)
                if before.tail not in (None, RELU):
                    weights = state.network.model.get_submodule(str(end.tail)).state_dict()
                    short.model.get_submodule(str(before.tail)).load_state_dict(weights)
            error = search.difference(short, self.choose, interval, change)
            if error <= (HALF_TOLERANCE if is_half else TOLERANCE):
                break
        else:
            raise rebuild_error(state.network, f"without {interval.blocks[0]} (outputs differ by {error:.2g})")
        rename = renamed({interval.stack.name: interval.places})
        names = {new: name for block, name in state.names.items() if (new := rename(block)) is not None}
        removed = (*state.removed, *(state.names[block] for block in interval.blocks))
        order = list(self.network.layers)
        return _State(short, names, tuple(sorted(removed, key=order.index)), max(error, state.error))

    def _refit_later(self, state: _State) -> _State:
        """Refit the projections of the blocks after the first removed block, if this improves the outputs."""
        short = copied(state.network)
        search = self._search(short, state.names)
        first_removed = {stack: min(places) for stack, places in self._places(state.removed).items()}
        for block, original in state.names.items():
            stack, _, index = original.rpartition(".")
            if block in search.joints and int(index) >= first_removed.get(stack, int(index) + 1) - 1:
                end = int(index)  # this block compensates for the removed blocks after it
                while f"{stack}.{end + 1}" in state.removed:
                    end += 1
                change = search.catch_up(self.fit, block, f"{stack}.{end}")
                add_to(short.model.get_submodule(search.joints[block].projection), change.weight, change.bias)
        self.cost += search.cost
        return self._best([replace(state, network=short), state])

    # -- judging ------------------------------------------------------------------------------------------------------
    def _best(self, states: Sequence[_State]) -> _State:
        """Return the state with the best outputs on the samples for choosing."""
        networks = {str(index): state.network for index, state in enumerate(states)}
        metrics = self._drawn(networks, self.choose, 0)
        sign = 1 if self.task.figures.get(self.figure, True) else -1
        return max(states, key=lambda state: sign * metrics[str(states.index(state))][self.figure][0])

    def _drawn(self, networks: Mapping[str, Adapter], samples: Samples, resamples: int) -> dict[str, dict[str, Any]]:
        """Return the metrics of networks against the whole network, on all samples and on resamples."""
        answers_by_process: dict[str, list[Answers]] = {}
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, "testing"):
                inputs = self.task.inputs(self.network, batch.samples)
                outputs = {name: network.forward(inputs) for name, network in networks.items()}
                side = batch, inputs
                rows = self.task.measure({"target": self.network.forward(inputs), **outputs}, side, side)
                for name, row in rows.items():
                    answers_by_process.setdefault(name, []).append(row)
                self.cost += (1 + len(networks)) * len(batch.samples)
        gathered = self.run.processes.gather(answers_by_process)
        answers = {name: [row for part in gathered for row in part[name]] for name in gathered[0]}
        return self.task.drawn(self.task.joined(answers, samples), resamples=resamples, seed=self.run.seed)

    def report(self, state: _State, test: Samples) -> Shortened:
        """Test a shorter network, next to the same blocks only dropped, and return the result."""
        networks = {SHORTENED: state.network}
        if self.matcher != "drop":
            networks[DROPPED] = dropped(state.network, self.network, self._places(state.removed))
        metrics = self._drawn(networks, test, RESAMPLES)
        rows = {
            **{name: metrics[name] for name in networks},
            **({FULL: metrics["target"]} if "target" in metrics else {}),
        }
        gain = None
        if self.matcher != "drop":
            sign = 1 if self.task.figures.get(self.figure, True) else -1
            gain = as_score(sign * (metrics[SHORTENED][self.figure] - metrics[DROPPED][self.figure]))
        overlap = ContentSketch.of(self.fit, self.choose).share(test)
        result = Shortened(
            str(self.network.reference), state.removed, self.matcher, self.task.name, len(test), test.fingerprint,
            self.rows, self.figure, scores_of(rows), gain, self.bound, tuple(self.candidates),
            self._sizes({FULL: self.network, SHORTENED: state.network}, test), state.error,
            self.cost / (len(self.fit) + len(self.choose)), (), state.network,
        )  # fmt: skip
        return replace(result, notes=tuple(self._notes(result, overlap or 0.0)))

    def _places(self, removed: Sequence[str]) -> dict[str, list[int]]:
        """Return the indices of blocks in their lists."""
        places: dict[str, list[int]] = {}
        for name in removed:
            stack, _, place = name.rpartition(".")
            places.setdefault(stack, []).append(int(place))
        return places

    def _notes(self, result: Shortened, overlap: float) -> list[str]:
        """Return remarks on the result."""
        notes = []
        if result.gain is not None and self.rows < 2 * self.inputs:
            notes.append(
                f"{self.rows} rows are fewer than twice the {self.inputs} inputs of a projection: pass more data "
                "before trying a different interval"
            )
        if result.gain is not None and result.gain.value == result.gain.low == result.gain.high == 0:
            notes.append("maps did not help on held-out samples, so the blocks are only dropped")
        elif result.gain is not None and not result.gain.low > 0:
            notes.append(
                "the map does not help on the test samples: it is not required, or their distribution differs from "
                "the data used for fitting"
            )
        if overlap:
            notes.append(
                f"{overlap:.0%} of the test samples were also used for fitting or choosing: scores are too optimistic"
            )
        short, whole = result.scores[SHORTENED], result.scores.get(FULL, {})
        if "accuracy" in whole and short["accuracy"].value > whole["accuracy"].value:
            notes.append("the accuracy rises although predictions change: it is not a measure of the loss")
        if self.task.name == WITHOUT_HEAD:
            notes.append("outputs have changed: recompute all stored outputs, such as an index")
        return notes

    def _sizes(self, networks: Mapping[str, Adapter], test: Samples) -> dict[str, Size]:
        """Measure size and speed."""
        batch = next(iter(test.batches(min(16, len(test)))))
        sizes = {}
        for name, network in networks.items():
            inputs = self.task.inputs(network, batch.samples)
            with torch.no_grad():
                forward = min(_seconds(partial(network.forward, inputs), network) for _ in range(3))
            sizes[name] = Size(
                sum(p.numel() for p in network.model.parameters()), forward, _generation(network, inputs)
            )
        return sizes


def _numbered(task: Task, samples: Samples, network: Adapter) -> Samples:
    """Return samples with labels numbered as the classes of a network; warn about unknown labels."""
    config = getattr(network.model, "config", None)
    numbered = task.numbered(samples, config)
    task.warn_of_labels(numbered, config)
    return numbered


def _seconds(work: Callable[[], Any], network: Adapter) -> float:
    """Return the seconds of a job."""
    start = time.perf_counter()
    work()
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)
    return time.perf_counter() - start


def _generation(network: Adapter, inputs: Mapping[str, Any]) -> float | None:
    """Return the number of tokens that a causal language model generates per second."""
    model: Any = network.model
    if network.task != "text-generation" or not hasattr(model, "generate"):
        return None
    ids = inputs["input_ids"][:1, :4]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    try:
        return NEW_TOKENS / min(_seconds(partial(model.generate, ids, **options), network) for _ in range(2))
    except Exception:  # the network can raise anything, and some generate only in their own library
        return None
