"""Experiment 1: least squares and task-loss matching at every layer (Csiszárik et al. 2021, figure 2).

Task loss starts from least squares, from least squares with the covariance of the target, or uses hard instead of soft
labels.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import study
from dr_frankenstein import experiment, frankenstein
from dr_frankenstein.experiment import CUTS, TASK, TITLES, Sizes, scored

SIZES = {
    "tiny10": Sizes(6_000, 4_000, 2, lr=3e-3, schedule="cosine", batch=64),
    "resnet20": Sizes(8_000, 5_000, 1, lr=3e-3, schedule="cosine", batch=64),
}
DIRECT = frankenstein.START
RECOLOURED, HARD = "task loss from recoloured", "task loss, hard labels"
STARTS = {"tiny10": (TASK, RECOLOURED, HARD), "resnet20": (TASK, RECOLOURED)}
"""Variants of task-loss matching for each architecture."""
NEAR, COLLAPSED = 0.95, 0.5
"""From the first relative accuracy, a layer is aligned nearly perfectly; below the second, it has collapsed."""
CORRELATED = 0.95
"""Minimum correlation over layers and pairs for "very highly correlated" labels."""


def main() -> None:
    arguments = experiment.read(__doc__)
    architectures = {architecture: measured(architecture, arguments) for architecture in CUTS}
    record = {"preset": SIZES, "architectures": architectures, "networks": experiment.origin(arguments)}
    study.write_results("matching", record, page, arguments.out)


def measured(architecture: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Stitch each network to the next one at every layer, and collect all scores by method and layer."""
    sizes, layers, starts = SIZES[architecture], CUTS[architecture], STARTS[architecture]
    networks, task_loss = experiment.loaded(architecture, arguments), sizes.task_loss
    recoloured, hard = replace(task_loss, initial="recoloured"), replace(task_loss, labels="hard")
    variants = {TASK: task_loss, RECOLOURED: recoloured, HARD: hard}
    pairs = frankenstein.ring(networks)
    answers = frankenstein.answers(
        networks, pairs, layers, *sizes.samples(arguments.data_dir),
        direct={}, trained={name: variants[name] for name in starts},
    )  # fmt: skip
    methods = (DIRECT, *starts, *frankenstein.BASELINES)
    return {
        "setting": str(sizes), "pairs": [f"{a} → {b}" for a, b in pairs], "layers": list(layers),
        "target_accuracy": (answers.targets.argmax(-1) == answers.labels).double().mean(1).tolist(),
        "relative_accuracy": {method: [answers.relative(layer, method) for layer in layers] for method in methods},
        "by_pair": {method: [answers.by_pair(layer, method) for layer in layers] for method in (DIRECT, *starts)},
        "gain": [answers.relative(layer, TASK, DIRECT) for layer in layers],
        "gain_of_start": [answers.relative(layer, RECOLOURED, TASK) for layer in layers],
        "cross_entropy": {m: [answers.imitation(layer, m) for layer in layers] for m in ("identity", DIRECT, *starts)},
    }  # fmt: skip


NOT_COLLAPSED, PERFECT, WORSE, LABELS = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    tiny10 = record["architectures"]["tiny10"]
    return experiment.written(
        __file__, record, claims(record), near=NEAR, collapsed=COLLAPSED,
        below=len(tiny10["layers"]) - _near(tiny10),
        architectures="\n\n".join(_section(*named_run) for named_run in record["architectures"].items()),
    )  # fmt: skip


