"""Are stitches beyond affine maps worth their parameters? Does training on final features first help?

Pairs: the ResNet-20s of Csiszárik et al., two vision transformers (``studies/dr_frankenstein/base_training.py``) and
the decoders of ``studies/language_models/decoders.py``.

    python run.py beyond_affine.beyond_affine --data-dir DATA --published PUBLISHED --networks NETWORKS --out OUT
    --decoders DECODERS --texts TEXTS

Completed pairs are not run again.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import base_training, images, networks
from hf_stitch_embeddings import ResidualMLP
from language_models import decoders
from study import percentiles, ranged, table

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.adapters import untrained
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.artefacts.joining import join
from hf_stitch.data import PairedSamples
from hf_stitch.matchers import Matcher
from hf_stitch.matchers.regression import Ridge
from hf_stitch.matchers.starts import Attention, LowRankResidual, Random
from hf_stitch.pairs import CollectedPair, CollectedParts, Pair as Networks
from hf_stitch.running import Run
from hf_stitch.scoring.halves import HalvesOfModel
from hf_stitch.scoring.passing import Scoring
from hf_stitch.tasks.heads import task_named
from hf_stitch.training import TaskLoss

TITLES = {"resnet20": "ResNet-20", "vit": "Vision transformers", "decoders": "Decoders with different tokenizers"}
CUTS: dict[str, Any] = {
    "resnet20": ("layer1.1", "layer2.1", "layer3.0"),
    "vit": ("blocks.1", "blocks.2", "blocks.4"),
    "decoders": (("model.layers.1", "model.layers.1"), ("model.layers.2", "model.layers.3"),
                 ("model.layers.3", "model.layers.4")),
}  # fmt: skip
"""Pair -> layers at about a quarter, a half and three quarters of the depth."""
CLOSED = "ridge, not trained"
AFFINE = "affine"
KINDS = (AFFINE, "low-rank correction", "MLP beside affine", "attention beside affine")
FEATURES = ("affine, final features first", "random start", "random start, final features first")
RESAMPLES = 1000
TRAIN, TEST, STEPS, BATCH, ROWS = (4000, 320), (2000, 100), (200, 40), (64, 16), (300, 200)
"""For images and texts: samples for fitting and training maps; held-out samples; training steps; samples per step;
samples for the initial fit of the MLP."""
VIT_IMAGES, VIT_EPOCHS = 50_000, 4
RANK, HIDDEN = 8, 128
FIGURES = ("relative_accuracy", "bits_per_character")


@dataclass(frozen=True)
class Pair:
    """Pair of networks with its data."""

    name: str  # name of the pair
    source: Any  # the source
    blank: Any  # the source with random weights
    target: Adapter  # the target
    cuts: tuple[tuple[str, str], ...]  # layers of the source and of the target, by depth
    train: Samples  # samples for fitting maps
    test: Samples  # held-out samples

    @property
    def is_language(self) -> bool:
        return self.name == "decoders"

    @property
    def task(self) -> str:
        return ("image-classification", "text-generation")[self.is_language]


def of_images(name: str, arguments: argparse.Namespace) -> Pair:
    if name == "resnet20":
        both = list(networks.read_folder(arguments.published / "drfrankenstein_resnet20")[0].values())
    else:
        options = ["--data-dir", arguments.data_dir] if arguments.data_dir else []
        # In a separate process, because the accelerators of a process share their precision.
        subprocess.run(
            [
                sys.executable, study.RUN, "dr_frankenstein.base_training", "--networks", str(arguments.networks),
                "--architecture", "vit", "--optimizer", "adamw", "--images", str(VIT_IMAGES), "--epochs",
                str(VIT_EPOCHS), *options,
            ],
            check=True,
        )  # fmt: skip
        bases = [base_training.Base("vit", VIT_EPOCHS, VIT_IMAGES, seed, optimizer="adamw") for seed in (0, 1)]
        both = list(base_training.adapted(bases, arguments.networks, arguments.data_dir).values())
    train = images.samples("cifar10", "train", TRAIN[0], arguments.data_dir)
    test = images.samples("cifar10", "test", TEST[0], arguments.data_dir)
    source, target = both[:2]
    torch.manual_seed(7)
    blank = networks.adapted(networks.small_vit()) if name == "vit" else untrained(source)
    return Pair(name, source, blank, target, tuple((layer, layer) for layer in CUTS[name]), train, test)


def of_texts(arguments: argparse.Namespace) -> Pair:
    """Read the decoders: the fine one is the source, the coarse one the target."""
    both = [decoders.load(arguments.decoders, name) for name in ("fine", "coarse")]
    train, test = decoders.passages(arguments.texts)
    random = np.random.default_rng(0)
    train, test = (
        [part[i] for i in random.permutation(len(part))[:count]] for part, count in ((train, TRAIN[1]), (test, TEST[1]))
    )
    source, blank = (PrefixAdapter(network, both[1], own=True) for network in (both[0], untrained(both[0])))
    train, test = Samples.of(train), Samples.of(test)
    return Pair("decoders", source, blank, both[1], CUTS["decoders"], train, test)


def starts(pair: Pair) -> dict[str, Matcher]:
    mlp = ResidualMLP(width=HIDDEN, epochs=3, batch_size=2048, rate=1e-3)
    return dict(zip(KINDS, (Ridge(), LowRankResidual(RANK), mlp, Attention(causal=pair.is_language)), strict=True))


def measure(pair: Pair, cut: tuple[str, str], moments: Any, blank: Any) -> dict[str, Any]:
    """Fit, train, score and audit all stitches at one cut."""
    specs = pair.source.spec(cut[0]), pair.target.spec(cut[1])
    steps, batch = STEPS[pair.is_language], BATCH[pair.is_language]
    matcher = TaskLoss(max_steps=steps, batch_size=batch, schedule="cosine")
    results: dict[str, Any] = {"parameters": {}, "seconds": {}}
    drawn: dict[str, Any] = {}
    models = {}
    for front, source, statistics in (("trained", pair.source, moments), ("untrained", pair.blank, blank)):
        layers: dict[str, Any] = {}

        def trained(
            name: str, start: Matcher, matcher: TaskLoss, source: Any = source, statistics: Any = statistics,
            layers: dict[str, Any] = layers, front: str = front,
        ) -> None:  # fmt: skip
            begun, read = time.perf_counter(), statistics
            if isinstance(start, ResidualMLP):
                some = PairedSamples.of(pair.train.take(ROWS[pair.is_language]))
                read = CollectedPair(Networks(source, pair.target).at([cut]), some, Run(progress=False)).rows(cut)
            first = start.match(CollectedParts(*specs, "none", read)).only
            model = join(source, cut[0], first, pair.target, cut[1], task=pair.task)
            layers[name] = matcher.fit(model, pair.train, target=pair.target, progress=False)
            if front == "trained":
                results["seconds"][name] = time.perf_counter() - begun
                results["parameters"][name] = sum(p.numel() for p in layers[name].parameters())
                print(f"  {name}: {results['seconds'][name]:.0f} s", flush=True)

        layers[CLOSED] = Ridge().match(CollectedParts(*specs, "none", statistics)).only
        for name, start in starts(pair).items():
            trained(name, start, matcher)
        if front == "trained":
            half = STEPS[pair.is_language] // 2
            first = replace(matcher, max_steps=half, feature_steps=half)
            fast = replace(matcher, lr=1e-2)  # from a random start, short training converges only with larger steps
            trained(FEATURES[0], Ridge(), first)
            trained(FEATURES[1], Random(), fast)
            trained(FEATURES[2], Random(), replace(first, lr=fast.lr))
        model = join(source, cut[0], layers[CLOSED], pair.target, cut[1], task=pair.task)
        halves, task = HalvesOfModel(model), task_named(pair.task)
        scoring = Scoring(pair.target, {"": halves}, list(halves.predictors(layers)), task)
        scored = scoring.run(PairedSamples.of(pair.test), Run(progress=False)).answers[""]
        drawn[front] = {
            name: rows[FIGURES[pair.is_language]]
            for name, rows in task.drawn(scored, resamples=RESAMPLES, seed=0).items()
        }
        if front == "trained":
            models = {
                name: join(source, cut[0], layers[name], pair.target, cut[1], task=pair.task)
                for name in (CLOSED, *KINDS)
            }
    audits = hf_stitch.audit(
        list(models.values()), pair.test, train_data=pair.train, target=pair.target, progress=False, resamples=200
    )
    sign = -1 if pair.is_language else 1  # lower bits are better
    of, blank_of = drawn["trained"], drawn["untrained"]
    gains = {name: sign * (of[name] - of[AFFINE]) for name in KINDS[1:]}
    results["scores"] = {name: percentiles(values) for name, values in of.items()}
    results["untrained"] = {name: percentiles(blank_of[name]) for name in (CLOSED, *KINDS)}
    results["gains"] = {name: percentiles(values) for name, values in gains.items()}
    results["selectivity"] = {name: percentiles(sign * (of[name] - blank_of[name])) for name in (CLOSED, *KINDS)}
    results["gains beyond untrained"] = {
        name: percentiles(gain - sign * (blank_of[name] - blank_of[AFFINE])) for name, gain in gains.items()
    }
    results["drawn"] = {"affine": sign * (of[FEATURES[0]] - of[AFFINE]),
                      "random": sign * (of[FEATURES[2]] - of[FEATURES[1]])}  # fmt: skip
    results["audits"] = {
        name: {
            "in_distribution": one.in_distribution,
            "doses": {detector: dose.value for detector, dose in one.doses.items()},
            "residual": one.residual["body"],
        }
        for name, one in zip(models, audits, strict=True)
    }
    return results


def run(pair: Pair) -> dict[str, Any]:
    begun = time.perf_counter()
    samples, how = PairedSamples.of(pair.train), Run(32, progress=False)
    trained, blank = (
        CollectedPair(Networks(source, pair.target).at(pair.cuts), samples, how) for source in (pair.source, pair.blank)
    )
    record: dict[str, Any] = {"figure": FIGURES[pair.is_language], "cuts": {}}
    for cut in pair.cuts:
        print(f"{pair.name} {' → '.join(cut)}", flush=True)
        record["cuts"][" → ".join(dict.fromkeys(cut))] = measure(pair, cut, trained.moments(cut), blank.moments(cut))
    for kind in ("affine", "random"):  # over the depths of a pair, on shared resamples
        of_cuts = [cell["drawn"][kind] for cell in record["cuts"].values()]
        record[f"features of {kind}"] = percentiles(np.mean(of_cuts, 0))
    for cell in record["cuts"].values():
        del cell["drawn"]
    record["seconds"] = time.perf_counter() - begun
    record["machine"] = study.machine()
    return record


def pays(cell: dict[str, Any], name: str) -> bool:
    """Return whether a map pays at a cell, by the rule of the page."""
    audits = cell["audits"]
    left = audits[name]["in_distribution"] is False and audits[AFFINE]["in_distribution"] is True
    return cell["gains"][name][1] > 0 and cell["gains beyond untrained"][name][0] > 0 and not left


def titled(kind: str) -> str:
    """Return the name of a map on the page, from its name in the record."""
    return kind.replace(" beside ", " + ")


def cell_table(figure: str, cell: dict[str, Any]) -> str:
    """Tabulate the scores of all maps at a cell, and their audits."""

    def audited(row: str) -> str:
        audit = cell["audits"][row]
        state = {True: "in", False: "**out**", None: "undecided"}[audit["in_distribution"]]
        detector, dose = max(audit["doses"].items(), key=lambda scored: scored[1], default=("none counts", 0.0))
        return f"{state} ({detector} {dose:.2f})" if dose > 0 else state

    def known(figures: dict[str, Any], row: str, digits: str) -> str:
        return f"{figures[row]:{digits}}" if row in figures else "–"

    return table((CLOSED, *KINDS), {
        "": titled, figure: lambda row: ranged(cell["scores"][row], 3),
        "gain over affine": lambda row: ranged(cell["gains"][row], 3) if row in cell["gains"] else "–",
        "untrained front": lambda row: f"{cell['untrained'][row][0]:.3f}",
        "selectivity": lambda row: ranged(cell["selectivity"][row], 3),
        "parameters trained": lambda row: known(cell["parameters"], row, ","),
        "seconds": lambda row: known(cell["seconds"], row, ".0f"), "audit": audited,
    })  # fmt: skip


def section(name: str, record: dict[str, Any]) -> str:
    figure = record["figure"].replace("_", " ")
    parts = [f"## {TITLES[name]}"]
    for cut, cell in record["cuts"].items():
        target = f"; target alone {cell['scores']['target'][0]:.3f}" if "bits" in figure else ""
        parts += [f"### `{cut}`{target}", cell_table(figure, cell)]
    return "\n\n".join(parts)


def page(record: dict[str, Any]) -> str:
    pairs = record["pairs"]
    cells = [(TITLES[name], cut, cell) for name, pair in pairs.items() for cut, cell in pair["cuts"].items()]
    paying = [f"{titled(row)} ({title}, {cut})" for title, cut, cell in cells for row in KINDS[1:] if pays(cell, row)]
    total = len(cells) * len(KINDS[1:])
    out = {row: sum(cell["audits"][row]["in_distribution"] is False for *_, cell in cells) for row in (CLOSED, *KINDS)}
    starts = {"affine": (AFFINE, FEATURES[0]), "random": FEATURES[1:]}
    defaults = study.listed(__file__)["default"]
    helped = tuple(k for k in starts if all(pair[f"features of {k}"][1] > 0 for pair in pairs.values()))

    def scores(_: str, kind: str, pair: dict[str, Any], first: int) -> str:
        return ", ".join(f"{cell['scores'][starts[kind][first]][0]:.3f}" for cell in pair["cuts"].values())

    return study.text(__file__).format(
        settings=record["settings"], rank=RANK, hidden=HIDDEN, chance=0.025 * total,
        pays=f"Maps beyond affine pay in {len(paying)} of {total} cases{': ' * bool(paying)}{'; '.join(paying)}.",
        strange=f"Out of distribution, of {len(cells)} cells: "
        f"{', '.join(f'{titled(row)} {n}' for row, n in out.items())}.",
        sections="\n\n".join(section(name, pair) for name, pair in pairs.items()),
        features=table([(TITLES[name], kind, pair) for name, pair in pairs.items() for kind in starts], {
            "": "{0}", "start": "{1}", "without": partial(scores, first=0),
            "final features first": partial(scores, first=1),
            "difference, mean over depths": lambda _, kind, pair: ranged(pair[f"features of {kind}"], 3),
        }),
        default=defaults[" and ".join(helped) or "none"], machine=next(iter(pairs.values()))["machine"],
        minutes=sum(pair["seconds"] for pair in pairs.values()) / 60,
    )  # fmt: skip


def main() -> None:
    options = "data-dir", "published", "networks", "texts"
    parser = study.parser(__doc__, *options, required={"published", "texts", "out"})
    parser.add_argument("--decoders", type=Path, required=True, help="folder of the decoders")
    arguments = parser.parse_args()

    def measured(name: str) -> dict[str, Any]:
        return run(of_texts(arguments) if name == "decoders" else of_images(name, arguments))

    pairs = {name: study.cached(arguments.out / f"{name}.json", partial(measured, name)) for name in TITLES}
    settings = (
        f"{TRAIN[0]:,} images and {TRAIN[1]:,} texts, {STEPS[0]} steps of {BATCH[0]} images and {STEPS[1]} of "
        f"{BATCH[1]} texts (Adam, 0.001, cosine), scored on {TEST[0]:,} and {TEST[1]:,} held-out ones"
    )
    study.write_results("beyond_affine", {"settings": settings, "pairs": pairs}, page, arguments.out)
