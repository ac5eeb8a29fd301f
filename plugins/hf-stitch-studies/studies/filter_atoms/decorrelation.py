"""Does a penalty on correlated channels bring CCA and S_Atom closer (Chen, Miao & Qiu 2023, appendix A.3, figure 8b)?

python -m filter_atoms.decorrelation --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import study
import torch
from filter_atoms import networks, task_networks
from filter_atoms.experiment import OPTIONS, Claim, filled, leave
from filter_atoms.pairwise import Array, additive, bootstrap, correlations, shown, upper
from filter_atoms.task_networks import PRESETS, Cifar100, Sizes
from hf_stitch_filter_atoms import FilterAtoms, channel_decorrelation
from matplotlib.figure import Figure
from study import parser, table
from torch import Tensor, nn

NAME = "decorrelation"
STRENGTHS = {"small": (0.0, 0.001, 0.01, 0.1, 1.0), "paper": (0.0, 0.001, 0.003, 0.01, 0.03, 0.1), "test": (0.0, 0.1)}
EPOCHS = {"small": 15, "paper": 100, "test": 1}
STARTS = {"small": 1, "paper": 3, "test": 1}
KEPT = 0.9  # strengths count with which networks keep this share of the accuracy that they have without the penalty
LEAST = 3  # fewest strengths that must count
ROWS = 256  # positions of a batch, drawn at random, on which the penalty is computed


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    chosen = PRESETS[arguments.preset]
    sizes = replace(chosen, recipe=replace(chosen.recipe, epochs=EPOCHS[arguments.preset]))
    data = Cifar100.read(arguments.data_dir)
    resamples = 50 if arguments.preset == "test" else 1000
    found = []
    for strength in STRENGTHS[arguments.preset]:
        runs = [compared(strength, n, sizes, data, arguments) for n in range(STARTS[arguments.preset])]
        groups = [run["similarities"] for run in runs]
        r = {
            f"{target}{end}": bootstrap(groups, correlations(f"atom{end}", f"{target}{end}"), resamples)
            for target in ("cca", "cka") for end in ("", " centred")
        }  # fmt: skip
        means = {key: float(np.mean([run[key] for run in runs])) for key in ("accuracy", "correlation_of_channels")}
        atoms = np.concatenate([upper(group["atom"]) for group in groups])
        found.append({"strength": strength, "r": r, "atom": atoms.mean(), **means})
    record = {
        "preset": arguments.preset, "sizes": sizes, "recipe": str(sizes.recipe), "strengths": found,
        "origin": task_networks.origin(arguments, sizes), "starts": STARTS[arguments.preset],
    }  # fmt: skip
    leave(NAME, record, page, {NAME: picture(found)}, arguments.out)


def scaled(rows: Tensor) -> Tensor:
    """Scale the channels of activations ``(n, channels)`` to norm 1, so that ZᵀZ contains (uncentred) correlations."""
    return rows / rows.norm(dim=0).clamp_min(1e-6)


def penalty(strength: float, network: nn.Module) -> Callable[[], Tensor]:
    """Return the penalty of the outputs of all convolutions in the last forward pass, averaged over layers."""
    kept: dict[str, Tensor] = {}

    def keep(layer: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        rows = output.movedim(1, 3).flatten(0, 2)
        kept[layer] = rows[torch.randint(0, len(rows), (ROWS,))].float()

    layers = task_networks.spatial(network)
    for layer in layers:
        network.get_submodule(layer).register_forward_hook(partial(keep, layer))
    return lambda: strength / len(layers) * torch.stack(
        [channel_decorrelation(scaled(kept[layer])) for layer in layers]
    ).sum()  # fmt: skip


def compared(
    strength: float, number: int, sizes: Sizes, data: Cifar100, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train the networks of one start with a penalty, and compare all pairs."""
    tasks = task_networks.disjoint_tasks(sizes.tasks, number)
    common, _ = task_networks.atomic(task_networks.start(arguments, sizes, number))
    models = []
    for place, task in enumerate(tasks):
        path = arguments.networks / f"decorrelated-{arguments.preset}-{number}-{strength:g}-task{place}.safetensors"
        images, seed = data.train.of_classes(task), 100 * number + place
        torch.manual_seed(seed)  # of the positions
        term = partial(penalty, strength) if strength else None
        models.append(task_networks.on_task(common, images, sizes.recipe, seed, path, penalty=term))
    probe = data.probe(tasks, sizes.probe)
    found: dict[str, Array] = {
        name: np.mean(matrices, axis=0)
        for name, matrices in task_networks.probed(models, probe, sizes.positions).items()
    }
    found["atom"] = np.mean(task_networks.by_weights(models, FilterAtoms()), axis=0)
    found |= {f"{name} centred": matrix - additive(matrix) for name, matrix in found.items()}
    tests = [data.test.of_classes(task) for task in tasks]
    return {
        "similarities": found,
        "accuracy": np.mean([networks.accuracy(*pair) for pair in zip(models, tests, strict=True)]),
        "correlation_of_channels": np.mean([off_diagonal(model, probe, sizes) for model in models]),
    }


