"""Which similarity predicts functional differences (Balogh & Jelasity 2025, tables 2 and 3, after Ding et al. 2021)?

Distances of representations are correlated with differences of linear probing accuracy. Sensitivity: low-rank
approximations of the last layers of all networks. Specificity: all layers of all networks. Beside the measures stand
distances that know nothing of the activations, in depth and in rank.

    python examples/how_not_to_stitch/bench.py --data-dir DATA --networks NETWORKS --out OUT
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file

import hf_stitch
from hf_stitch.analysis import Bench, Score
from hf_stitch.analysis.bench.correlation import RELIABILITY

sys.path.insert(0, str(Path(__file__).parents[1] / "dr_frankenstein"))
import images
import networks

METRICS = (
    "linear_cka:debiased=True", "pwcca:directions=all", "procrustes", "svcca", "cca:ridge=0.01", "rsa", "mutual_knn",
    "linear_regression", "soft_matching", "shape_distance:alpha=0.5",
)  # fmt: skip
MATCHERS = ("lstsq", "recoloured", "procrustes")
LAST = {"Tiny-10": networks.Tiny10.cuts[-4:], "ViT": networks.VIT_CUTS[-3:]}
"""Layers of the sensitivity test. The paper takes the last 4 of 8 blocks of ResNet-18, the last 6 of 12 of ViT-Ti."""
PUBLISHED = {
    "sensitivity": {
        "Tiny-10": {"linear_cka": (0.569, 0.722), "pwcca": (0.628, 0.777), "procrustes": (0.548, 0.718),
                    "lstsq, structural": (0.658, 0.807), "lstsq, functional": (0.790, 0.917)},
        "ViT": {"linear_cka": (0.485, 0.632), "pwcca": (0.826, 0.945), "procrustes": (0.732, 0.862),
                "lstsq, structural": (0.786, 0.906), "lstsq, functional": (0.745, 0.889)},
    },
    "specificity": {
        "Tiny-10": {"linear_cka": (0.859, 0.970), "pwcca": (0.729, 0.896), "procrustes": (0.768, 0.920),
                    "lstsq, structural": (0.876, 0.975), "lstsq, functional": (0.857, 0.970)},
        "ViT": {"linear_cka": (0.719, 0.870), "pwcca": (0.650, 0.785), "procrustes": (0.531, 0.682),
                "lstsq, structural": (0.664, 0.802), "lstsq, functional": (0.782, 0.921)},
    },
}  # fmt: skip
"""τ and ρ of the paper on CIFAR-10, of ResNet-18 and of ViT-Ti: test -> our family of networks -> measure."""
PRESETS = {
    "small": {"train": 5000, "test": 1000, "references": 5, "functional_samples": 300},
    "paper": {"train": 50_000, "test": 10_000, "references": 10, "functional_samples": 100},
    "test": {"train": 150, "test": 60, "references": 2, "functional_samples": 100},
}
"""Images, references, and images to which stitched models are fitted."""


def main() -> None:
    """Run the experiment from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--networks", type=Path, required=True, help="folder with safetensors files of Tiny-10 networks"
    )
    parser.add_argument("--vits", type=Path, help="folder with safetensors files of networks.small_vit, at least three")
    parser.add_argument("--data-dir", help="local folder with cifar10/<split>.parquet; default: the Hub")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--out", type=Path, help="output folder for the page and its figures as JSON")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    train, test = (images.samples("cifar10", split, preset[split], arguments.data_dir) for split in ("train", "test"))
    folders = {"Tiny-10": arguments.networks} | ({"ViT": arguments.vits} if arguments.vits else {})
    record: dict[str, Any] = {"preset": {"name": arguments.preset, **preset}, "families": {}}
    for family, folder in folders.items():
        start = time.process_time()
        found = measured(family, loaded(family, folder), train, test, preset)
        Console(width=140).print(found)
        record["families"][family] = {**summary(found), "seconds": round(time.process_time() - start)}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
        (arguments.out / "bench.md").write_text(page(json.loads(json.dumps(record))))


