"""Decoders that tools for merging refuse, joined front to back, and a block of one inside another, in bits.

Usage: python -m benchmarks.joined_decoders [samples]

A Llama of bytes, a GPT-2 and a Qwen2 of pieces of words (:mod:`benchmarks.deep_networks`), of eight blocks each. Rows:
both networks alone; the front of one joined to the back of the other by ridge regression on texts that no network was
trained on, at three depths and from a shallow front into a deep back; the map of the target's own embeddings, and the
target's mean, which take nothing from the source. Then GPT-2 with one block of Qwen2 in the place of its own, between
two maps, beside the same block left out, and one map in its place.

Fixed before the figures: a joint carries something over if it needs fewer bits per character than the map of the
target's own embeddings, by intervals that do not overlap. That it is better than the better network alone is not
expected.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

import hf_stitch
from benchmarks.deep_networks import network
from benchmarks.timing import machine

FITTED, TESTED, CHARACTERS = 300, 100, 110
FIGURE = "bits_per_character"
LAYERS = {"llama": "model.layers.{}", "qwen": "model.layers.{}", "gpt2": "transformer.h.{}"}
PLACES = ((1, 1), (3, 3), (5, 5), (1, 5), (5, 1))
"""Last block of the front, and the block after which the back begins."""


def loaded(name: str) -> tuple[Any, list[str], list[str]]:
    """Return a network, and texts to fit on and to test on."""
    deep = network(name)
    words = network("gpt2").processor if name == "qwen" else deep.processor  # one vocabulary, divided as GPT-2 does
    assert words.get_vocab() == deep.processor.get_vocab()
    fit, test = ([text[:CHARACTERS] for text in texts] for texts in (deep.calibration, deep.test))  # as the Llama takes
    return hf_stitch.load(deep.model, processor=words), fit, test


def joined(console: Console, fitted: int, tested: int) -> None:
    """Print what fronts joined to backs cost."""
    networks = {name: loaded(name) for name in LAYERS}
    shown = Table("front → back", "blocks", "joined", "own embeddings", "mean only", "back alone", "front alone")
    for source, target in (("llama", "gpt2"), ("gpt2", "llama"), ("qwen", "gpt2")):
        (a, _, _), (b, fit, test) = networks[source], networks[target]
        other = source == "qwen"  # one tokenizer
        for first, last in PLACES:
            options: dict[str, Any] = {} if other else {"align": "prefix", "own": True}
            found = hf_stitch.stitch(
                a, b, fit[:fitted], source_layer=LAYERS[source].format(first), target_layer=LAYERS[target].format(last),
                matcher="ridge", test_data=test[:tested], progress=False, batch_size=16, **options,
            )  # fmt: skip
            scores = found.evaluation.scores
            rows = ("stitched", "own", "mean_only", "target", "source")
            cells = [str(scores[row][FIGURE]) if row in scores and FIGURE in scores[row] else "–" for row in rows]
            shown.add_row(f"{source} → {target}", f"{first + 1} + {7 - last}", *cells)
            print(source, target, first, last, cells, flush=True)
    console.print(shown)


def inside(console: Console, fitted: int, tested: int) -> None:
    """Print what a block of another network costs in the place of an own one."""
    shown = Table("host", "block", "a block of the other, two maps", "left out", "one map", "whole")
    data: dict[str, Any] = {"matcher": "ridge", "progress": False, "batch_size": 16}
    for host, guest in (("gpt2", "qwen"), ("qwen", "gpt2")):
        (a, fit, test), (b, _, _) = loaded(host), loaded(guest)
        at, other, fit = LAYERS[host].format, LAYERS[guest].format, fit[:fitted]
        data["test_data"] = test[:tested]
        for place in (2, 4, 6):
            before, behind = at(place - 1), at(place)
            into = hf_stitch.stitch(a, b, fit, source_layer=before, target_layer=other(place - 1), **data)
            first = hf_stitch.load(into, processor=a.processor)
            layer = next(name for name in first.layers if name.endswith(other(place)))
            given = hf_stitch.stitch(first, a, fit, source_layer=layer, target_layer=behind, **data).evaluation
            mapped = hf_stitch.stitch(a, a, fit, source_layer=before, target_layer=behind, **data).evaluation
            rows = [given.scores["stitched"], *(mapped.scores[name] for name in ("identity", "stitched", "target"))]
            shown.add_row(host, str(place), *(str(row[FIGURE]) for row in rows))
            print(host, place, [str(row[FIGURE]) for row in rows], flush=True)
    console.print(shown)


def main() -> None:
    """Print both tables."""
    console, fitted = Console(width=150), int(sys.argv[1]) if sys.argv[1:] else FITTED
    inside(console, fitted, TESTED)
    joined(console, fitted, TESTED)
    print(machine())


if __name__ == "__main__":
    main()