def _section(architecture: str, run: dict[str, Any]) -> str:
    starts, rows = STARTS[architecture], []
    relative, losses = run["relative_accuracy"], run["cross_entropy"]
    for i, layer in enumerate(run["layers"]):
        cells: list[object] = [layer]
        for method in (DIRECT, *starts):
            cells += [scored(relative[method][i]), f"{np.std(run['by_pair'][method][i], ddof=1):.3f}"]
        cells += [scored(run["gain"][i]), *(f"{relative[name][i]['value']:.3f}" for name in frankenstein.BASELINES)]
        rows.append([*cells, " / ".join(f"{losses[m][i]['value']:.2f}" for m in ("identity", DIRECT, TASK))])
    header = ["layer", *(name for method in (DIRECT, *starts) for name in (method, "sd")), "gain by task loss",
              "identity", "mean only", "cross-entropy with the target: none / least squares / task loss"]  # fmt: skip
    return "\n\n".join([
        f"## {TITLES[architecture]}",
        f"{len(run['pairs'])} pairs ({', '.join(run['pairs'])}); {run['setting']}; accuracy of the targets "
        f"{study.span(run['target_accuracy'], '.4f')}.",
        study.markdown(header, rows), _findings(architecture, run),
    ])  # fmt: skip


def _findings(architecture: str, run: dict[str, Any]) -> str:
    layers = run["layers"]
    task, gains = ([scored(score) for score in some] for some in (run["relative_accuracy"][TASK], run["gain"]))
    start = [score["value"] for score in run["gain_of_start"]]
    worst = min(range(len(layers)), key=lambda i: task[i].value)
    best = max(range(len(layers)), key=lambda i: gains[i].value)
    worse = [layer for layer, gain in zip(layers, gains, strict=True) if gain.low > 0]
    text = study.text(__file__, "findings").format(
        task=np.mean([score.value for score in task]), worst_at=layers[worst], worst=task[worst], near_at=NEAR,
        near=_near(run), layers=len(layers), worse=", ".join(worse) if worse else "no layer", gain=gains[best],
        gain_at=layers[best], least=min(gains, key=lambda gain: gain.value), start=np.mean(start),
        span=study.span(start, "+.3f"),
    )  # fmt: skip
    if HARD in STARTS[architecture]:
        correlation, gap = labels(run)
        text += "\n" + study.text(__file__, "labels").format(correlation=correlation["value"], gap=gap)
    return text


def _near(run: dict[str, Any]) -> int:
    return sum(score["value"] >= NEAR for score in run["relative_accuracy"][TASK])


def labels(run: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the correlation between soft and hard labels, and the largest difference of a layer."""
    soft, hard = (np.array(run["by_pair"][name]) for name in (TASK, HARD))
    drawn = study.network_weights([tuple(pair.split(" → ")) for pair in run["pairs"]])
    weights = np.vstack([np.full(len(run["pairs"]), 1 / len(run["pairs"])), drawn]) / len(soft)  # of all cells

    def covariance(x: Any, y: Any) -> Any:
        mean_x, mean_y = ((weights @ cells.T).sum(1) for cells in (x, y))
        return (weights @ (x * y).T).sum(1) - mean_x * mean_y

    correlations = covariance(soft, hard) / np.sqrt(covariance(soft, soft) * covariance(hard, hard))
    low, high = np.quantile(correlations[1:], [0.025, 0.975])
    gap = float(np.abs(soft.mean(1) - hard.mean(1)).max())
    return {"value": float(correlations[0]), "low": float(low), "high": float(high)}, gap


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for architecture, run in record["architectures"].items():
        n, units = experiment.counted(run["pairs"])
        n += f", {len(run['layers'])} layers"
        task, direct = (run["relative_accuracy"][method] for method in (TASK, DIRECT))
        aligned, least = (PERFECT, NEAR) if architecture == "resnet20" else (NOT_COLLAPSED, COLLAPSED)
        span = study.span(score["value"] for score in task)
        rows.append(aligned.row(span, n, [study.above(score, least) for score in task], units))
        room = [gain for gain, score in zip(run["gain"], direct, strict=True) if study.below(score, 1)]
        worse = [study.above(gain, 0) for gain in room]
        span = study.span(gain["value"] for gain in room)
        ours = f"gain {span} where there is room; worse at {worse.count(True)} of {len(room)} layers"
        rows.append(WORSE.of(TITLES[architecture]).row(ours, n, worse, units))
        if HARD in STARTS[architecture]:
            correlation, gap = labels(run)
            ours = f"r = {study.shown(correlation)}, difference at most {gap:.3f}"
            rows.append(LABELS.row(ours, n, [study.above(correlation, CORRELATED)], units))
    return rows
