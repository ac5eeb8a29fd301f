"""Blocks removed without training: maps against each other on every interval, and how intervals are chosen.

Trained networks (:mod:`benchmarks.deep_networks`, two of :mod:`benchmarks.diff`, and a published ResNet-20) lose every
interval of one to four blocks.
What is left of their outputs is measured for the blocks dropped, for three published maps written anew from their
papers (ReplaceMe, LinearPatch, and least squares on the whole stream as in Ghosted Layers), and for the refit. The
first and the last fold into a plain checkpoint; the other two need a layer of their own.

``python -m benchmarks.shorten [table|choice|samples|cost] [NETWORK …]`` prints what is asked for, by default all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hf_stitch_shorten.search import Interval, Search, chosen_figure
from hf_stitch_shorten.stacks import run
from rich.console import Console
from rich.table import Table
from scipy.linalg import hadamard
from scipy.stats import binomtest
from torch import Tensor

import hf_stitch
from benchmarks.timing import machine
from hf_stitch import Adapter, Samples
from hf_stitch.running import Run

METHODS = ("drop", "linearpatch", "replaceme", "stream", "refit")
SHORTEN = "shorten"
"""What the verb does: the refit, or the blocks only dropped where that is better on samples that fitted nothing."""

LONGEST, RESAMPLES = 4, 1000
NETWORKS = ("llama", "gpt2", "small-gpt2", "bert", "sentences", "vit", "resnet20")
FITTED, TESTED = 600, 200
"""Samples to fit on, and to test on."""


@dataclass(frozen=True)
class Whole:
    """An affine map of the whole stream: (inputs, outputs), and (outputs,)."""

    matrix: Tensor
    bias: Tensor


@dataclass
class Streams:
    """Sums over rows of the streams behind blocks, as far as maps and criteria of whole streams need them."""

    count: int
    products: dict[tuple[str, str], Tensor]  # of streams with a column of ones
    sizes: dict[str, Tensor]  # of the rotated stream, by channel
    angles: dict[tuple[str, str], float]
    cosines: dict[tuple[str, str], float]


class Peers(Search):
    """A search that maps whole streams, too."""

    def _mapped(self, taps: Any, interval: Interval, change: Any) -> Any:
        if not isinstance(change, Whole):
            return super()._mapped(taps, interval, change)
        found = taps.outputs[interval.before]
        rows = found.values.movedim(1, -1) if found.layout == "bchw" else found.values
        made = (rows.double() @ change.matrix + change.bias).to(found.values.dtype)
        values = made.movedim(-1, 1) if found.layout == "bchw" else made
        return self.network.decode(taps.outputs[interval.end].replace(values=values), interval.end)

    def streams(self, samples: Samples, intervals: Sequence[Interval]) -> Streams:
        """Read the streams of all blocks in one pass."""
        blocks = [*dict.fromkeys(name for each in intervals for name in (each.before, *each.blocks))]
        pairs = {(each.before, each.end) for each in intervals} | {(name, name) for name in blocks}
        pairs |= {pair for each in intervals for pair in zip((each.before, *each.blocks), each.blocks, strict=False)}
        found = Streams(0, {}, {}, {}, {})
        for inputs, _ in self._batches(samples, "reading streams"):
            taps = run(self.network, inputs, {}, blocks, complete=False)
            rows = {name: _rows(taps.outputs[name]).double() for name in blocks}
            found.count += len(rows[blocks[0]])
            for name, values in rows.items():
                found.sizes[name] = found.sizes.get(name, 0) + (values @ rotation(values.shape[1])).abs().sum(0)
            for a, b in pairs:
                wide = [torch.nn.functional.pad(rows[name], (0, 1), value=1.0) for name in (a, b)]
                found.products[a, b] = found.products.get((a, b), 0) + wide[0].T @ wide[1]
                cosine = torch.nn.functional.cosine_similarity(rows[a], rows[b])
                found.cosines[a, b] = found.cosines.get((a, b), 0.0) + float(cosine.sum())
                angle = cosine.clamp(-1, 1).arccos() / torch.pi
                found.angles[a, b] = found.angles.get((a, b), 0.0) + float(angle.sum())
        return found


def _rows(found: Any) -> Tensor:
    """Return rows of real positions."""
    values = found.values.movedim(1, -1) if found.layout == "bchw" else found.values
    return values.flatten(0, -2) if found.mask is None else values[found.mask]


def rotation(width: int) -> Tensor:
    """Return a Hadamard matrix of norm 1; for widths that are no power of two, its product with a random rotation."""
    two = width & -width
    made = torch.from_numpy(hadamard(two)).double() / two**0.5
    if two == width:
        return made
    draw = torch.Generator().manual_seed(0)
    other, _ = torch.linalg.qr(torch.randn(width // two, width // two, generator=draw, dtype=torch.float64))
    return torch.kron(other.contiguous(), made.contiguous())


def linearpatch(streams: Streams, interval: Interval) -> Whole:
    """LinearPatch: in a Hadamard basis, each channel grows as its mean size does."""
    turn = rotation(len(streams.sizes[interval.end]))
    growth = streams.sizes[interval.end] / streams.sizes[interval.before]
    return Whole(turn @ torch.diag(growth) @ turn.T, torch.zeros(len(turn), dtype=torch.float64))


def least_squares(streams: Streams, interval: Interval) -> Whole:
    """Ghosted Layers: affine least squares from the stream before the interval to the one behind it."""
    own, cross = streams.products[interval.before, interval.before], streams.products[interval.before, interval.end]
    found = torch.linalg.pinv(own, rtol=1e-12, hermitian=True) @ cross[:, :-1]
    return Whole(found[:-1], found[-1])


CRITERIA = {
    "angular distance": lambda s, i: s.angles[i.before, i.end],
    "block influence": lambda s, i: sum(
        s.count - s.cosines[pair] for pair in zip((i.before, *i.blocks), i.blocks, strict=False)
    ),
    "linear CKA": lambda s, i: -cka(s, i),
}
"""What chooses intervals elsewhere; less is better."""


def cka(streams: Streams, interval: Interval) -> float:
    """Return the linear CKA of the streams on both sides."""

    def cross(a: str, b: str) -> float:
        product = streams.products[a, b]
        means = product[-1, :-1], product[:-1, -1]
        centred = product[:-1, :-1] - means[1][:, None] * means[0] / streams.count
        return float(centred.square().sum())

    a, b = interval.before, interval.end
    both = cross(a, b) if (a, b) in streams.products else cross(b, a)
    return both / (cross(a, a) * cross(b, b)) ** 0.5


# -- measuring ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A network and its samples."""

    network: Adapter
    calibration: list[Any]
    test: list[Any]
    other: list[Any]