def loaded(family: str, folder: Path) -> dict[str, hf_stitch.Adapter]:
    """Load the trained networks of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if family == "Tiny-10":
            network: Any = networks.Tiny10.from_file(path)
        else:
            network = networks.small_vit()
            network.load_state_dict(load_file(path))
        found[path.stem] = networks.adapted(network)
    return found


def measured(
    family: str,
    adapters: dict[str, hf_stitch.Adapter],
    train: hf_stitch.Samples,
    test: hf_stitch.Samples,
    preset: dict[str, int],
) -> Bench:
    """Run the bench on the networks of one family."""
    vit = family == "ViT"
    return hf_stitch.bench(
        adapters, train, test_data=test, layers=networks.VIT_CUTS if vit else networks.Tiny10.cuts,
        sensitivity_layers=LAST[family], pooling="cls" if vit else "mean", metrics=METRICS, matchers=MATCHERS,
        functional=MATCHERS, functional_samples=preset["functional_samples"], references=preset["references"],
        task="image-classification", batch_size=200,
    )  # fmt: skip


def summary(found: Bench) -> dict[str, Any]:
    """Return the figures of the page as JSON values.

    Returns:
        ``scores``: test -> method -> its record; ``accuracies``: layer -> probing accuracy, mean over networks;
        ``references``: group -> the best reference; ``undefined``: method -> number of pairs and the most
        frequent reason.
    """
    record = found.to_dict()
    specificity = found.groups[-1]
    accuracies = {
        layer: round(float(specificity.accuracy[[own == layer for own in specificity.layers]].mean()), 4)
        for layer in found.layers
    }
    references = {
        group.layer or "specificity": [group.networks[group.references[0]], group.layers[group.references[0]]]
        for group in found.groups
    }
    undefined = {
        method: [sum(reasons.values()), max(reasons, key=lambda reason: reasons[reason])]
        for method, reasons in found.undefined.items()
    }
    return {
        "networks": len(found.networks), "layers": list(found.layers), "pooling": found.pooling, "n": found.n,
        "scores": _rounded(record["scores"]), "accuracies": accuracies, "references": references,
        "undefined": undefined,
    }  # fmt: skip


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


PAGE = """# Which similarity predicts functional differences? (Balogh & Jelasity, AAAI 2025, tables 2 and 3)

The test of Ding et al. (2021): a distance d of representations is good if it ranks them as the difference of their
linear probing accuracies F does. A is the representation with the best F. The tables have Kendall's τ and Spearman's
ρ of d(A, B) and |F(A) − F(B)|.

- *Sensitivity*: B are low-rank approximations of one layer of all networks, at the paper's ranks by width; the basis is
  that of the training images. τ is the mean over the last layers ({last}). Within one network, every distance that
  grows as the rank falls ties at τ .937, so that only several networks tell distances apart.
- *Specificity*: B are all layers of all networks.

Here: CIFAR-10, {train} training images (probes, bases, stitches on pooled features), {test} test images. A is chosen
on half of the test images, among representations of full rank; F and d are those of the other half. No network is
compared with itself. 95% intervals: a jackknife that leaves out one network at a time, with another A if its
network is left out; they cover the choice of networks, not of images. "references": smallest and largest τ, if A is the
best representation of each of the {references} best networks. "rank only" and "depth only" know nothing of the
activations. **A measure beats one of them if the lower end of the interval of the difference of τ is above 0**, a rule
that was fixed before any figure was seen; one that does not has shown nothing. A row in bold beats each of the two
that is defined. "depth only" is constant within a layer, so it is undefined for sensitivity; "rank only" is the
difference of widths in the specificity test. "probing, other half", a row that was added later, is the difference of F
itself on the half of the images that chose A: how far F predicts itself. A distance without noise may exceed it a
little.

Metrics have the reference as their first argument; a similarity s is the distance 1 − s. *Structural*: relative squared
error on test images of the stitch from B to A, fitted to pooled training features. *Functional*: 1 minus the relative
accuracy of the stitched model, all positions, fitted to {functional_samples} images; low-rank approximations of a
layer were not stitched, so there is no functional row for sensitivity.
{families}
This page and [its figures as JSON](bench.json) are written by the command (preset {name}, CPU time: {seconds}):

