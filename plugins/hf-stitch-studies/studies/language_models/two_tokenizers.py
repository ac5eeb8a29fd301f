"""Stitch two decoders with different tokenizers, and compare each map with its baselines.

``decoders.py`` trains the decoders. Then:

    python run.py language_models.two_tokenizers --texts TEXTS --networks NETWORKS --out OUT
"""

import json
import math
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from language_models.decoders import KINDS, load, passages
from numpy.typing import NDArray
from study import percentiles, ranged, table

import hf_stitch
from hf_stitch import Adapter, Moments
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.artefacts.joining import join
from hf_stitch.data import PairedSamples
from hf_stitch.matchers.regression import Ridge
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.running import Run
from hf_stitch.scoring.halves import HalvesOfModel
from hf_stitch.scoring.passing import Scoring
from hf_stitch.stitches import LinearStitch, StitchingLayer
from hf_stitch.tasks.base import resampled
from hf_stitch.tasks.heads import task_named

ROWS = ("source", "target", "mean only", "own", "prefix", "prefix + own", "untrained + own")
WITHIN = {"coarse": 0.05, "fine": 0.25}
"""Maximum loss of the stitch relative to the target in bits per character, by the tokenizer of the target."""
ORDER = 5
DIFFERENCES = ("own minus stitch", "untrained minus stitch", "own added", "stitch minus target")
SIZES, DEPTHS = {"train": 1500, "test": 300, "checked": 20}, (0.25, 0.5, 0.75)
"""Texts, and depths of the stitches."""
Values = NDArray[np.float64]


def untrained(adapter: Adapter) -> Adapter:
    torch.manual_seed(7)
    return hf_stitch.load(type(adapter.model)(adapter.model.config).eval(), processor=adapter.processor)


def layer_at(adapter: Adapter, depth: float) -> str:
    blocks = adapter.candidates
    return blocks[min(int(depth * len(blocks)), len(blocks) - 2)]


def part(moments: Moments, columns: slice) -> Moments:
    return Moments.of(
        moments.n, moments.mean_x[columns], moments.mean_y, moments.sxx[columns, columns], moments.syy,
        moments.sxy[columns],
    )  # fmt: skip


def padded(layer: StitchingLayer, fitted: Any, columns: slice) -> StitchingLayer:
    """Return the stitching layer with a map that uses only some columns."""
    weight = torch.zeros(layer.widths[1], layer.widths[0])
    weight[:, columns] = fitted.weight.detach()
    return layer.with_maps(LinearStitch.of(weight=weight, bias=fitted.bias.detach()), None)


def measure(
    source: Adapter, target: Adapter, train: list[str], test: list[str]
) -> dict[str, dict[str, tuple[Values, Values]]]:
    width = source.spec(layer_at(source, 0)).width
    first, last = slice(0, width), slice(width, None)
    pairs = [(layer_at(source, depth), layer_at(target, depth)) for depth in DEPTHS]
    by_depth: dict[str, dict[str, tuple[Values, Values]]] = {f"{depth:.2f}": {} for depth in DEPTHS}
    for kind, network in (("trained", source), ("untrained", untrained(source))):
        reader = PrefixAdapter(network, target, own=True)
        collected = CollectedPair(Pair(reader, target).at(pairs), PairedSamples.of(train), Run(32))
        closed = Ridge().match(collected).layers
        for depth, pair in zip(by_depth, pairs, strict=True):
            whole, fitted = collected.moments(pair)["body"], closed[pair]
            layers = {"prefix + own": fitted}
            if kind == "trained":
                layers |= {
                    "prefix": padded(fitted, Ridge().fit(part(whole, first)), first),
                    "own": padded(fitted, Ridge().fit(part(whole, last)), last),
                    "mean only": fitted.mean_only(),
                }
            stitched = join(reader, pair[0], fitted, target, pair[1], task="text-generation")
            halves = HalvesOfModel(stitched, network if kind == "trained" else None)
            predictors = list(halves.predictors(layers))
            scoring = Scoring(target, {"": halves}, predictors, task_named(stitched.task), sizes=True)
            for name, values in scoring.run(PairedSamples.of(test), Run(batch_size=32)).answers[""].items():
                row = "untrained + own" if kind == "untrained" and name == "prefix + own" else name
                if kind == "trained" or row.startswith("untrained"):
                    by_depth[depth][row] = values["cross_entropy"], values["characters"]
    return by_depth