def case(name: str) -> Case:
    """Return a network, trained once and kept."""
    if name in ("bert", "small-gpt2"):
        from benchmarks import diff

        draw = torch.Generator().manual_seed(5)
        found = diff.bert() if name == "bert" else diff.decoder("gpt2")
        network = hf_stitch.load(found.model, example_inputs={"input_ids": found.samples[:2]})
        if name == "bert":
            ids = diff.questions()[0]
            return Case(network, [*ids[:-TESTED]], [*ids[-TESTED:]], [])
        english, spanish = torch.cat([diff.text("trec"), diff.text("english")]), diff.text("spanish")
        parts = (english[:-40_000], FITTED + 500), (english[-40_000:], TESTED), (spanish, FITTED)
        return Case(network, *([*diff.windows(text, count, draw)] for text, count in parts))
    if name == "resnet20":
        from benchmarks.diff import images, vision

        found = vision("resnet20")
        pixels = images("train", FITTED + 500)[0]
        network = hf_stitch.load(found.model, example_inputs=found.samples[:2])
        return Case(network, [*pixels], [*images("test", TESTED)[0]], [])
    from benchmarks.deep_networks import network

    deep = network(name)
    loaded = hf_stitch.load(deep.model, processor=deep.processor)
    pools = deep.calibration, deep.test[:TESTED], deep.other
    return Case(loaded, *([each["image"] if isinstance(each, dict) else each for each in pool] for pool in pools))


@dataclass(frozen=True)
class Measurement:
    """The figure of each method without each interval, on all test samples and on resamples of them."""

    figure: str
    sign: int  # 1 if less is better
    values: Mapping[str, Mapping[Interval, np.ndarray]]
    streams: Streams
    rows: int