```
python examples/how_not_to_stitch/bench.py --data-dir DATA --networks NETWORKS{vits} --out OUT
```
"""

TITLES = {"Tiny-10": "published Tiny-10 networks, beside the paper's ResNet-18",
          "ViT": "small ViTs (6 blocks, 96 features, CLS), beside the paper's ViT-Ti"}  # fmt: skip


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    preset, families = record["preset"], record["families"]
    last = ", ".join(
        f"{layers[0]} to {layers[-1]} of {family}" for family, layers in LAST.items() if family in families
    )
    return PAGE.format(
        last=last, families="".join(_family(name, of) for name, of in families.items()),
        vits=" --vits VITS" * ("ViT" in families),
        seconds=", ".join(f"{family} {of['seconds']} s" for family, of in families.items()), **preset,
    )  # fmt: skip


def _family(name: str, of: dict[str, Any]) -> str:
    accuracies = ", ".join(f"{layer} {value:.3f}" for layer, value in of["accuracies"].items())
    text = f"\n## {of['networks']} {TITLES[name]}\n\nProbing accuracy, mean over networks: {accuracies}.\n"
    for test, scores in of["scores"].items():
        lines = [_line(method, score, PUBLISHED[test][name]) for method, score in scores.items()]
        verdict = _verdict(test, scores, PUBLISHED[test][name])
        text += (
            f"\n### {test.capitalize()}\n\n| measure | paper, τ / ρ | τ | ρ | references | τ − rank only | "
            f"τ − depth only |\n|---|---|---|---|---|---|---|\n{chr(10).join(lines)}\n\n{verdict}\n"
        )
    if of["undefined"]:
        reasons = "; ".join(f"{method}, {count} ({why})" for method, (count, why) in of["undefined"].items())
        text += f"\nUndefined pairs, of all references, with the most frequent reason: {reasons}. They are left out.\n"
    return text


def _line(method: str, score: dict[str, Any], published: dict[str, tuple[float, float]]) -> str:
    paper = published.get(_plain(method))
    label = f"**{method}**" if beaten(score) else method
    missing = f" ({score['undefined']} of {score['pairs']} pairs undefined)" if score["undefined"] else ""
    low, high = map(float, score["spread"])
    cells = [
        label + missing, "–" if paper is None else f"{paper[0]:.2f} / {paper[1]:.2f}",
        *(_score(score[name]) for name in ("tau", "rho")), "–" if math.isnan(low) else f"{low:.2f} to {high:.2f}",
        *(_score(score["beyond"].get(name)) for name in ("rank only", "depth only")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _score(score: dict[str, Any] | None) -> str:
    figures = [math.nan] * 3 if score is None else [float(score[name]) for name in ("value", "low", "high")]
    return "–" if math.isnan(figures[0]) else "{:.2f} [{:.2f}, {:.2f}]".format(*figures)


def beaten(score: dict[str, Any]) -> bool:
    """Return whether a measure beats each baseline that is defined."""
    known = [Score(*map(float, found.values())) for found in score["beyond"].values()]
    lows = [found.low for found in known if not math.isnan(found.value)]
    return bool(lows) and all(low > 0 for low in lows)


def _verdict(test: str, scores: dict[str, Any], paper: dict[str, tuple[float, float]]) -> str:
    """Return which measures beat the baselines of a test, and their order beside that of the paper."""
    measures = {name: score for name, score in scores.items() if score["beyond"] and name != RELIABILITY}
    winners = [name for name, score in measures.items() if beaten(score)]
    best = max(measures, key=lambda name: -2.0 if math.isnan(tau := float(measures[name]["tau"]["value"])) else tau)
    found = f"{len(winners)} of {len(measures)} measures beat the baselines" + (
        f": {', '.join(winners)}" if winners else ""
    )
    text = f"**{test.capitalize()}**: {found}. Highest τ: {best}, {_score(measures[best]['tau'])}. "
    text += f"F on the other half has τ {_score(scores[RELIABILITY]['tau'])}. "
    taus = {_plain(name): float(score["tau"]["value"]) for name, score in measures.items() if _plain(name) in paper}
    theirs = sorted(taus, key=lambda name: -paper[name][0])
    ours = sorted(taus, key=lambda name: -taus[name])
    return f"{text}By τ, the paper has {' > '.join(theirs)}; here it is {' > '.join(ours)}."


def _plain(method: str) -> str:
    """Return the name of a method without its options."""
    return method.partition("(")[0]


if __name__ == "__main__":
    main()
