"""Does the similarity of filter atoms follow the similarity of activations (Chen, Miao & Qiu 2023, figures 2 and 9)?

Networks share a start and its coefficients; their atoms are trained on ten tasks of CIFAR-100. Over the 45 pairs,
similarities of weights are correlated with similarities of activations, with a bootstrap over networks.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import study
from filter_atoms import networks, task_networks
from filter_atoms.experiment import OPTIONS, filled, write_results
from filter_atoms.pairwise import Array, additive, bootstrap, cell, correlations, difference, spearman, symmetric, upper
from filter_atoms.task_networks import SIZES, TUNED, Cifar100, Task, by_weights
from hf_stitch_filter_atoms import FilterAtoms, Grassmann, PatchCosine, PatchCovariance, set_gauge
from hf_stitch_versions import WeightCosine
from matplotlib.figure import Figure
from study import table
from torch import nn

NAME = "correlation"
CONFIRMED = 0.8
"""The paper's claim is confirmed if the lower end of the interval of r is above this bound, and in part if above 0."""
MARGIN = 1e-3  # minimum gain in r of a better predictor; smaller differences are rounding errors
MOVED = 0.95  # maximum mean S_Atom of networks that have moved
TARGETS = {"cka": "CKA", "cca": "CCA"}
ATOM, WEIGHTS, PATCHES, GRASSMANN = "S_Atom", "cosine of the weights", "patch cosine", "S_Gras"
GAUGES = {
    ATOM: "gauge that training left",
    "S_Atom, orthonormal coefficients": "orthonormal coefficients",
    "S_Atom, gauge of the first task": "atoms of the first task's network orthonormal",
}
OWN_PATCHES = "patch cosine, covariance of the probes"
RIVALS = (*GAUGES, PATCHES, OWN_PATCHES)  # candidates to beat the plain cosine of the weights
MOVEMENT, EFFECTS = "distance from the start", "mean of each model"
CLASSES, SUPERCLASSES = "overlap of classes", "overlap of superclasses"
CENTRED = ", own means removed"


@dataclass(frozen=True)
class Arm:
    """Variant of the experiment."""

    about: str  # difference from the paper's setting
    starts: int  # number of starts, each with its own tasks and networks
    overlapping: bool = False  # whether tasks share classes
    atoms: int | None = None  # number of atoms; ``None``: the number of weights of a kernel
    frozen: bool = False  # whether BatchNorm keeps the statistics of the start
    lr: float | None = None  # learning rate, if training does not converge with the preset


MAIN, SIX = "disjoint", "six"
ARMS = {name: Arm(**fields) for name, fields in study.listed(__file__)["arms"].items()}
RESAMPLES = 1000


def main() -> None:
    arguments = study.parser(__doc__, *OPTIONS).parse_args()
    data, arms = Cifar100.read(arguments.data_dir), {}
    for name, arm in ARMS.items():
        groups = [compared(arm, number, data, arguments) for number in range(arm.starts)]
        arms[name] = {"groups": groups, **statistics([group.pop("similarities") for group in groups])}
    record = {
        "sizes": SIZES, "recipe": str(TUNED), "resamples": RESAMPLES, "origin": task_networks.origin(arguments),
        "arms": arms,
    }  # fmt: skip
    write_results(NAME, record, page, arguments.out, pictures(record))