def measure(
    network: Adapter, fit: list[Any], test: list[Any], methods: Sequence[str] = METHODS, longest: int = LONGEST,
    only: Sequence[tuple[int, int]] = (), held: Sequence[Any] = (),
) -> Measurement:  # fmt: skip
    """Fit all maps and measure what is left of the outputs; held samples leave out refits that do not help."""
    how, samples, tested = Run(progress=False), Samples.of(fit), Samples.of(test)
    values: dict[str, dict[Interval, np.ndarray]] = {}
    streams, rows, figure, sign = None, 0, "", 1
    for method in methods:
        search = Peers(network, network, (), method if method in ("drop", "replaceme", "refit") else "drop", how)
        search.find_joints(samples)
        chosen = [each for each in search.intervals(longest) if not only or (each.first, each.last) in only]
        chosen = [each for each in chosen if each.before in search.joints and each.end in search.joints]
        if streams is None:
            streams = search.streams(samples, chosen)
        whole = {"linearpatch": linearpatch, "stream": least_squares}.get(method)
        changes: dict[Interval, Any] = (
            {each: whole(streams, each) for each in chosen} if whole else search.changes(samples, chosen)
        )
        rows = max(rows, search.rows)
        measured: Any = search.measured(tested, {each: changes.get(each) for each in chosen})
        drawn: Any = search.task.drawn(measured, resamples=RESAMPLES, seed=0)
        means = {each: {name: float(row[0]) for name, row in drawn[each].items()} for each in chosen}
        figure = chosen_figure(search.task, means, None)
        sign = -1 if search.task.figures.get(figure, True) else 1
        values[method] = {each: drawn[each][figure] for each in chosen}
        if method == "refit" and len(held):
            _, kept, _ = search.scored(Samples.of(held), changes, figure)
            values[SHORTEN] = {each: values["drop" if kept[each] is None else method][each] for each in chosen}
    assert streams is not None
    return Measurement(figure, sign, values, streams, rows)


def loss(found: Measurement, method: str, interval: Interval) -> np.ndarray:
    """Return the figure as a loss: a divergence, or one minus what is explained."""
    values = found.values[method][interval]
    return values if found.sign == 1 else 1 - values


# -- tables ------------------------------------------------------------------------------------------------------------
def table(names: Sequence[str]) -> None:
    """Print what is left without each interval, by each map."""
    console, wins, against_drop = Console(width=150), [0, 0], [0, 0, 0]
    for name in names:
        given = case(name)
        held = given.calibration[FITTED : FITTED + 200]
        found = measure(given.network, given.calibration[:FITTED], given.test, held=held)
        shown = Table(
            "removed", *METHODS, "dropped", "shorten − drop", title=f"{name}: {found.figure}, {found.rows} rows"
        )
        intervals = [*found.values["refit"]]
        for each in intervals:
            losses = {method: loss(found, method, each) for method in METHODS}
            gap = loss(found, SHORTEN, each) - losses["drop"]
            left_out = "yes" if not gap.any() and losses["refit"][0] != losses["drop"][0] else ""
            low, high = np.quantile(gap[1:], [0.025, 0.975])
            wins[0] += bool(losses["refit"][0] < losses["replaceme"][0])
            wins[1] += 1
            against_drop[0 if high < 0 else 2 if low > 0 else 1] += 1
            best = min(METHODS, key=lambda method: losses[method][0])
            cells = [f"{losses[m][0]:.4g}" + " ★" * (m == best) for m in METHODS]
            shown.add_row(
                f"{each.blocks[0]} to {each.end.rpartition('.')[2]}", *cells, left_out, f"[{low:.3g}, {high:.3g}]"
            )
        console.print(shown)
        ratios = {m: np.exp(np.mean([np.log(loss(found, m, i)[0] / loss(found, "drop", i)[0]) for i in intervals]))
                  for m in (*METHODS, SHORTEN)}  # fmt: skip
        better = {m: sum(bool(loss(found, "refit", i)[0] < loss(found, m, i)[0]) for i in intervals) for m in METHODS}
        print(name, "over drop, geometric mean:", {m: round(float(v), 3) for m, v in ratios.items()})
        print("refit better in", {m: f"{v} of {len(intervals)}" for m, v in better.items() if m != "refit"})
    p = binomtest(wins[0], wins[1], 0.5, alternative="greater").pvalue if wins[1] else float("nan")
    print(f"refit against replaceme: {wins[0]} of {wins[1]}, sign test p = {p:.2g}; shorten against drop, by paired "
          f"intervals: better {against_drop[0]}, open {against_drop[1]}, worse {against_drop[2]}")  # fmt: skip


