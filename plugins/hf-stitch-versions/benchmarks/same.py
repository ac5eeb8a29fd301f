"""Planted bugs that ``same`` locates exactly, and honest pairs that it flags, against a loop of forward hooks.

The corpus is shared with the tests of ``plugins/hf-stitch-versions`` (``planted.py``, ``honest.py``): tiny networks of
13 families on random inputs. The baseline is the usual debugging loop: forward hooks record every output of both
networks in their own dtype, without padding. The first module, in order of execution, with an output that is not
``torch.allclose(atol=1e-5, rtol=1e-5)`` is the culprit. pytest-torch compares the same pairs by its own tolerances, if
the second network is in memory. The cost is CPU time of one thread for BERT with 12 layers,
relative to one forward pass of the first network on the same inputs.

``python -m benchmarks same`` requires the plugin and pytest-torch:
``pip install hf-stitch-versions "hf-stitch[bench]"``.
"""

from __future__ import annotations

import copy
import logging
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_stitch_versions import same
from hf_stitch_versions.inputs import for_second, random_feeds
from hf_stitch_versions.recording import Event, Key
from hf_stitch_versions.sameness.distances import rows_of
from hf_stitch_versions.sources import Feed, Network, Recorded, Source
from pytest_torch import localize_divergence
from torch import Tensor

from benchmarks.timing import seconds, show
from hf_stitch import Activations, Adapter, Samples

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import honest
import planted

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
ROUNDS = 5

NONE, SMALL, SHOWS = "without effect", "less effect than rounding to float32", "more effect than rounding to float32"


# -- the baseline ----------------------------------------------------------------------------------------------
def first_not_close(a: Adapter, b: Adapter | Activations, data: Any) -> str | None:
    """Return the first module with an output that is not close; ``None`` if all are."""
    failures: list[tuple[int, str]] = []
    second: Source = Network(b, second=True) if isinstance(b, Adapter) else Recorded(b)
    for feed in feeds(a, b, data):
        one, two = (recorded(source, feed) for source in (Network(a), second))
        places = [i for i, key in enumerate(one) if key in two and far(one[key], two[key])]
        failures += [(places[0], list(one)[places[0]][0])] if places else []
    return min(failures)[1] if failures else None


def first_of_peer(a: Adapter, b: Adapter | Activations) -> str | None:
    """Return the first module where pytest-torch finds a divergence; ``None`` without one."""
    if not isinstance(b, Adapter):
        return None
    for feed in random_feeds(a):
        report = localize_divergence(
            a.model, b.model, feed.arguments, inputs_b=for_second(feed.arguments, a, b), leaf_only=False
        )
        if report.first is not None:
            return report.first.name.removeprefix("<root>")
    return None


def feeds(a: Adapter, b: Adapter | Activations, data: Any) -> Iterator[Feed]:
    """Yield the inputs of ``same``; with recorded activations, batches of one sample."""
    if isinstance(b, Adapter):
        for feed in random_feeds(a):
            yield replace(feed, own=for_second(feed.arguments, a, b))
    else:
        for batch in Samples.of(data).batches(1):
            yield Feed(tuple(batch.ids), a.preprocess(batch.samples))


def recorded(source: Source, feed: Feed) -> dict[Key, Tensor]:
    """Return the first output of every call, without padding."""
    outputs: dict[Key, Tensor] = {}

    def see(event: Event) -> None:
        for value in list(event.outputs.values())[:1]:
            outputs[event.key] = rows_of(value, feed.mask).clone()

    source.watch(feed, see)
    return outputs


def far(one: Tensor, two: Tensor) -> bool:
    """Return whether two outputs have the same shape and are not close, by the usual tolerances."""
    return one.shape == two.shape and not torch.allclose(one, two, **CLOSE)


# -- measuring ---------------------------------------------------------------------------------------------------------
def on_bugs() -> dict[str, Counter[str]]:
    """Count all planted bugs and the exactly located ones, by effect."""
    counts = {effect: Counter[str]() for effect in (SHOWS, SMALL, NONE)}
    for bug in planted.names():
        pair = planted.plant(*bug)
        sameness = same(pair.a, pair.b, progress=False)
        row = counts[SHOWS if pair.shows else SMALL if pair.counts else NONE]
        named = bool(sameness.findings) and sameness.findings[0].module == pair.answer
        row["pairs"] += 1
        row["same"] += named
        row["reported"] += named or (
            sameness.is_same and any(text.startswith(f"{pair.answer}: ") for text in sameness.settings)
        )
        row["hooks"] += first_not_close(pair.a, pair.b, None) == pair.answer
        row["peer"] += first_of_peer(pair.a, pair.b) == pair.answer
    return counts


def on_honest() -> dict[str, Counter[str]]:
    """Count all honest pairs and the flagged ones, by kind."""
    counts = {kind: Counter[str]() for kind, _ in honest.names()}
    for case in honest.names():
        pair = honest.pair(*case)
        sameness = same(pair.a, pair.b, pair.data, progress=False, **pair.options)
        counts[pair.kind] += Counter(
            pairs=1, same=not sameness.is_same, hooks=first_not_close(pair.a, pair.b, pair.data) is not None,
            peer=first_of_peer(pair.a, pair.b) is not None,
        )  # fmt: skip
    return counts


def cost() -> dict[str, float]:
    """Return the cost of a comparison without loading, in forward passes of the first network on the same inputs."""
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, intermediate_size=1024, vocab_size=8192
    )
    model = planted.as_if_trained(transformers.BertModel(config).eval())
    bug = copy.deepcopy(model)
    planted.transposed(bug, "encoder.layer.6.attention.self.query")
    a, b, c = (planted.loaded("bert", network) for network in (model, copy.deepcopy(model), bug))
    inputs = [feed.arguments for feed in random_feeds(a)]
    forward = median(lambda: [a.forward(arguments) for arguments in inputs])
    return {
        "one forward, seconds": forward,
        "two that are the same": median(lambda: same(a, b, progress=False)) / forward,
        "two with one bug": median(lambda: same(a, c, progress=False)) / forward,
        "hooks and allclose": median(lambda: first_not_close(a, b, None)) / forward,
    }


@torch.no_grad()
def median(job: Callable[[], object]) -> float:
    """Return the median CPU time of a job, after a warm-up run."""
    return statistics.median(seconds(job, ROUNDS + 1)[1:])


# -- showing -----------------------------------------------------------------------------------------------------------
def table(title: str, rows: dict[str, Counter[str]]) -> None:
    """Print a table of counts."""
    reported = ["reported"] * any("reported" in row for row in rows.values())
    columns = "pairs", "same", *["same, or reported as a setting"] * len(reported), "hooks and allclose", "pytest-torch"
    figures = "pairs", "same", *reported, "hooks", "peer"
    show(title, ("", *columns), ((name, *(row[column] for column in figures)) for name, row in rows.items()))


def main() -> None:
    """Run the benchmark and print its tables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    table("planted bugs that are named exactly", on_bugs())
    counts = on_honest()
    table("honest pairs that are flagged", counts | {"all": sum(counts.values(), Counter())})
    rows = ((name, f"{value:.3f}" if "seconds" in name else f"{value:.1f}") for name, value in cost().items())
    show("cost beyond loading: BERT, 12 layers of width 256", ("", "forwards"), rows)