def compared(arm: Arm, number: int, data: Cifar100, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the networks of one start, and compare all pairs: ``similarities`` -> matrices, and figures of the page."""
    draw = task_networks.overlapping_tasks if arm.overlapping else task_networks.disjoint_tasks
    tasks = draw(SIZES["tasks"], number)
    common, truncation = task_networks.atomic(task_networks.start(arguments, number), arm.atoms)
    models, heads = trained(arm, number, data, tasks, common, arguments)
    tests = [data.test.of_classes(task) for task in tasks]
    probe = data.probe(tasks, SIZES["probe"])
    layers = task_networks.probed(models, probe)
    similarities = {name: np.mean(matrices, axis=0) for name, matrices in layers.items()}
    atoms = by_weights(models, FilterAtoms())
    (as_trained, orthonormal, first), in_first = GAUGES, copy.deepcopy(models)
    set_gauge(in_first, models[0])
    metrics: dict[str, Any] = {orthonormal: FilterAtoms(gauge="orthonormal"), WEIGHTS: WeightCosine()}
    others = networks.read("cifar10", "train", arguments.data_dir, SIZES["probe"])
    for name, images in ((PATCHES, others), (OWN_PATCHES, probe)):
        path = arguments.networks / f"{name}.safetensors"
        PatchCovariance.of(common, images.inputs().split(100)).save(path)
        metrics[name] = PatchCosine(covariance=str(path))
    if arm.atoms is not None:
        metrics[GRASSMANN] = Grassmann()
    similarities |= {as_trained: np.mean(atoms, axis=0), first: np.mean(by_weights(in_first, FilterAtoms()), axis=0)}
    similarities |= {name: np.mean(by_weights(models, metric), axis=0) for name, metric in metrics.items()}
    moved = np.mean(by_weights([common, *models], FilterAtoms()), axis=0)[0, 1:]
    similarities[MOVEMENT] = np.outer(moved, moved)
    similarities[SUPERCLASSES] = symmetric(
        len(tasks), lambda i, j: task_networks.overlap(tasks[i], tasks[j], data.superclasses)
    )
    if arm.overlapping:
        similarities[CLASSES] = symmetric(len(tasks), lambda i, j: task_networks.overlap(tasks[i], tasks[j]))
    ratio = np.array([upper(c) / upper(a) for c, a in zip(layers["cca"], atoms, strict=True)])
    return {
        "similarities": similarities, "pairs": {name: upper(matrix) for name, matrix in similarities.items()},
        "accuracy": [networks.accuracy(*pair) for pair in zip(models, tests, strict=True)],
        "head_accuracy": [networks.accuracy(*pair) for pair in zip(heads, tests, strict=True)] if heads else None,
        "moved": moved.tolist(), "truncation": truncation, "ratio": np.percentile(ratio, [5, 50, 95]),
    }  # fmt: skip


def trained(
    arm: Arm, number: int, data: Cifar100, tasks: Sequence[Task], common: nn.Module, arguments: argparse.Namespace
) -> tuple[list[nn.Module], list[nn.Module]]:  # fmt: skip
    """Train atoms and head on each task; in the paper's setting, also train the head alone."""
    recipe = replace(TUNED, frozen_statistics=arm.frozen, lr=arm.lr or TUNED.lr)
    kind = f"tiny10-start{number}-{arm.overlapping:d}{arm.frozen:d}{arm.atoms}"
    models, heads = [], []
    for place, task in enumerate(tasks):
        images, seed = data.train.of_classes(task), 100 * number + place
        path = arguments.networks / f"atoms-{kind}-task{place}.safetensors"
        models.append(task_networks.on_task(common, images, recipe, seed, path))
        if arm == ARMS[MAIN]:
            path = arguments.networks / f"head-{kind}-task{place}.safetensors"
            heads.append(task_networks.on_task(common, images, recipe, seed, path, head_only=True))
    return models, heads


def statistics(groups: Sequence[dict[str, Array]]) -> dict[str, Any]:
    """Correlate all similarities with the similarities of activations, with bootstrap intervals over networks."""
    for group in groups:
        group[EFFECTS] = additive(group[ATOM])
        for name in list(group):
            group[name + CENTRED] = group[name] - additive(group[name])
    predictors = [name for name in groups[0] if name not in TARGETS and not name.endswith(CENTRED)]
    r: dict[str, dict[str, Any]] = {}
    for name in predictors:
        r[name] = {}
        for target in TARGETS:
            r[name][f"{target} pearson"] = bootstrap(groups, correlations(name, target), RESAMPLES)
            r[name][f"{target} spearman"] = bootstrap(groups, correlations(name, target, spearman), RESAMPLES)
            if name not in (EFFECTS, MOVEMENT):
                both = correlations(name + CENTRED, target + CENTRED)
                r[name][f"{target} centred"] = bootstrap(groups, both, RESAMPLES)
    better = {
        rival: {
            "pearson": bootstrap(groups, difference(rival, WEIGHTS, "cka"), RESAMPLES),
            "spearman": bootstrap(groups, difference(rival, WEIGHTS, "cka", spearman), RESAMPLES),
            "centred": bootstrap(groups, difference(rival + CENTRED, WEIGHTS + CENTRED, "cka" + CENTRED), RESAMPLES),
        }
        for rival in RIVALS
    }
    subspaces = bootstrap(groups, correlations(ATOM, GRASSMANN), RESAMPLES) if GRASSMANN in groups[0] else None
    return {"r": r, "better": better, "grassmann": subspaces}


def pictures(record: Mapping[str, Any]) -> dict[str, Figure]:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, (target, title) in zip(figure.subplots(1, 2), TARGETS.items(), strict=True):
        for number, group in enumerate(record["arms"][MAIN]["groups"]):
            axes.scatter(group["pairs"][ATOM], group["pairs"][target], 12, label=f"start {number}")
        axes.set(xlabel=ATOM, ylabel=title)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return {NAME: figure}


LINEAR_IN_CKA, LINEAR_IN_CCA, LINEAR_IN_GRASSMANN, RIVALRY = study.stated(__file__)
LINEAR = {"cka": LINEAR_IN_CKA, "cca": LINEAR_IN_CCA}


def page(record: dict[str, Any]) -> str:
    sizes, arms = record["sizes"], record["arms"]
    kinds = {"Pearson": "pearson", "Spearman": "spearman", "Pearson, own means removed": "centred"}
    return filled(
        __file__, claims(record), origin=record["origin"], tasks=sizes["tasks"], recipe=record["recipe"],
        positions=sizes["positions"], probe=sizes["probe"], resamples=record["resamples"], effects=EFFECTS,
        movement=MOVEMENT, patches=PATCHES, own_patches=OWN_PATCHES, main=MAIN,
        arms="\n".join(f"- **{name}**: {_about(name, arm['groups'])}" for name, arm in arms.items()),
        moved="; ".join(_moved(name, arm) for name, arm in arms.items())
        + f". The rule: they have moved if the mean S_Atom is at most {MOVED:g}.",
        tables="\n\n".join(
            f"Arm **{name}**, {len(_atoms(arm))} pairs:\n\n" + table(arm["r"].items(), {"predictor": "{0}"} | {
                f"{title}, {about}": lambda _, r, key=f"{target} {kind}": cell(r.get(key))
                for target, title in TARGETS.items() for about, kind in kinds.items()
            }) + (f"\n\nS_Atom and S_Gras: r = {cell(arm['grassmann'])}." if arm["grassmann"] else "")
            for name, arm in arms.items()
        ),
        answer=answer(record),
        better=table(
            [(name, rival, figures) for name, arm in arms.items() for rival, figures in arm["better"].items()],
            {"arm": "{0}", "similarity": "{1}"} | {
                "difference of r with CKA, " * (kind == "pearson") + about: lambda *row, kind=kind: cell(row[2][kind])
                for about, kind in kinds.items()
            },
        ),
        ratio=" / ".join(f"{value:.3f}" for value in arms[MAIN]["groups"][0]["ratio"]),
    )  # fmt: skip


def _about(name: str, groups: Sequence[Mapping[str, Any]]) -> str:
    worst = max(group["truncation"] for group in groups)
    error = f"; relative error of the weights of the worst layer {worst:.2f}" if worst > 1e-3 else ""
    return f"{ARMS[name].about}; {len(groups)} start{'s' * (len(groups) > 1)}{error}"


def _atoms(arm: Mapping[str, Any]) -> Array:
    return np.concatenate([group["pairs"][ATOM] for group in arm["groups"]])


def _moved(name: str, arm: Mapping[str, Any]) -> str:
    """Report the distance and the accuracy of the networks."""
    atoms, accuracy = _atoms(arm), {
        key: np.mean([value for group in arm["groups"] for value in group[key]])
        for key in ("accuracy", "head_accuracy") if arm["groups"][0][key]
    }  # fmt: skip
    text = f"{name}: mean S_Atom {atoms.mean():.3f} ({atoms.min():.3f} to {atoms.max():.3f})"
    head = f" (with the head alone trained {accuracy['head_accuracy']:.3f})" if "head_accuracy" in accuracy else ""
    return f"{text}, accuracy {accuracy['accuracy']:.3f}{head}"


def better_in(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the rivals that predict CKA better than the cosine of the weights: arm -> rivals."""
    winners = {}
    for name in (MAIN, "overlapping"):
        better = record["arms"][name]["better"]
        winners[name] = [rival for rival in RIVALS if (better[rival]["pearson"]["low"] or 0) > MARGIN]
    return winners


def answer(record: Mapping[str, Any]) -> str:
    """Report the similarities that predict CKA better than the cosine of the weights."""
    better = better_in(record)
    both = [rival for rival in RIVALS if all(rival in some for some in better.values())]
    rule = (
        "The rule: the interval of the difference of Pearson's r is above .001, with disjoint and with overlapping "
        "tasks."
    )
    if both:
        return f"Yes: {', '.join(both)}. {rule}"
    some = " ".join(f"Better with {name} tasks only: {', '.join(rivals)}." for name, rivals in better.items() if rivals)
    return f"No. {some or 'None is better with either kind of tasks.'} {rule}"


def decided(record: Mapping[str, Any]) -> dict[str, list[bool | None]]:
    """Return by similarity whether the interval of r is above the bound, and whether it is above 0."""
    arms = record["arms"]
    parts = {target: _parts(arms[MAIN], arms[MAIN]["r"][ATOM][f"{target} pearson"]) for target in TARGETS}
    return {**parts, GRASSMANN: _parts(arms[SIX], arms[SIX]["grassmann"])}


def _parts(arm: Mapping[str, Any], interval: Mapping[str, Any]) -> list[bool | None]:
    if _atoms(arm).mean() > MOVED or interval["low"] is None:
        return [None]
    return [interval["low"] > CONFIRMED, interval["low"] > 0]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    parts, arms = decided(record), record["arms"]
    r, count = arms[MAIN]["r"], record["sizes"]["tasks"]

    def n(arm: str) -> str:
        return f"{len(_atoms(arms[arm]))} pairs of {len(arms[arm]['groups'])} × {count} networks"

    rows = []
    for target, claim in LINEAR.items():
        ours = (
            f"r = {cell(r[ATOM][f'{target} pearson'])}; own means removed {cell(r[ATOM][f'{target} centred'])}; "
            f"cosine of the weights {cell(r[WEIGHTS][f'{target} pearson'])}"
        )
        rows.append(claim.of("").row(ours, n(MAIN), parts[target], count))
    six = arms[SIX]
    measured = [(claim, six["r"][ATOM][f"{target} pearson"]) for target, claim in LINEAR.items()]
    for claim, interval in [*measured, (LINEAR_IN_GRASSMANN, six["grassmann"])]:
        rows.append(claim.of(" (6 atoms)").row(f"r = {cell(interval)}", n(SIX), _parts(six, interval), count))
    winners = better_in(record)
    shares = [[rival in some for some in winners.values()] for rival in RIVALS]
    ours = (
        f"{PATCHES} r = {cell(r[PATCHES]['cka pearson'])}, cosine of the weights {cell(r[WEIGHTS]['cka pearson'])}, "
        f"difference {cell(arms[MAIN]['better'][PATCHES]['pearson'])}; with overlapping tasks "
        f"{cell(arms['overlapping']['better'][PATCHES]['pearson'])}"
    )
    return [*rows, RIVALRY.row(ours, n(MAIN), [any(map(all, shares)), any(map(any, shares))], count)]
