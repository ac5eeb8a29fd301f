"""Are task-loss stitches strange to the target, and which detector tells? (Balogh & Jelasity 2025, figure 1, table 1).

Every layer of one network is stitched into every layer of another, by least squares, by least squares that keep the
covariance, by an orthogonal map, and by task loss with growing numbers of steps. Each detector is fitted to the
target's own activations, controlled (two halves of the test images, training images, images of noise) and calibrated
with noise of known size. The paper's claim is tested for each detector: chosen on half of the pairs of networks,
reported on the other half. Histograms of the scores at one layer (figure 1c) are counted, and drawn as PNG.

    python -m how_not_to_stitch.strange_activations --data-dir DATA --networks NETWORKS --out OUT
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from hf_stitch_studies import Energy
from matplotlib.figure import Figure
from numpy.typing import NDArray

import hf_stitch
from hf_stitch.analysis import Score, StitchGrid, identify_layers
from hf_stitch.training import TaskLoss

Array = NDArray[np.float64]
ACCURATE, INACCURATE = 0.8, 0.5
"""Relative accuracy from which a stitch is accurate (Csiszárik et al. 2021, section 8), and below which it is not."""
STRANGE = 0.714
"""AUROC above which stitched activations are strange: two normal distributions .8 standard deviations apart, a large
effect (Cohen 1988)."""
CRITERIA = {"task loss": 0.8, "accurate direct": 0.2, "inaccurate direct": 0.5}
"""The claim in figures: at least 80% of the task-loss stitches are strange, at most 20% of the accurate direct matches,
and at least half of the inaccurate ones. Fixed before any figure was seen."""
DETECTORS = ("mahalanobis", "knn", "likelihood_ratio", "classifier", "energy")
TITLES = {"tiny10": "Tiny-10", "tiny10_long": "Tiny-10, longer training", "resnet20": "ResNet-20"}
"""Title of the section of a folder."""
DIRECT = "lstsq"
CLOSED = (DIRECT, "recoloured", "procrustes")
HISTOGRAM = 2, (2, -1)
"""Place of the layer of the target whose scores are counted, and of the layers of the source: the corresponding layer,
and the last."""


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        train: Images to which stitches and detectors are fitted.
        test: Images of all scores.
        pairs: Pairs of networks, without a network in common.
        steps: Steps of task-loss matching.
        energy: The energy detector.
    """

    train: int
    test: int
    pairs: int
    steps: tuple[int, ...]
    energy: Energy

    @property
    def task_loss(self) -> dict[int, TaskLoss]:
        """Task-loss matching by number of steps: hard labels, from least squares, batches of 32."""
        return {n: TaskLoss(labels="hard", max_steps=n, batch_size=32, schedule="constant") for n in self.steps}


PRESETS = {
    "small": Preset(1500, 400, 2, (30, 100, 300, 1000), Energy.preset("small", size=8, epochs=4, fine_tune_epochs=2)),
    "paper": Preset(50_000, 10_000, 5, (30, 100, 300, 1000, 11_700), Energy()),
    "test": Preset(150, 60, 1, (2,), Energy.preset("small", size=8, epochs=1, fine_tune_epochs=1)),
}


