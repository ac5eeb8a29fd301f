"""Are task-loss stitches strange to the target, and what shows it (Balogh & Jelasity 2025, figure 1, table 1)?

Every layer of one network is stitched into every layer of another, by least squares, by least squares that keep the
covariance, by an orthogonal map, and by task loss with growing numbers of steps. Each detector is fitted to the
target's own activations, tested on controls (two halves of the test images, training images, images of noise) and
calibrated with noise of known size. The paper's detector, the energy, decides at the layers where it passes these
tests. Histograms of the scores are recorded at one layer (figure 1c).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from hf_stitch_studies import Energy
from how_not_to_stitch.experiment import NAMES, POORLY, cifar, filled, paired
from numpy.typing import NDArray

import hf_stitch
from hf_stitch.analysis import Identification, StitchGrid, identify_layers
from hf_stitch.analysis.detection.result import FAR, MIN_AUROC, OWN, failed
from hf_stitch.training import TaskLoss

Array = NDArray[np.float64]
ACCURATE, INACCURATE = 0.8, 0.5
"""From the first relative accuracy, a stitch is accurate (Csiszárik et al. 2021, section 8); below the second, not."""
STRANGE = 0.714
"""AUROC above which stitched activations are strange: two normal distributions .8 standard deviations apart, a large
effect (Cohen 1988)."""
MOST, FEW = 0.8, 0.2
"""From the first share, stitches are predominantly strange; up to the second, they are not strange."""
DETECTORS = ("mahalanobis", "knn", "likelihood_ratio", "classifier", "energy")
TITLES = NAMES | {"tiny10_long": "Tiny-10, longer training"}
"""Title of the section of a folder."""
TASK, DIRECT = "task loss", "lstsq"
CLOSED = (DIRECT, "recoloured", "procrustes")
HISTOGRAM = 2, (2, -1)
"""Index of the target layer of the histograms, and of the source layers: the corresponding layer, and the last."""


TRAIN, TEST, PAIRS, STEPS = 1500, 400, 2, (30, 100, 300, 1000)
"""Images for the fits of stitches and detectors, and test images; disjoint pairs of networks; steps of task-loss
matching."""
ENERGY = Energy.preset("small", size=8, epochs=4, fine_tune_epochs=2)


def main() -> None:
    parser = study.parser(__doc__, "data-dir", "networks", required={"out"})
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=DETECTORS, help="default: all")
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="steps of task-loss matching")
    arguments = parser.parse_args()
    # Hard labels, from least squares, batches of 32.
    task_loss = {n: TaskLoss(labels="hard", max_steps=n, batch_size=32, schedule="constant") for n in arguments.steps}
    loaded, layers = networks.read_folder(arguments.networks)
    train, test = cifar(arguments, TRAIN, TEST)
    auxiliary = images.samples("fashion_mnist", "test", TEST, arguments.data_dir)
    names = list(loaded)
    pairs = [*paired(names, min(PAIRS, len(names) // 2)), (names[0], names[0])]
    place = arguments.out / "strange_activations.json"
    record = json.loads(place.read_text()) if place.is_file() else {}
    section = record.setdefault(arguments.networks.name.removeprefix("drfrankenstein_"), {})
    arguments.out.mkdir(parents=True, exist_ok=True)
    for a, b in pairs:
        if f"{a} -> {b}" in section:
            continue
        start = time.perf_counter()
        grid = hf_stitch.stitch_grid(
            loaded[a], loaded[b], train, test_data=test, layers_a=layers, layers_b=layers,
            matchers=[*CLOSED, *task_loss.values()],
            detectors=[ENERGY if name == "energy" else name for name in arguments.detectors],
            auxiliary_data=auxiliary if "energy" in arguments.detectors else None, far_data=images.noise(TEST),
            task="image-classification", batch_size=100, resamples=200,
        )  # fmt: skip
        figures = recorded(grid, task_loss) | {"histograms": histograms(grid, task_loss)}
        section[f"{a} -> {b}"] = figures | {"seconds": round(time.perf_counter() - start)}
        section["layers"], section["preset"] = list(layers), {"train": TRAIN, "test": TEST, "steps": arguments.steps}
        study.write_results("strange_activations", record, page, arguments.out)


def recorded(grid: StitchGrid, task_loss: Mapping[int, TaskLoss]) -> dict[str, Any]:
    """Convert the figures of a grid to JSON values: matcher -> figure -> (layers of a, layers of b)."""
    labels = {name: name for name in CLOSED}
    labels |= {f"{TASK}, {n} steps": matcher.label for n, matcher in task_loss.items()}
    by_name = {label.partition("(")[0]: detection for label, detection in grid.detections.items()}

    def by_detector(label: str) -> dict[str, Any]:
        return {d: {f: rounded(of.figures[label][f][..., 0]) for f in ("auroc", "dose")} for d, of in by_name.items()}

    return {
        "matchers": {
            name: {f: rounded(grid.values(label, f)) for f in ("relative_accuracy", "structural_error")}
            | by_detector(label)
            for name, label in labels.items()
        },
        "controls": {d: {name: rounded(values) for name, values in of.controls.items()} for d, of in by_name.items()},
        "doses": {d: {kind: rounded(values[..., 0]) for kind, values in of.doses.items()} for d, of in by_name.items()},
    }


def histograms(grid: StitchGrid, task_loss: Mapping[int, TaskLoss]) -> dict[str, Any]:
    """Return the histograms of the scores of own and stitched activations at one layer of the target (figure 1c)."""
    (j, sources), longest = HISTOGRAM, max(task_loss)
    labels = {DIRECT: DIRECT, f"{TASK}, {longest} steps": task_loss[longest].label}
    by_detector: dict[str, Any] = {}
    for long, detection in grid.detections.items():
        cells = by_detector.setdefault(long.partition("(")[0], {})
        for i, (name, label) in ((i, item) for i in sources for item in labels.items()):
            counted = {part: values[i, j] for part, values in detection.histograms[label].items()}
            if not np.isnan(counted["own"]).any():
                cells[f"{grid.layers_a[i]} -> {grid.layers_b[j]}, {name}"] = {
                    "edges": [float(f"{edge:.5g}") for edge in counted["edges"][1:-1]],
                    **{part: counted[part].astype(int).tolist() for part in ("own", "stitched")},
                }
    return by_detector


def overlap(counted: Mapping[str, Sequence[float]]) -> float:
    """Return the common area of two histograms with area 1: 1 if they are equal, 0 if they are disjoint."""
    own_shares, stitched = (np.array(counted[part]) / np.sum(counted[part]) for part in ("own", "stitched"))
    return float(np.minimum(own_shares, stitched).sum())


def rounded(values: Array) -> list[Any]:
    """Convert an array to JSON values, with infinite and undefined values as text."""
    texts = np.round(values, 4).astype(object)
    texts[~np.isfinite(values)] = [str(value) for value in values[~np.isfinite(values)]]
    listed: list[Any] = texts.tolist()
    return listed


def read_array(values: Sequence[Any]) -> Array:
    return np.array(values, object).astype(float)


@dataclass(frozen=True)
class Chosen:
    """Stitches of a claim on strangeness."""

    matcher: str  # task loss, the longest training, or the direct match
    where: Callable[[Array, NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
    """Mask of the stitches, from relative accuracies and the indices of source and target layers."""
    strange: bool  # whether most are strange, or few
    within: bool = True  # whether stitches within a network count
    between: bool = True


VIT, *_STRANGE, SEPARATION = study.stated(__file__)
STRANGENESS = list(zip(_STRANGE, (
    Chosen(TASK, lambda accuracy, i, j: (i != j) | (4 * i >= len(accuracy)), strange=True),
    Chosen(TASK, lambda accuracy, i, j: (i == j) & (4 * i < len(accuracy)), strange=False),
    Chosen(TASK, lambda accuracy, i, j: (i == j) & (2 * i >= len(accuracy)), strange=True, within=False),
    Chosen(TASK, lambda accuracy, i, j: (i == j) & (2 * i >= len(accuracy)), strange=True, between=False),
    Chosen(DIRECT, lambda accuracy, i, j: accuracy >= ACCURATE, strange=False),
    Chosen(DIRECT, lambda accuracy, i, j: accuracy < INACCURATE, strange=True),
), strict=True))  # fmt: skip


@dataclass(frozen=True)
class _Runs:
    """Runs of a section, within a network and between two, with its longest training."""

    within: dict[str, Mapping[str, Any]]
    between: dict[str, Mapping[str, Any]]
    trained: str
    layers: int

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "_Runs":
        runs = {key: one for key, one in section.items() if " -> " in key}
        itself = {key for key in runs if len(set(key.split(" -> "))) == 1}
        names = [name for name in next(iter(runs.values()))["matchers"] if name.startswith("task")]
        return cls(
            {key: runs[key] for key in runs if key in itself}, {key: runs[key] for key in runs if key not in itself},
            max(names, key=lambda name: int(name.split()[2])), len(section["layers"]),
        )  # fmt: skip

    def unit(self, key: str) -> str:
        """Return the pair of networks of a run; a run within a network belongs to the pair of this network."""
        return next((pair for pair in self.between if set(key.split(" -> ")) <= set(pair.split(" -> "))), key)

    def identified(self, matcher: str, figure: str, within: bool) -> Identification | None:
        values = {
            tuple(key.split(" -> ")): read_array(one["matchers"][matcher][figure])
            for key, one in (self.within if within else self.between).items()
        }
        return identify_layers(values, higher_is_better=figure == "relative_accuracy") if values else None

    def rates(self, matcher: str, within: bool) -> list[dict[str, float]]:
        """Return the shares of layers identified by accuracy, along both axes."""
        identification = self.identified(matcher, "relative_accuracy", within)
        return [identification.to_dict()["scores"][axis] for axis in "ab"] if identification else []

    def counted(self, within: bool, between: bool) -> str:
        counts = ((within * len(self.within), "network"), (between * len(self.between), "pair"))
        return ", ".join(study.counted(count, unit) for count, unit in counts if count)


def claims(record: Mapping[str, Any]) -> list[dict[str, str]]:
    plain = {name: section for name, section in record.items() if not name.startswith("vit")}
    name = max(plain, key=lambda title: max(plain[title]["preset"]["steps"]))
    runs, rows = _Runs.of(plain[name]), []
    for name in record.keys() - plain.keys():
        vit = _Runs.of(record[name])
        inside, outside = (vit.rates(vit.trained, within) for within in (True, False))
        n = f"{vit.counted(True, True)}, {vit.layers} layers"
        parts = [study.below(rate, POORLY) for rate in (*inside, *outside)]
        rows.append(VIT.row(f"within {_both(inside)}; between {_both(outside)}", n, parts, len(vit.between)))
    return [*rows, *(_strangeness(asked, chosen, runs) for asked, chosen in STRANGENESS), _separated(runs)]


def _both(rates: Sequence[Mapping[str, float]]) -> str:
    return study.both(rates) or "none"


def passes(one: Mapping[str, Any], detector: str) -> NDArray[np.bool_]:
    """Return the mask of the target layers where a detector passes its tests."""
    controls = {name: read_array(one["controls"][detector][name]) for name in ("far", "train")}
    controls["noise"] = read_array(one["doses"][detector]["coloured"])[:, -1:]
    layers = range(len(controls["noise"]))
    return np.array([not failed({name: of[j] for name, of in controls.items()}, MIN_AUROC) for j in layers])


def _strangeness(asked: study.Claim, chosen: Chosen, runs: _Runs) -> dict[str, str]:
    """Return the row of a claim, with the mean over pairs of the share of strange stitches in each pair."""
    pair_runs = {**(runs.within if chosen.within else {}), **(runs.between if chosen.between else {})}
    matcher = runs.trained if chosen.matcher == TASK else chosen.matcher
    strange: dict[str, list[NDArray[np.bool_]]] = {}
    passed = total = 0
    for key, one in pair_runs.items():
        good, of = passes(one, "energy"), one["matchers"][matcher]
        accuracy, auroc = (read_array(values) for values in (of["relative_accuracy"], of["energy"]["auroc"]))
        i, j = np.indices(accuracy.shape)
        where = chosen.where(accuracy, i, j) & good[None] & np.isfinite(auroc)
        if where.any():
            strange.setdefault(runs.unit(key) if chosen.between else key, []).append(auroc[where] >= STRANGE)
        passed, total = passed + int(good.sum()), total + len(good)
    share = study.over([float(np.concatenate(some).mean()) for some in strange.values()])
    part = study.above(share, MOST) if chosen.strange else study.below(share, FEW)
    n = runs.counted(chosen.within, chosen.between)
    return asked.row(_gated(study.shown(share), passed, total), n, [part], len(pair_runs))


def _gated(share: str, passed: int, total: int) -> str:
    return f"the energy passes at {passed} of {total} layers" + (f"; there {share}" if passed else "")


def _separated(runs: _Runs) -> dict[str, str]:
    j, areas, passed, total = HISTOGRAM[0], [], 0, 0
    for one in runs.between.values():
        if "energy" in one.get("histograms", {}):
            good = bool(passes(one, "energy")[j])
            passed, total = passed + good, total + 1
            areas += [overlap(cell) for name, cell in one["histograms"]["energy"].items() if "task" in name and good]
    ours = _gated(f"{max(areas, default=float('nan')):.2f}", passed, total)
    parts = [area <= 0.05 for area in areas] if passed > 1 else []
    return SEPARATION.row(ours, runs.counted(False, True), parts, len(runs.between))


OLD_NOISE = " " + study.text(__file__, "old_noise")
SECTION, HISTOGRAMS = (study.text(__file__, part) + "\n" for part in ("section", "histograms"))


def page(record: Mapping[str, Any]) -> str:
    sections = "".join(_section(name, section) for name, section in record.items())
    return filled(__file__, claims(record), strange=STRANGE, noise=MIN_AUROC, far=FAR, own=OWN, sections=sections)


def _section(name: str, section: Mapping[str, Any]) -> str:
    preset, runs = section["preset"], _Runs.of(section)
    within, between = list(runs.within.values()), list(runs.between.values())
    distant = np.abs(np.subtract.outer(*[np.arange(runs.layers)] * 2)) >= 2
    detectors, matchers = list(between[0]["controls"]), list(between[0]["matchers"])
    head = ["detector", "two halves", "training v. test images", "images of noise", "noise .01", ".1", "1", "passes"]
    return SECTION.format(
        title=TITLES.get(name, name), pairs=study.counted(len(between), "pair"),
        caveats="" if all("histograms" in one for one in between) else OLD_NOISE, layers=runs.layers,
        train=preset["train"], test=preset["test"], steps=max(preset["steps"]), chance=1 / runs.layers,
        controls=study.markdown(head, [_control_line(detector, between) for detector in detectors]),
        detectors=study.markdown(
            ["detector", "task loss", "accurate direct", "inaccurate direct"],
            [[detector, *_shares(between, runs.trained, detector)] for detector in detectors],
        ),
        matchers=study.markdown(
            ["matcher", "accurate (≥ .8)", "accurate, distant", "relative accuracy, corresponding",
             "structural error, accurate cells"],
            [_matcher_line(matcher, between, distant) for matcher in matchers],
        ),
        histograms=_histograms(between, within),
        itself=study.markdown(
            ["matcher", *(f"repeats {n}" for n in (3, 2, 1)), *(f"cuts out {n}" for n in (1, 2, 3))],
            [_itself_line(matcher, within) for matcher in matchers],
        ),
        identified=study.markdown(
            ["matcher", "between networks, a among b's", "b among a's", "within one network, a among b's",
             "b among a's"],
            [_identified_line(matcher, *kind, runs) for matcher in matchers
             for kind in (("functional", "relative_accuracy"), ("structural", "structural_error"))],
        ),
    )  # fmt: skip


def _shares(pairs: Sequence[Mapping[str, Any]], trained: str, detector: str) -> list[str]:
    """Return the shares of strange stitches for task loss, accurate direct matches and inaccurate direct matches."""
    shares = []
    for matcher, low, high in ((trained, -1.0, 9.0), (DIRECT, ACCURATE, 9.0), (DIRECT, -1.0, INACCURATE)):
        strange = []
        for of in (one["matchers"][matcher] for one in pairs):
            accuracy, auroc = read_array(of["relative_accuracy"]), read_array(of[detector]["auroc"])
            strange.append(auroc[(accuracy >= low) & (accuracy < high) & np.isfinite(auroc)] >= STRANGE)
        flags = np.concatenate(strange)
        shares.append(f"{flags.mean():.2f}" if flags.size else "–")
    return shares


def _control_line(name: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    controls = (
        np.mean([read_array(one["controls"][name][kind])[:, 0] for one in pairs]) for kind in ("halves", "train", "far")
    )
    noise = np.nanmean([read_array(one["doses"][name]["coloured"]) for one in pairs], axis=(0, 1))
    good = np.concatenate([passes(one, name) for one in pairs])
    return [name, *(f"{value:.2f}" for value in (*controls, *noise[[0, 2, 4]])), f"{good.sum()} of {len(good)}"]


def _matcher_line(matcher: str, pairs: Sequence[Mapping[str, Any]], distant: NDArray[np.bool_]) -> list[str]:
    accuracy, error = (
        np.stack([read_array(one["matchers"][matcher][figure]) for one in pairs])
        for figure in ("relative_accuracy", "structural_error")
    )
    fine = accuracy >= ACCURATE
    far = fine[:, distant]
    return [
        matcher, f"{fine.mean():.2f}", f"{far.mean():.2f} ({int(far.sum())} of {far.size})",
        f"{np.diagonal(accuracy, axis1=1, axis2=2).mean():.3f}", f"{np.median(error[fine]):.2f}",
    ]  # fmt: skip


def _histograms(between: Sequence[Mapping[str, Any]], within: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with the overlaps of histograms; empty for records without histograms."""
    if not all("histograms" in one for one in (*between, *within)):
        return ""
    detectors = list(between[0]["histograms"])
    cells = list(dict.fromkeys(cell for name in detectors for cell in between[0]["histograms"][name]))

    def mean(pairs: Sequence[Mapping[str, Any]], detector: str, cell: str) -> str:
        counted = [one["histograms"][detector][cell] for one in pairs if cell in one["histograms"][detector]]
        return f"{np.mean([overlap(one) for one in counted]):.2f}" if counted else "–"

    lines = [[d, *(f"{mean(between, d, cell)} / {mean(within, d, cell)}" for cell in cells)] for d in detectors]
    return HISTOGRAMS.format(overlaps=study.markdown(["detector", *cells], lines))


def _itself_line(matcher: str, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    accuracy = np.mean([read_array(one["matchers"][matcher]["relative_accuracy"]) for one in pairs], axis=0)
    return [matcher, *(f"{np.diagonal(accuracy, offset).mean():.2f}" for offset in (-3, -2, -1, 1, 2, 3))]


def _identified_line(matcher: str, kind: str, figure: str, runs: _Runs) -> list[str]:
    identifications = [runs.identified(matcher, figure, within) for within in (False, True)]
    return [f"{matcher}, {kind}", *(str(i[axis]) if i else "–" for i in identifications for axis in ("a", "b"))]