def off_diagonal(model: nn.Module, probe: networks.Images, sizes: Sizes) -> float:
    """Return the mean absolute (uncentred) correlation of two channels, over all layers."""
    rows = task_networks.features(model, task_networks.spatial(model), probe, sizes.positions).values()
    grams = [(scaled(each).T @ scaled(each)).abs() for each in rows]
    return float(np.mean([(gram.sum() - gram.trace()) / (len(gram) * (len(gram) - 1)) for gram in grams]))


def picture(found: list[dict[str, Any]]) -> Figure:
    """Draw figure 8b: the correlation of CCA and S_Atom against the strength of the penalty."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(found))
    for target in ("cca", "cka"):
        intervals = [each["r"][target] for each in found]
        errors = [[i.value - i.low for i in intervals], [i.high - i.value for i in intervals]]
        axes.errorbar(places, [i.value for i in intervals], np.abs(errors), marker="o", capsize=3, label=target.upper())
    axes.set_xticks(places, [f"{each['strength']:g}" for each in found])
    axes.set(xlabel="β", ylabel="r with S_Atom")
    axes.legend(frameon=False)
    return figure


CLOSER = Claim(
    "appendix A.3, figure 8b", "Decorrelated channels bring CCA and S_Atom closer.", "r up to .985",
    "r with CCA rises from each β to the next, and the difference of the greatest and the least is above 0, by the "
    "interval; "
    f"not known with fewer than {LEAST} strengths with which networks keep {KEPT:.0%} of their accuracy",
)  # fmt: skip

PAGE = """# Decorrelated channels

**What to do**: do not add the penalty to make S_Atom follow CCA: already weak ones destroy what small networks learn,
and whether it helps is open.

{verdicts}

{title}, appendix A.3, figure 8b: with a penalty β Σ_{{i≠j}} (ZᵀZ)²_ij on the outputs Z of the convolutions, the
correlation of CCA and S_Atom rises with β, to .985 at β = 3·10⁻³.

{demonstration} Setting of [correlation](correlation.md), arm "disjoint", with fewer epochs: {origin}; {tasks} tasks,
{starts}; {recipe}. The paper does not say how Z is scaled, nor over how many rows it sums: here each channel has
norm 1 over {rows} positions drawn from the batch, so that ZᵀZ contains correlations, and the penalty is averaged over
layers; β is not comparable with the paper's. Intervals: 95%, from a bootstrap over networks.

{table}

Strengths that count were added to the rule, with those below .1, after a first run with 0, .1 and 1, in which the
penalty destroyed what networks had learnt; their least number after all figures were seen: a rise cannot be told from
the noise of two. Here {counted} count. A difference replaces intervals that do not overlap.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    r = {"r with CCA": "cca", "r with CKA": "cka", "r with CCA, own means removed": "cca centred",
         "r with CKA, own means removed": "cka centred"}  # fmt: skip
    return filled(
        PAGE, NAME, claims(record), origin=record["origin"], tasks=record["sizes"]["tasks"], rows=ROWS,
        starts=f"{record['starts']} start{'s' * (record['starts'] > 1)}", recipe=record["recipe"],
        counted=len(_counted(record)),
        table=table(
            record["strengths"],
            {"β": "{strength:g}", "mean absolute correlation of channels": "{correlation_of_channels:.3f}",
             "accuracy": "{accuracy:.3f}", "mean S_Atom": "{atom:.3f}"}
            | {title: lambda each, key=key: shown(each["r"][key]) for title, key in r.items()},
        ),
    )  # fmt: skip


def _counted(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the strengths that count."""
    least = KEPT * record["strengths"][0]["accuracy"]
    return [each for each in record["strengths"] if each["accuracy"] >= least]


def decided(record: Mapping[str, Any]) -> list[bool | None]:
    """Return whether the correlation rises at all, from each strength to the next, and from the first to the last."""
    r = [each["r"]["cca"] for each in _counted(record)]
    if len(r) < LEAST or any(interval["low"] is None for interval in r):
        return [None]
    rises = all(after["value"] > before["value"] for before, after in pairwise(r))
    return [r[-1]["value"] > r[0]["value"], rises and study.difference(r[-1], r[0])["low"] > 0]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    first, *_, last = (record["strengths"][0], *_counted(record))
    tasks, starts = record["sizes"]["tasks"], record["starts"]
    ours = f"β = 0: r = {shown(first['r']['cca'])}; β = {last['strength']:g}: {shown(last['r']['cca'])}"
    n = f"{starts * tasks * (tasks - 1) // 2} pairs for each β"
    return [CLOSER.row(ours, n, decided(record), tasks)]


if __name__ == "__main__":
    main()