def main() -> None:
    """Run the experiment from the command line."""
    parser = study.parser(__doc__, "data-dir", "networks", presets=PRESETS, required={"out"})
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=DETECTORS, help="default: all")
    parser.add_argument(
        "--steps", nargs="+", type=int, help="steps of task-loss matching; default: those of the preset"
    )
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    preset = dataclasses.replace(preset, steps=tuple(arguments.steps or preset.steps))
    loaded, layers = networks.read_folder(arguments.networks)
    train, test = (
        images.samples("cifar10", split, count, arguments.data_dir)
        for split, count in (("train", preset.train), ("test", preset.test))
    )
    other = images.samples("fashion_mnist", "test", preset.test, arguments.data_dir)
    names = list(loaded)
    count = min(preset.pairs, len(names) // 2)
    pairs = [(names[i], names[i + 1]) for i in range(0, 2 * count, 2)] + [(names[0], names[0])]
    place = arguments.out / "strange_activations.json"
    record = json.loads(place.read_text()) if place.is_file() else {}
    found = record.setdefault(arguments.networks.name.removeprefix("drfrankenstein_"), {})
    arguments.out.mkdir(parents=True, exist_ok=True)
    for a, b in pairs:
        if f"{a} -> {b}" in found:
            continue
        start = time.perf_counter()
        grid = hf_stitch.stitch_grid(
            loaded[a], loaded[b], train, test_data=test, layers_a=layers, layers_b=layers,
            matchers=[*CLOSED, *preset.task_loss.values()],
            detectors=[preset.energy if name == "energy" else name for name in arguments.detectors],
            auxiliary_data=other if "energy" in arguments.detectors else None, far_data=images.noise(preset.test),
            task="image-classification", batch_size=100, resamples=200,
        )  # fmt: skip
        found[f"{a} -> {b}"] = {
            **recorded(grid, preset), "histograms": histograms(grid, preset),
            "seconds": round(time.perf_counter() - start),
        }  # fmt: skip
        drawn = draw_histograms(found[f"{a} -> {b}"]["histograms"], f"{a} into {b}")
        drawn.savefig(arguments.out / f"strange_activations {a} {b}.png", dpi=150)
        found["layers"], found["preset"] = list(layers), {"name": arguments.preset, **dataclasses.asdict(preset)}
        study.leave("strange_activations", record, page, {}, arguments.out)


def recorded(grid: StitchGrid, preset: Preset) -> dict[str, Any]:
    """Return what the page needs of a grid as JSON values: matcher -> figure -> (layers of a, layers of b)."""
    labels = {name: name for name in CLOSED}
    labels |= {f"task loss, {n} steps": matcher.label for n, matcher in preset.task_loss.items()}
    detectors = {label.partition("(")[0]: label for label in grid.detections}
    return {
        "matchers": {
            name: {figure: rounded(grid.values(label, figure)) for figure in ("relative_accuracy", "structural_error")}
            | {
                short: {f: rounded(grid.detections[long].figures[label][f][..., 0]) for f in ("auroc", "dose")}
                for short, long in detectors.items()
            }
            for name, label in labels.items()
        },
        "controls": {
            short: {name: rounded(values) for name, values in grid.detections[long].controls.items()}
            for short, long in detectors.items()
        },
        "doses": {
            short: {kind: rounded(values[..., 0]) for kind, values in grid.detections[long].doses.items()}
            for short, long in detectors.items()
        },
    }


def histograms(grid: StitchGrid, preset: Preset) -> dict[str, Any]:
    """Return the binned scores of the target's own and of stitched activations at one layer (figure 1c).

    Returns:
        Detector -> ``<layer of a> -> <layer of b>, <matcher>`` -> the inner ``edges`` (the first and the last bin are
        open) and the counts ``own`` and ``stitched``. Undefined ones are left out.
    """
    j, sources = HISTOGRAM
    longest = max(preset.steps)
    labels = {DIRECT: DIRECT, f"task loss, {longest} steps": preset.task_loss[longest].label}
    found: dict[str, Any] = {}
    for long, detection in grid.detections.items():
        cells = found.setdefault(long.partition("(")[0], {})
        for i in sources:
            for name, label in labels.items():
                counted = {part: values[i, j] for part, values in detection.histograms[label].items()}
                if np.isnan(counted["own"]).any():
                    continue
                cells[f"{grid.layers_a[i]} -> {grid.layers_b[j]}, {name}"] = {
                    "edges": [float(f"{edge:.5g}") for edge in counted["edges"][1:-1]],
                    **{part: counted[part].astype(int).tolist() for part in ("own", "stitched")},
                }
    return found


def overlap(counted: Mapping[str, Sequence[float]]) -> float:
    """Return the common area of two histograms, each of area 1: 1 if they are equal, 0 if they are apart."""
    own, stitched = (np.array(counted[part]) / np.sum(counted[part]) for part in ("own", "stitched"))
    return float(np.minimum(own, stitched).sum())


def draw_histograms(counted: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Draw the histograms of a pair of networks: a row for each detector, a column for each stitch."""
    columns = list(dict.fromkeys(cell for cells in counted.values() for cell in cells))
    figure = Figure(figsize=(3 * len(columns), 1.6 * len(counted) + 0.6), layout="constrained")
    panels = figure.subplots(len(counted), len(columns), squeeze=False)
    for line, (detector, cells) in zip(panels, counted.items(), strict=True):
        line[0].set_ylabel(detector)
        for axes, column in zip(line, columns, strict=True):
            axes.set_yticks([])
            if column not in cells:
                continue
            one = cells[column]
            inner = np.array(one["edges"])  # the open bins are drawn as wide as their neighbours
            edges = [2 * inner[0] - inner[1], *inner, 2 * inner[-1] - inner[-2]]
            for part in ("own", "stitched"):
                axes.stairs(np.array(one[part]) / sum(one[part]), edges, fill=True, alpha=0.5, label=part)
            axes.set_title(f"overlap {overlap(one):.2f}", fontsize="small")
    for axes, column in zip(panels[0], columns, strict=True):
        axes.set_title(f"{column}\n{axes.get_title()}", fontsize="small")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"Scores of detectors, {title}")
    return figure


def rounded(values: Array) -> list[Any]:
    """Return an array as JSON, with infinite and undefined values as text."""
    found = np.round(values, 4).astype(object)
    found[~np.isfinite(values)] = [str(value) for value in values[~np.isfinite(values)]]
    listed: list[Any] = found.tolist()
    return listed


def read_array(values: Sequence[Any]) -> Array:
    """Return an array from the JSON of :func:`rounded`."""
    return np.array(values, object).astype(float)


PAGE = """# Strange activations (Balogh & Jelasity, AAAI 2025, figure 1 and table 1)

Claim: stitches that are trained on the task output activations unlike any of the target's own, nearly everywhere;
direct matches do so only where they are inaccurate. In figures, fixed before any was seen: an AUROC of at least
{strange} (.8 standard deviations between two normal distributions) counts as strange; at least {trained:.0%} of the
task-loss stitches are strange, at most {accurate:.0%} of the direct matches with a relative accuracy of at least .8,
and at least {inaccurate:.0%} of those below .5. Where a detector does not tell images of
noise from the test images, the layer is left out ("blind"). Energies come from a small classifier, trained with
Fashion-MNIST as other data; the paper trains a ResNet-18 for 120 epochs, with 300K Random Images.

{sections}
This page and [its figures as JSON](strange_activations.json) are written by the command (2 CPU cores), with the
detectors and steps of each section (`--detectors`, `--steps`):

```
python -m how_not_to_stitch.strange_activations --data-dir DATA --networks NETWORKS --out OUT
```
"""

SECTION = """## {title}

{pairs} of networks without a network in common, and one network into itself; {layers} layers; stitches and
detectors fitted to {train} training images, scores on {test} test images. The paper trains for 30 epochs of 50,000
images; here the longest training has {steps} steps of 32 images.{caveats}

### Controls and calibration

Mean AUROC over layers and pairs; noise of a relative residual, coloured as the target, which a detector of use tells
the better the stronger it is.

| detector | two halves | training v. test images | images of noise | blind layers | noise .01 | .1 | 1 |
|---|---|---|---|---|---|---|---|
{controls}

### Which detector reproduces the claim?

Share of strange stitches between two networks, on the half of the pairs on which the detector is chosen, and on the
other half.

| detector | task loss | accurate direct | inaccurate direct | task loss | accurate direct | inaccurate direct | claim, other half |
|---|---|---|---|---|---|---|---|
{detectors}

{verdict}

### Accuracy and strangeness of each matcher

All pairs of two networks. *distant*: layers that are at least two apart. Doses are medians: the relative residual of
coloured noise that is as easy to tell, by `{chosen}`.

| matcher | accurate (≥ .8) | accurate, distant | relative accuracy, corresponding | AUROC, {chosen} | dose, accurate cells | structural error, accurate cells |
|---|---|---|---|---|---|---|
{matchers}
{histograms}
### One network into itself

A stitch from a later layer into an earlier one repeats layers of the network, one from an earlier into a later layer
cuts layers out (section 3 of the paper). Mean relative accuracy by the number of layers.

| matcher | repeats 3 | repeats 2 | repeats 1 | cuts out 1 | cuts out 2 | cuts out 3 |
|---|---|---|---|---|---|---|
{itself}

### Layer identification (table 1)

Share of the layers whose most accurate stitch (functional), or least structural error, is that with the corresponding
layer. Chance {chance:.3f}.

| matcher | between networks, a among b's | b among a's | within one network, a among b's | b among a's |
|---|---|---|---|---|
{identified}

"""  # noqa: E501


HISTOGRAMS = """
### Histograms of scores (figure 1c)

The paper draws the energies of the first layer of a ResNet-18: those of task-loss stitches are apart from the target's
own. Here: the common area of the histograms of the target's own and of stitched activations of the test images at one
layer, 1 if they are equal and 0 if no score occurs in both; mean over the pairs of networks / one network into itself.
The counts are in the JSON, and the command draws them.

| detector | {cells} |
|---|{lines}
{overlaps}

{verdict}
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    return PAGE.format(
        strange=STRANGE, trained=CRITERIA["task loss"], accurate=CRITERIA["accurate direct"],
        inaccurate=CRITERIA["inaccurate direct"],
        sections="".join(_section(name, found) for name, found in record.items()),
    )  # fmt: skip


def _section(name: str, found: Mapping[str, Any]) -> str:
    layers, preset = found["layers"], found["preset"]
    within, between = [], []
    for key, one in found.items():
        if " -> " in key:
            a, b = key.split(" -> ")
            (within if a == b else between).append(one)
    detectors = list(between[0]["controls"])
    half = (len(between) + 1) // 2
    choosing, reporting = between[:half], between[half:] or between
    shares = {name: (_shares(choosing, name), _shares(reporting, name)) for name in detectors}
    chosen = max(detectors, key=lambda name: shares[name][0]["task loss"] - shares[name][0]["accurate direct"])
    return SECTION.format(
        title=TITLES.get(name, "Small ViT"), pairs="1 pair" if len(between) == 1 else f"{len(between)} pairs",
        caveats=_caveats(between), layers=len(layers), train=preset["train"], test=preset["test"],
        steps=max(preset["steps"]), chosen=chosen,
        controls=rows([_control_line(name, between) for name in detectors]),
        detectors=rows([_detector_line(name, *shares[name]) for name in detectors]),
        verdict=_verdict(chosen, shares), matchers=rows([_matcher_line(m, between, chosen) for m in _matchers(found)]),
        histograms=_histograms(between, within),
        itself=rows([_itself_line(matcher, within) for matcher in _matchers(found)]),
        chance=1 / len(layers), identified=rows(_identified(_matchers(found), between, within)),
    )  # fmt: skip


def _caveats(between: Sequence[Mapping[str, Any]]) -> str:
    """Return what limits a section: a single pair, or a run before noise was made of other samples' activations."""
    said = ""
    if len(between) == 1:
        said += " With one pair, a detector is chosen and reported on the same stitches, which flatters it."
    if not all("histograms" in one for one in between):
        said += (
            " Measured with noise drawn from a normal distribution for each position; noise is now made of the "
            "activations of other samples, so that doses come out otherwise."
        )
    return said


def _matchers(found: Mapping[str, Any]) -> list[str]:
    return list(next(one for key, one in found.items() if " -> " in key)["matchers"])


def _trained(matchers: Sequence[str]) -> str:
    """Return the task-loss matcher with the most steps."""
    return max((name for name in matchers if name.startswith("task")), key=lambda name: int(name.split()[2]))


def _seen(one: Mapping[str, Any], detector: str) -> NDArray[np.bool_]:
    """Return the layers of the target where the detector tells images of noise apart."""
    return read_array(one["controls"][detector]["far"])[:, 1] > 0.5


def _shares(pairs: Sequence[Mapping[str, Any]], detector: str) -> dict[str, float]:
    """Return the share of strange stitches of each kind that the claim is about."""
    counted: dict[str, list[NDArray[np.bool_]]] = {kind: [] for kind in CRITERIA}
    for one in pairs:
        known = np.broadcast_to(_seen(one, detector), read_array(one["matchers"][DIRECT]["relative_accuracy"]).shape)
        strange = {
            matcher: read_array(one["matchers"][matcher][detector]["auroc"]) >= STRANGE
            for matcher in (DIRECT, _trained(list(one["matchers"])))
        }
        accuracy = read_array(one["matchers"][DIRECT]["relative_accuracy"])
        counted["task loss"].append(strange[_trained(list(one["matchers"]))][known])
        counted["accurate direct"].append(strange[DIRECT][known & (accuracy >= ACCURATE)])
        counted["inaccurate direct"].append(strange[DIRECT][known & (accuracy < INACCURATE)])
    joined = {kind: np.concatenate(parts) for kind, parts in counted.items()}
    return {kind: float(values.mean()) if len(values) else float("nan") for kind, values in joined.items()}


def _holds(shares: Mapping[str, float]) -> bool:
    return (
        shares["task loss"] >= CRITERIA["task loss"]
        and shares["accurate direct"] <= CRITERIA["accurate direct"]
        and shares["inaccurate direct"] >= CRITERIA["inaccurate direct"]
    )


def _control_line(name: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    controls = {
        kind: np.mean([read_array(one["controls"][name][kind])[:, 0] for one in pairs])
        for kind in ("halves", "train", "far")
    }
    blind = sum(int((~_seen(one, name)).sum()) for one in pairs)
    noise = np.nanmean([read_array(one["doses"][name]["coloured"]) for one in pairs], axis=(0, 1))
    total = sum(len(_seen(one, name)) for one in pairs)
    return [
        name, *(f"{controls[kind]:.2f}" for kind in ("halves", "train", "far")), f"{blind} of {total}",
        *(f"{noise[place]:.2f}" for place in (0, 2, 4)),
    ]  # fmt: skip


def _detector_line(name: str, choosing: Mapping[str, float], reporting: Mapping[str, float]) -> list[str]:
    figures = [f"{shares[kind]:.2f}".replace("nan", "–") for shares in (choosing, reporting) for kind in CRITERIA]
    return [name, *figures, "holds" if _holds(reporting) else "does not hold"]


def _verdict(chosen: str, shares: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    reported = shares[chosen][1]
    others = [name for name, (_, other) in shares.items() if name != chosen and _holds(other)]
    found = "reproduces the claim" if _holds(reported) else "does not reproduce the claim"
    share = reported["inaccurate direct"]
    inaccurate = "none is inaccurate" if np.isnan(share) else f"{share:.0%} of the inaccurate ones"
    return (
        f"**`{chosen}`**, chosen on the first half of the pairs, **{found}** on the other: "
        f"{reported['task loss']:.0%} of the task-loss stitches are strange to it, "
        f"{reported['accurate direct']:.0%} of the accurate direct matches and "
        f"{inaccurate}. Of the other detectors, "
        f"{', '.join(f'`{name}`' for name in others) or 'none'} reproduces it."
    )


def _matcher_line(matcher: str, pairs: Sequence[Mapping[str, Any]], chosen: str) -> list[str]:
    accuracy = np.stack([read_array(one["matchers"][matcher]["relative_accuracy"]) for one in pairs])
    error = np.stack([read_array(one["matchers"][matcher]["structural_error"]) for one in pairs])
    auroc, dose = (
        np.stack([read_array(one["matchers"][matcher][chosen][f]) for one in pairs]) for f in ("auroc", "dose")
    )
    distant = _distant(accuracy.shape[1:])
    fine = accuracy >= ACCURATE
    far = fine[:, distant]
    return [
        matcher, f"{fine.mean():.2f}", f"{far.mean():.2f} ({int(far.sum())} of {far.size})",
        f"{np.diagonal(accuracy, axis1=1, axis2=2).mean():.3f}", f"{np.nanmean(auroc):.2f}",
        f"{np.nanmedian(dose[fine]):.3g}", f"{np.median(error[fine]):.2f}",
    ]  # fmt: skip


def _histograms(between: Sequence[Mapping[str, Any]], within: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with the overlaps of histograms; empty for records of runs that did not count them."""
    if not all("histograms" in one for one in (*between, *within)):
        return ""
    detectors = list(between[0]["histograms"])
    cells = list(dict.fromkeys(cell for name in detectors for cell in between[0]["histograms"][name]))

    def mean(pairs: Sequence[Mapping[str, Any]], detector: str, cell: str) -> float:
        found = [one["histograms"][detector][cell] for one in pairs if cell in one["histograms"][detector]]
        return float(np.mean([overlap(one) for one in found])) if found else float("nan")

    table = {name: [(mean(between, name, cell), mean(within, name, cell)) for cell in cells] for name in detectors}
    trained = [cell for cell in cells if "task loss" in cell]
    named = [
        f"{cell.partition(',')[0]}: "
        + ", ".join(f"`{name}` {table[name][cells.index(cell)][0]:.2f}" for name in detectors)
        for cell in trained
    ]
    return HISTOGRAMS.format(
        cells=" | ".join(cells), lines="---|" * len(cells),
        overlaps=rows([[name, *(f"{a:.2f} / {b:.2f}" for a, b in line)] for name, line in table.items()]).replace(
            "nan", "–"
        ),
        verdict=f"Overlap of task-loss stitches with the target's own scores, between networks: {'; '.join(named)}.",
    )  # fmt: skip


def _itself_line(matcher: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not pairs:
        return [matcher, *["–"] * 6]
    accuracy = np.mean([read_array(one["matchers"][matcher]["relative_accuracy"]) for one in pairs], axis=0)
    return [matcher, *(f"{np.diagonal(accuracy, offset).mean():.2f}" for offset in (-3, -2, -1, 1, 2, 3))]


def _distant(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.abs(np.subtract.outer(np.arange(shape[0]), np.arange(shape[1]))) >= 2


def _identified(
    matchers: Sequence[str], between: Sequence[Mapping[str, Any]], within: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    lines = []
    for matcher in matchers:
        for kind, figure in (("functional", "relative_accuracy"), ("structural", "structural_error")):
            line = [f"{matcher}, {kind}"]
            for pairs, name in ((between, "b"), (within, "a")):
                values = {
                    (f"a{i}", f"{name}{i}"): read_array(one["matchers"][matcher][figure]) for i, one in enumerate(pairs)
                }
                if not values:
                    line += ["–", "–"]
                    continue
                found = identify_layers(values, higher_is_better=kind == "functional")
                line += [str(Score(found[axis].value, found[axis].low, found[axis].high)) for axis in ("a", "b")]
            lines.append(line)
    return lines


def rows(lines: list[list[str]]) -> str:
    """Return the rows of a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
