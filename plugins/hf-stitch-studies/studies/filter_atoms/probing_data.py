"""What other probing data do to similarities of the same networks (Chen, Miao & Qiu 2023, section 3.1, figure 3b).

python -m filter_atoms.probing_data --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from filter_atoms import correlation, networks, task_networks
from filter_atoms.correlation import ARMS, MAIN, TARGETS
from filter_atoms.experiment import OPTIONS, Claim, filled, leave
from filter_atoms.networks import TITLES
from filter_atoms.pairwise import Array, Interval, bootstrap, correlations, mean_of, shown, spearman, upper
from filter_atoms.task_networks import PRESETS, Cifar100
from hf_stitch_filter_atoms import FilterAtoms
from study import parser, table

NAME = "probing_data"
OWN = "cifar100"
IN_DISTRIBUTION = "cifar10"  # probing data on which the networks began
OTHERS = {"cifar10": TITLES["cifar10"], "fashion_mnist": "Fashion-MNIST (for SVHN)", "mnist": "MNIST (for CelebA)",
          "noise": "uniform noise"}  # fmt: skip
FALL = 0.1
"""A similarity falls if its mean is lower by more than this, and so is the whole interval of the difference than 0."""


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    sizes = PRESETS[arguments.preset]
    data = Cifar100.read(arguments.data_dir)
    tasks = task_networks.disjoint_tasks(sizes.tasks, 0)
    common, _ = task_networks.atomic(task_networks.start(arguments, sizes, 0))
    models, _ = correlation.trained(ARMS[MAIN], 0, sizes, data, tasks, common, arguments)
    atoms = np.mean(task_networks.by_weights(models, FilterAtoms()), axis=0)
    resamples = 50 if arguments.preset == "test" else 1000
    layers = len(task_networks.spatial(common))
    groups: dict[str, dict[str, Array]] = {}
    found: dict[str, dict[str, dict[str, Interval]]] = {}
    own = data.probe(tasks, sizes.probe)
    probes = {OWN: own, "noise": networks.noise(len(own))} | {
        name: networks.read(name, "test", arguments.data_dir, len(own)) for name in OTHERS if name != "noise"
    }
    for name in (OWN, *OTHERS):
        probe = probes[name]
        by_layer = task_networks.probed(models, probe, sizes.positions)
        groups[name] = {"atom": atoms, **{target: np.mean(by_layer[target], axis=0) for target in TARGETS}}
    for name, group in groups.items():
        found[name] = {}
        for target in TARGETS:
            both = {"here": group[target], "own": groups[OWN][target]}
            found[name][target] = {
                "mean": bootstrap([group], mean_of(target), resamples),
                "fall": bootstrap([both], lambda pairs: float((pairs("own") - pairs("here")).mean()), resamples),
                "spearman_own": bootstrap([both], correlations("here", "own", spearman), resamples),
                "pearson_atom": bootstrap([group], correlations("atom", target), resamples),
            }
    record = {
        "preset": arguments.preset, "sizes": sizes, "origin": task_networks.origin(arguments, sizes), "layers": layers,
        "recipe": str(sizes.recipe), "atom": {"mean": upper(atoms).mean(), "sd": upper(atoms).std()}, "probes": found,
    }  # fmt: skip
    leave(NAME, record, page, {}, arguments.out)


FALLS = {
    target: Claim(
        "section 3.1, figure 3b", f"{title} falls with other probing data, S_Atom does not.",
        {"cca": ".8 → .59", "cka": "lower (plot)"}[target],
        f"with each other data set of images, the mean falls by more than {FALL:g}, and the interval of the fall is "
        "above 0; "
        f"not known for {TITLES[IN_DISTRIBUTION]}, on which these networks began",
    )
    for target, title in TARGETS.items()
}  # fmt: skip

PAGE = """# Other probing data

**What to do**: choose probes from the data on which networks are used. CKA and CCA are similarities on these data;
S_Atom, which needs none, cannot show where networks differ on others.

{verdicts}

{title}, section 3.1, figure 3b: CCA of networks trained on CIFAR-100 is above .8 with probes from CIFAR-100, and .59
with others (CIFAR-10, SVHN, CelebA); CKA changes likewise. S_Atom needs no probe, and is .91.

{demonstration} The networks are those of [correlation](correlation.md), first start, arm "{main}": {origin}; atoms and
head trained on {tasks} disjoint tasks ({recipe}). The same pairs of networks, {layers} layers and {probe} test images
of each data set. SVHN and CelebA are not at hand. Grey images leave fewer directions of the first layer, and CCA is the
mean over those. Intervals: 95%, from a bootstrap over networks.

{table}

S_Atom is {atom} whatever the probe, since it has none. **Constancy is blindness too**: where networks differ in what
they do with images of another kind, S_Atom cannot show it (see [blindness](blindness.md)). A similarity that depends on
data answers another question: how alike two networks are *on these data*.

The rule of a fall was written before these figures were seen. Until this version, both claims were refuted; but these
networks began with weights that were trained on CIFAR-10, so that this probe is in distribution, and SVHN and CelebA,
which the paper names beside it, are not at hand. What a decision takes: networks trained on CIFAR-100 from scratch, and
SVHN.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    figures = {", mean": "mean", ": fall": "fall", ": rank correlation with that on CIFAR-100": "spearman_own",
               ": r with S_Atom": "pearson_atom"}  # fmt: skip

    def cell(name: str, found: Mapping[str, Any], target: str, key: str) -> str:
        return "–" if name == OWN and key in ("fall", "spearman_own") else shown(found[target][key])

    return filled(
        PAGE, NAME, claims(record), main=MAIN, tasks=record["sizes"]["tasks"], probe=record["sizes"]["probe"],
        **{key: record[key] for key in ("origin", "recipe", "layers")},
        table=table(
            record["probes"].items(),
            {"probe": lambda name, _: {OWN: TITLES[OWN], **OTHERS}[name]}
            | {f"{title}{about}": partial(cell, target=target, key=key)
               for target, title in TARGETS.items() for about, key in figures.items()},
        ),
        atom=f"{record['atom']['mean']:.3f} ± {record['atom']['sd']:.3f} (standard deviation of the pairs)",
    )  # fmt: skip


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    count, rows = record["sizes"]["tasks"], []
    for target, claim in FALLS.items():
        means = " / ".join(f"{record['probes'][name][target]['mean']['value']:.2f}" for name in (OWN, *OTHERS))
        ours = f"{means} ({', '.join((TITLES[OWN], *OTHERS.values()))}); S_Atom {record['atom']['mean']:.2f}"
        falls = {name: record["probes"][name][target]["fall"] for name in OTHERS if name != "noise"}
        parts = [
            None if name == IN_DISTRIBUTION else fall["value"] > FALL and fall["low"] > 0
            for name, fall in falls.items()
        ]
        rows.append(claim.row(ours, f"{count * (count - 1) // 2} pairs", parts, count))
    return rows


if __name__ == "__main__":
    main()