def bits(drawn: tuple[Values, Values], weights: Values) -> Values:
    nats, characters = drawn
    return np.asarray(weights @ nats / (weights @ characters) / math.log(2))


def score(rows: dict[str, tuple[Values, Values]], seed: int = 0) -> dict[str, Any]:
    """Compute bits per character with intervals, and differences from the stitch, on shared resamples."""
    weights = np.concatenate(list(resampled(len(rows["target"][0]), 1000, seed)))
    drawn = {name: bits(values, weights) for name, values in rows.items()}
    against = {
        "own minus stitch": drawn["own"] - drawn["prefix + own"],
        "untrained minus stitch": drawn["untrained + own"] - drawn["prefix + own"],
        "stitch minus target": drawn["prefix + own"] - drawn["target"],
        "own added": drawn["prefix"] - drawn["prefix + own"],
    }
    return {name: percentiles(values) for name, values in (drawn | against).items()}


def causality(model: Any, texts: list[str], seed: int = 0) -> dict[str, int]:
    """Truncate texts in words and after spaces, and count tokens of the common prefix with changed logits."""
    random, counted, changed = np.random.default_rng(seed), 0, 0
    with torch.no_grad():
        for text in texts:
            spaces = [i + 1 for i, character in enumerate(text) if character == " "]
            ends = {int(random.integers(2, len(text))), int(random.choice(spaces))}
            inputs = model.preprocess([text])
            whole = model(**inputs).logits[0]
            for end in sorted(ends):
                cut = model.preprocess([text[:end]])
                ids, full_ids = cut["input_ids"][0], inputs["input_ids"][0]
                same = int((ids == full_ids[: len(ids)]).long().cumprod(0).sum())
                difference = (model(**cut).logits[0, :same] - whole[:same]).abs().amax(-1)
                counted += same
                changed += int((difference > 1e-3).sum())
    return {"tokens checked": counted, "changed": changed}


def generation(model: Any, texts: list[str], tokens: int = 30) -> dict[str, int]:
    """Generate with and without a cache, and compare with the most likely tokens of one forward over the final text."""
    same, best, total = 0, 0, 0
    for text in texts:
        inputs = model.preprocess([text[:60]])
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        cached, plain = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
        same += int(torch.equal(cached, plain))
        with torch.no_grad():
            chosen = model(input_ids=cached).logits[:, -tokens - 1 : -1].argmax(-1)
        best += int((chosen == cached[:, -tokens:]).sum())
        total += tokens
    return {"texts": len(texts), "cached = uncached": same, "tokens": total, "best of the final text": best}


