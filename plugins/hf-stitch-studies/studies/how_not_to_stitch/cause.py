"""Does task loss succeed between different layers because of strange activations (Balogh & Jelasity 2025, section 4.2)?

Task-loss stitches are trained with a penalty on their structural residual, or on the distance between their mean and
covariance and the target's, at growing strength. If stitches between distant layers stay accurate without being
stranger than direct matches, strangeness is not the reason for the success of task loss.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import study
from dr_frankenstein import images, networks
from how_not_to_stitch.experiment import cifar, filled, paired
from how_not_to_stitch.strange_activations import ACCURATE, DIRECT, passes, read_array, rounded
from numpy.typing import NDArray

import hf_stitch
from hf_stitch.training import TaskLoss

Array = NDArray[np.float64]
PENALTIES = {"direct_matching": "residual", "frechet": "moments"}
"""Metric of the penalty -> name on the page."""
DETECTORS = ("mahalanobis", "knn", "likelihood_ratio", "classifier")
CLOSED = (DIRECT, "recoloured")
MARGIN = 0.02
"""A stitch is not stranger than a direct match if the AUROC of every detector is greater by at most this."""
LEAST = 5
"""Minimum number of cells for a verdict."""
KEPT, LOST = 0.5, 0.1
"""Bounds of the rule, fixed before any figure was known."""


TRAIN, TEST, PAIRS, STEPS = 2_000, 500, 2, 300
"""Images for the fits of stitches and detectors, and test images; disjoint pairs of networks; steps of task-loss
matching."""
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
SOURCES, TARGETS = (4, 6, 7), (2, 4)
"""Indices of the layers."""
TASK_LOSS = TaskLoss(labels="hard", max_steps=STEPS, batch_size=32, schedule="constant", lr=3e-3)
MATCHERS = {"task loss": TASK_LOSS} | {
    f"{name} {strength:g}": replace(TASK_LOSS, penalties={metric: strength})
    for metric, name in PENALTIES.items() for strength in STRENGTHS
}  # fmt: skip


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "networks", required={"out"}).parse_args()
    loaded, cuts = networks.read_folder(arguments.networks)
    layers_a, layers_b = ([cuts[place] for place in places] for places in (SOURCES, TARGETS))
    train, test = cifar(arguments, TRAIN, TEST)

    def measured(a: str, b: str) -> dict[str, Any]:
        start = time.perf_counter()
        grid = hf_stitch.stitch_grid(
            loaded[a], loaded[b], train, test_data=test, layers_a=layers_a, layers_b=layers_b,
            matchers=[*CLOSED, *MATCHERS.values()], detectors=DETECTORS, far_data=images.noise(TEST),
            task="image-classification", batch_size=100, resamples=200,
        )  # fmt: skip
        labels = {name: name for name in CLOSED} | {name: matcher.label for name, matcher in MATCHERS.items()}
        return {
            "matchers": {
                name: {f: rounded(grid.values(label, f)) for f in ("relative_accuracy", "structural_error")}
                | {d: rounded(detection.figures[label]["auroc"][..., 0]) for d, detection in grid.detections.items()}
                for name, label in labels.items()
            },
            "far": {d: rounded(detection.controls["far"][:, 1]) for d, detection in grid.detections.items()},
            "controls": {
                d: {name: rounded(f.controls[name]) for name in ("far", "train")} for d, f in grid.detections.items()
            },
            "doses": {d: {"coloured": rounded(f.doses["coloured"][..., 0])} for d, f in grid.detections.items()},
            "seconds": round(time.perf_counter() - start),
        }

    pairs = {
        f"{a} -> {b}": study.cached(arguments.out / f"{a} {b}.json", partial(measured, a, b))
        for a, b in paired(list(loaded), PAIRS)
    }
    sizes = {"train": TRAIN, "test": TEST, "steps": STEPS, "sources": SOURCES, "targets": TARGETS}
    record = {"pairs": pairs, "layers": [layers_a, layers_b], "preset": sizes}
    study.write_results("cause", record, page, arguments.out)


(REASON,) = study.stated(__file__)


def page(record: Mapping[str, Any]) -> str:
    preset, pairs = record["preset"], record["pairs"]
    cells_of, only = _only(record)
    distant = _distant_cells(preset)
    lines = [
        [key, record["layers"][0][i], record["layers"][1][j], *cells_of[key].line(i, j)]
        for key, mask in only.items()
        for i, j in np.argwhere(mask)
    ]
    columns = [
        "penalty", "accurate, distant cells", "of these, no stranger than least squares", "relative accuracy, distant",
        "structural error, distant", f"AUROC, distant: {', '.join(DETECTORS)}", "relative accuracy, corresponding",
    ]  # fmt: skip
    names = list(next(iter(pairs.values()))["matchers"])
    table = study.markdown(columns, [_line(name, cells_of, distant, preset) for name in names])
    head = ["pair", "from", "to", "least squares", "AUROC", "task loss", "AUROC", "penalised", "AUROC", "penalty"]
    return filled(
        __file__, claims(record), table=table, cells=study.markdown(head, lines),
        pairs=study.counted(len(pairs), "pair"), sources=", ".join(record["layers"][0]),
        targets=", ".join(record["layers"][1]), steps=preset["steps"], train=preset["train"],
        test=preset["test"], margin=MARGIN,
    )  # fmt: skip


def claims(record: Mapping[str, Any]) -> list[dict[str, str]]:
    cells_of, only = _only(record)
    counts = {key: (int((of.kept() & only[key]).sum()), int(only[key].sum())) for key, of in cells_of.items()}
    held, total = (sum(some) for some in zip(*counts.values(), strict=True))
    shares = [familiar / of for familiar, of in counts.values() if of]
    tested = all(of.tested for of in cells_of.values()) and total >= LEAST
    part = True if tested and max(shares) <= LOST else False if tested and min(shares) >= KEPT else None
    ours = f"{held} of {total} cells"
    if not all(of.tested for of in cells_of.values()):
        ours += "; the record lacks tests of the detectors with noise"
    return [REASON.row(ours, f"{len(cells_of)} pairs, {total} cells", [part], len(cells_of))]


def _distant_cells(preset: Mapping[str, Any]) -> NDArray[np.bool_]:
    distant: NDArray[np.bool_] = np.abs(np.subtract.outer(preset["sources"], preset["targets"])) >= 2
    return distant


def _only(record: Mapping[str, Any]) -> tuple[dict[str, "_Cells"], dict[str, NDArray[np.bool_]]]:
    """Return the figures of each pair, and the distant cells with a detector where only task loss is accurate."""
    cells_of, distant = {key: _Cells(one) for key, one in record["pairs"].items()}, _distant_cells(record["preset"])
    return cells_of, {
        key: distant & of.judged & (of.accuracy("task loss") >= ACCURATE) & (of.accuracy(DIRECT) < ACCURATE)
        for key, of in cells_of.items()
    }


class _Cells:
    """Figures of one pair of networks."""

    def __init__(self, one: Mapping[str, Any]) -> None:
        self._matchers = one["matchers"]
        self.tested = "doses" in one
        self._usable = {
            d: (read_array(one["far"][d]) > 0.5) & (passes(one, d) if self.tested else True) for d in DETECTORS
        }
        self.judged = np.any([*self._usable.values()], 0)  # layers of the target with a detector
        self.penalised = [name for name in self._matchers if name.split()[0] in PENALTIES.values()]

    def accuracy(self, matcher: str, figure: str = "relative_accuracy") -> Array:
        return read_array(self._matchers[matcher][figure])

    def auroc(self, matcher: str, detector: str) -> Array:
        """Return the AUROCs of a detector, NaN where it does not detect images of noise or noise on activations."""
        return np.where(self._usable[detector][None], read_array(self._matchers[matcher][detector]), np.nan)

    def familiar(self, matcher: str) -> NDArray[np.bool_]:
        """Return the mask of the cells where a matcher is not stranger than least squares."""
        more = [self.auroc(matcher, d) - self.auroc(DIRECT, d) for d in DETECTORS]
        close: NDArray[np.bool_] = np.nan_to_num(np.stack(more), nan=-1.0).max(0) <= MARGIN
        return close & np.isfinite(more).any(0)

    def kept(self) -> NDArray[np.bool_]:
        """Return the mask of the cells with a penalised stitch that is accurate and not stranger than least squares."""
        accurate = [(self.accuracy(name) >= ACCURATE) & self.familiar(name) for name in self.penalised]
        return np.any(accurate, axis=0)

    def line(self, i: int, j: int) -> list[str]:
        accurate = [name for name in self.penalised if self.accuracy(name)[i, j] >= ACCURATE]
        compared = [DIRECT, "task loss"]
        best = min(accurate, key=lambda name: self._strangest(name, i, j)) if accurate else None
        cells = [text for name in compared for text in self._shown(name, i, j)]
        return [*cells, *(self._shown(best, i, j) if best else ("–", "–")), best or "none is accurate"]

    def _strangest(self, matcher: str, i: int, j: int) -> float:
        return float(np.nanmax([self.auroc(matcher, d)[i, j] for d in DETECTORS]))

    def _shown(self, matcher: str, i: int, j: int) -> tuple[str, str]:
        return f"{self.accuracy(matcher)[i, j]:.2f}", f"{self._strangest(matcher, i, j):.2f}"


def _line(
    name: str, cells_of: Mapping[str, _Cells], distant: NDArray[np.bool_], preset: Mapping[str, Any]
) -> list[str]:
    def joined(values: Callable[[_Cells], Array], where: NDArray[np.bool_] = distant) -> Array:
        return np.concatenate([values(of)[where] for of in cells_of.values()])

    accuracy, familiar = joined(lambda of: of.accuracy(name)), joined(lambda of: of.familiar(name))
    fine, error = accuracy >= ACCURATE, joined(lambda of: of.accuracy(name, "structural_error"))
    aurocs = (np.nanmean(joined(lambda of, d=d: of.auroc(name, d))) for d in DETECTORS)
    corresponding = joined(lambda of: of.accuracy(name), np.equal.outer(preset["sources"], preset["targets"]))
    return [
        name, f"{int(fine.sum())} of {len(fine)}", f"{int((fine & familiar).sum())}", f"{accuracy.mean():.2f}",
        f"{error.mean():.2f}", " ".join(f"{value:.2f}" for value in aurocs),
        f"{corresponding.mean():.3f}" if len(corresponding) else "–",
    ]  # fmt: skip