def choice(names: Sequence[str]) -> None:
    """Print the regret of what chooses the interval: the loss with it over the best one's."""
    shown = Table("network", "removed", "held-out figure", *CRITERIA, "last", "best", title="Regret of the choice")
    for name in names:
        given = case(name)
        others = given.calibration[FITTED : FITTED + 200]
        chooses = measure(given.network, given.calibration[:FITTED], others, ["refit"])
        found = measure(given.network, given.calibration[:FITTED], given.test, ["refit"])
        for count in range(1, LONGEST + 1):
            rows = {i: float(loss(found, "refit", i)[0]) for i in found.values["refit"] if len(i.blocks) == count}
            if len(rows) < 2:
                continue
            best = min(rows.values())
            held = {i: float(loss(chooses, "refit", i)[0]) for i in rows}
            picks = [min(held, key=lambda i: held[i])]
            picks += [min(rows, key=lambda i: criterion(found.streams, i)) for criterion in CRITERIA.values()]
            picks.append(max(rows, key=lambda i: i.last))
            shown.add_row(name, str(count), *(f"{rows[pick] / best:.3f}" for pick in picks), f"{best:.4g}")
    Console(width=130).print(shown)


def samples(names: Sequence[str]) -> None:
    """Print how much data maps need, and what another domain does."""
    for name in names:
        given, count = case(name), 2
        shown = Table("samples", "rows", *METHODS, title=f"{name}: two blocks in the middle")
        middle = len(given.network.layers) // 2
        only = [(middle - 1, middle - 1 + count)]
        for domain in ("calibration", "other"):
            pool = getattr(given, domain)
            for size in (3, 10, 30, 100, 300):
                if size > len(pool):
                    continue
                found = measure(given.network, pool[:size], given.test, only=only)
                (each,) = found.values["refit"]
                label = f"{size}" + " of another domain" * (domain == "other")
                shown.add_row(label, str(found.rows), *(f"{loss(found, m, each)[0]:.4g}" for m in METHODS))
        Console(width=130).print(shown)


def cost() -> None:
    """Print what a search over all intervals of a BERT with 12 blocks takes."""
    import transformers
    from hf_stitch_shorten import shorten

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, intermediate_size=1024, vocab_size=256,
        num_labels=6,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    network = hf_stitch.load(model, example_inputs={"input_ids": torch.randint(256, (2, 64))})
    for count in (200, 600):
        ids = torch.randint(256, (count, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            begin = time.process_time()
            for start in range(0, count, 64):
                model(input_ids=ids[start : start + 64])
            one = time.process_time() - begin
        for scattered, remove in ((False, 11), (False, 2), (True, 2)):
            begin = time.process_time()
            found = shorten(network, ids, remove=remove, scattered=scattered, test_data=ids[:50], progress=False)
            print(f"{count} texts, remove={remove}, scattered={scattered}: {found.forwards:.1f} forwards per sample, "
                  f"{(time.process_time() - begin) / one:.1f} times the CPU time of a pass ({one:.1f} s), "
                  f"{len(found.candidates)} intervals")  # fmt: skip


def main(arguments: Sequence[str] = ()) -> None:
    """Print all tables."""
    print(machine())
    jobs = {"table": table, "choice": choice, "samples": samples}
    chosen = [each for each in arguments if each in (*jobs, "cost")] or [*jobs, "cost"]
    names = [each for each in arguments if each in NETWORKS]
    for job in chosen:
        if job == "cost":
            cost()
        else:
            jobs[job](names or NETWORKS)


if __name__ == "__main__":
    main(sys.argv[1:])