def ngram_bits(train: list[str], test: list[str], order: int = ORDER) -> float:
    """Return the bits per character of a Witten-Bell n-gram model, with 1/256 for each unknown character."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in train:
        for i, character in enumerate(text):
            for length in range(min(order, i + 1)):
                counts[text[i - length : i]][character] += 1
    nats, characters = 0.0, 0
    for text in test:
        for i, character in enumerate(text):
            probability = 1 / 256
            for length in range(min(order, i + 1)):
                following = counts.get(text[i - length : i])
                if following is None:
                    break
                total, kinds = following.total(), len(following)
                probability = (following[character] + kinds * probability) / (total + kinds)
            nats -= math.log(probability)
            characters += 1
    return nats / characters / math.log(2)


def run(texts: Path, networks: Path) -> dict[str, Any]:
    start = time.perf_counter()
    train, test = passages(texts)
    random = np.random.default_rng(0)
    train = [train[i] for i in random.permutation(len(train))]
    test = [test[i] for i in random.permutation(len(test))]
    both = {name: load(networks, name) for name in KINDS}
    record: dict[str, Any] = {
        "sizes": SIZES, "order": ORDER, "ngram": ngram_bits(train[:8000], test[: SIZES["test"]]), "directions": {},
        "networks": {
            name: {
                "parameters": adapter.model.num_parameters(), "tokens": len(adapter.processor),
                "width": adapter.model.config.hidden_size, "blocks": adapter.model.config.num_hidden_layers,
            }
            for name, adapter in both.items()
        },
        "machine": study.machine(),
    }  # fmt: skip
    for source, target in (("fine", "coarse"), ("coarse", "fine")):
        by_depth = measure(both[source], both[target], train[: SIZES["train"]], test[: SIZES["test"]])
        layers = layer_at(both[source], DEPTHS[1]), layer_at(both[target], DEPTHS[1])
        model = hf_stitch.stitch(
            both[source], both[target], train[:200], source_layer=layers[0], target_layer=layers[1],
            matcher="ridge", align="prefix", own=True, batch_size=32,
        )  # fmt: skip
        checked = test[: SIZES["checked"]]
        nodes, alone, shared, ends = 0, 0, 0, 0
        for text in checked:
            reading = model.source.read(**model.preprocess([text]))
            nodes += reading.input_ids.numel()
            alone += both[source].preprocess([text])["input_ids"].numel()
            shared += int(torch.isin(reading.alignment, reading.kept).sum())
            ends += reading.alignment.numel()
        record["directions"][f"{source} → {target}"] = {
            "depths": {depth: score(rows) for depth, rows in by_depth.items()},
            "causality": causality(model, checked),
            "generation": generation(model, checked[:10]),
            "nodes per token": nodes / alone,
            "shared boundaries": shared / ends,
        }
        print(json.dumps(record["directions"][f"{source} → {target}"], indent=1), flush=True)
    record["seconds"] = time.perf_counter() - start
    return record


def page(record: dict[str, Any]) -> str:
    cells = [
        (rows, WITHIN[direction.split()[-1]])
        for direction, results in record["directions"].items() for rows in results["depths"].values()
    ]  # fmt: skip
    return study.text(__file__).format(
        about="; ".join(
            f"`{name}`: {n['tokens']:,} tokens, width {n['width']}, {n['blocks']} blocks, {n['parameters']:,} "
            "parameters" for name, n in record["networks"].items()
        ),
        **record["sizes"], last=record["order"] - 1, ngram=record["ngram"], machine=record["machine"],
        minutes=record["seconds"] / 60, coarse=WITHIN["coarse"], fine=WITHIN["fine"], cells=len(cells),
        beats=sum(rows["own minus stitch"][1] > 0 for rows, _ in cells),
        near=sum(rows["stitch minus target"][0] <= within for rows, within in cells),
        directions="\n".join(_direction(name, results) for name, results in record["directions"].items()),
    )  # fmt: skip


def _direction(name: str, results: dict[str, Any]) -> str:
    """Tabulate a direction, with the results of the checks."""
    depths = {
        f"depth {depth}": lambda row, rows=rows: ranged(rows[row], 3) for depth, rows in results["depths"].items()
    }
    checked = study.text(__file__, "checked").format(
        **results["causality"], **results["generation"], nodes=results["nodes per token"],
        boundaries=results["shared boundaries"],
    )  # fmt: skip
    return f"## {name}\n\n{table((*ROWS, *DIFFERENCES), {'bits per character': str, **depths})}\n\n{checked}"


def main() -> None:
    arguments = study.parser(__doc__, "texts", "networks", required={"texts", "out"}).parse_args()
    study.write_results("two_tokenizers", run(arguments.texts, arguments.networks), page, arguments.out)
