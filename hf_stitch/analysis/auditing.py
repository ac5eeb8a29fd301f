"""Results of :func:`hf_stitch.audit`: accuracy of a stitched model, and distribution of its activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_stitch.analysis.detection.noise import DOSES
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.printing import visible
from hf_stitch.representation import Pooling
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import Group

STITCHED = "stitched"
"""Name of the audited model in its detections, in place of a matcher."""


@dataclass(frozen=True)
class Audit(Result):
    """Accuracy of a stitched model and distribution of its activations, returned by :func:`hf_stitch.audit`.

    Attributes:
        evaluation: The scores compared with baselines.
        min_relative_accuracy: Smallest relative accuracy that counts as accurate.
        max_dose: Largest dose of noise that does not count as out of distribution.
        pooling: Pooling of the stitching layer.
        residual: Part of the stitching layer (``body``, ``prefix``) -> ``‖T f − g‖² / ‖g‖²`` over all positions at the
            target cut (Balogh and Jelasity 2025, direct matching, structural; squared and relative as in their code). 0
            for the target's own activations, 1 for activations that are not better than zeros.
        detections: Part (``body``; ``prefix`` if the layer has prefix tokens) -> detector -> its detection, with
            controls.
        known: Fingerprint of the samples that the detectors were fitted to.
        seed: Seed of the bootstrap, of noise and of splits.

    Example:
        >>> from hf_stitch.analysis import Score
        >>> rows = {"stitched": 0.8, "mean_only": 0.1, "target": 0.9, "chance": 0.1}
        >>> scores = {
        ...     name: {"relative_accuracy": Score(value, value - 0.02, value + 0.02)} for name, value in rows.items()
        ... }
        >>> dose = {"stitched": {"dose": np.array([[[0.02, 0.0, 0.04]]])}}
        >>> detections = {"body": {"knn": Detection("knn", ("bn1",), False, dose, {}, {})}}
        >>> evaluation = Evaluation("image-classification", 1000, "sha256:0", scores)
        >>> Audit(evaluation, 0.8, 0.1, "none", {"body": 0.2}, detections, "sha256:1", 0).verdict
        'accurate, and no detector finds it out of distribution'
    """

    page: ClassVar[str] = "hf_stitch.reports.stitched:audit_section"
    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    evaluation: Evaluation
    min_relative_accuracy: float
    max_dose: float
    pooling: Pooling
    residual: Mapping[str, float]
    detections: Mapping[str, Mapping[str, Detection]]
    known: str
    seed: int

    @property
    def figure(self) -> str:
        """Name of the figure that decides :attr:`is_accurate`."""
        scores = self.evaluation.scores["stitched"]
        figures = [figure for figure in task_named(self.evaluation.task).compared if figure in scores]
        return next((figure for figure in figures if not np.isnan(scores[figure].value)), figures[0])

    @property
    def is_accurate(self) -> bool:
        """Whether the figure reaches the threshold and its interval is better than the mean-only baseline and chance.

        For language models, the relative perplexity must be at most the inverse of the threshold.
        """
        scores = {who: row[self.figure] for who, row in self.evaluation.scores.items()}
        stitched, rivals = scores["stitched"], [scores[who].value for who in ("mean_only", "chance")]
        if not task_named(self.evaluation.task).figures[self.figure]:
            return stitched.value <= 1 / self.min_relative_accuracy and stitched.high < min(rivals)
        return stitched.value >= self.min_relative_accuracy and stitched.low > max(rivals)

    @property
    def doses(self) -> dict[str, Score]:
        """Equivalent dose of noise of each detector that counts, with the part if the layer has prefix tokens."""
        return {name: _score(detection, "dose") for name, detection in self._all.items() if not _fault(detection)}

    @property
    def left_out(self) -> dict[str, str]:
        """Detector that does not count -> reason."""
        return {name: reason for name, detection in self._all.items() if (reason := _fault(detection))}

    @property
    def is_shrunk(self) -> bool:
        """Whether any detector that counts scores the stitched activations lower than the target's own."""
        counted = (d for d in self._all.values() if not _fault(d) and "one_sided" in d.figures[STITCHED])
        return any(_score(d, "one_sided").high < 0.5 for d in counted)

    @property
    def in_distribution(self) -> bool | None:
        """Whether the dose of every detector that counts is at most :attr:`max_dose`.

        False if the whole interval of any detector is above it; ``None`` if undecided, because an interval contains it
        or no detector counts.
        """
        doses = self.doses.values()
        if any(dose.low > self.max_dose for dose in doses):
            return False
        return True if doses and all(dose.high <= self.max_dose for dose in doses) else None

    @property
    def verdict(self) -> str:
        """One sentence without figures."""
        sentence = "accurate" if self.is_accurate else "inaccurate"
        if self.in_distribution is None:
            reason = "the interval is too wide"
            if not self.doses:
                reason = f"no detector counts ({'; '.join(f'{name} {text}' for name, text in self.left_out.items())})"
            return f"{sentence}, undecided whether out of distribution: {reason}"
        if self.in_distribution:
            sentence += f", {'and' if self.is_accurate else 'though'} no detector finds it out of distribution"
            sentence += " (it is shrunk, which hides strange activations)" if self.is_shrunk else ""
            return sentence if self.is_accurate else f"{sentence}: no sign of similarity"
        if self.is_accurate:
            return "accurate but out of distribution: do not read this as similarity"
        return "inaccurate and out of distribution: no sign of similarity"

    def __str__(self) -> str:
        """Return the verdict with its figures."""
        doses = ", ".join(f"{name} {dose}" for name, dose in self.doses.items()) or "none"
        has_far = all("far" in detection.controls for detection in self._all.values())
        notes = "" if has_far else "; without far_data, it is unknown whether the detectors distinguish any samples"
        uncounted = "".join(f"; {name} does not count, it {reason}" for name, reason in self.left_out.items())
        return visible(
            f"{self.verdict} ({self.figure.replace('_', ' ')} {self.evaluation[self.figure]}; as strange as noise of "
            f"relative residual {doses}, up to {self.max_dose:g} does not count as strange{notes}{uncounted}; "
            f"relative residual {self.residual['body']:.3f})"
        )

    def __rich__(self) -> Group:
        """Return the verdict and the tables that ``rich`` prints."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        controls = list(dict.fromkeys(name for detection in self._all.values() for name in detection.controls))
        table = Table(
            "detector", "dose", "AUROC", *controls,
            title=f"stitched against target activations, pooling: {self.pooling}; strange above a dose of "
            f"{self.max_dose:g}",
        )  # fmt: skip
        for name, detection in self._all.items():
            cells = [
                str(Score(*map(float, detection.controls[c][0]))) if c in detection.controls else "–" for c in controls
            ]
            notes = [Text(reason)] if (reason := _fault(detection)) else []  # a column without a title
            table.add_row(Text(name), str(_score(detection, "dose")), str(_score(detection, "auroc")), *cells, *notes)
        residuals = ", ".join(f"{value:.3f}" for value in self.residual.values())
        table.caption = f"relative residual of {', '.join(self.residual)}: {residuals}"
        return Group(Text(self.verdict, style="bold"), self.evaluation.__rich__(), table)

    def to_pandas(self) -> pandas.DataFrame:
        """Return all figures and controls of the detectors in long format.

        Returns one row per part, detector and figure, with the columns ``part``, ``detector``, ``figure`` (``dose``,
        ``auroc``, …, ``far``, ``coloured 0.01``, …), ``value``, ``low`` and ``high``.
        """
        import pandas

        rows = []
        for part, detections in self.detections.items():
            for name, detection in detections.items():
                measured = {figure: values[0, 0] for figure, values in detection.figures[STITCHED].items()}
                measured |= {row.measure: (row.value, row.low, row.high) for row in detection.to_pandas().itertuples()}
                rows += [
                    {"part": part, "detector": name, "figure": figure, "value": v[0], "low": v[1], "high": v[2]}
                    for figure, v in measured.items()
                ]
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """Plot the AUROCs of stitched activations, noise and controls with confidence intervals."""
        from hf_stitch.plots import intervals

        scores: dict[str, tuple[float, float, float]] = {}
        for name, detection in self._all.items():
            rows = {"stitched": _score(detection, "auroc")}
            rows |= {
                f"noise {d:g}": Score(*map(float, row))
                for d, row in zip(DOSES, detection.doses["coloured"][0], strict=True)
            }
            rows |= {control: Score(*map(float, values[0])) for control, values in detection.controls.items()}
            scores |= {f"{name}: {row}": (s.value, s.low, s.high) for row, s in rows.items() if not np.isnan(s.value)}
        return intervals(scores, label="AUROC against the target's own activations")

    @property
    def _all(self) -> dict[str, Detection]:
        several = len(self.detections) > 1
        return {
            f"{name} ({part})" if several else name: detection
            for part, detections in self.detections.items()
            for name, detection in detections.items()
        }


def _score(detection: Detection, figure: str) -> Score:
    return Score(*map(float, detection.figures[STITCHED][figure][0, 0]))


def _fault(detection: Detection) -> str:
    """Return why a detector does not count; empty if it counts."""
    for reason in detection.blind.values():
        return reason
    if np.isnan(_score(detection, "dose").value):
        return next(
            (f"is undefined: {reason}" for key, reason in detection.undefined.items() if " -> " in key), "is undefined"
        )
    return ""
