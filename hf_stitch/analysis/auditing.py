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
"""Name of the audited model in its detections, in the place of a matcher."""


@dataclass(frozen=True)
class Audit(Result):
    """Accuracy of a stitched model and distribution of its activations, returned by :func:`hf_stitch.audit`.

    Attributes:
        evaluation: The scores compared with baselines.
        min_relative_accuracy: Relative accuracy from which the stitched model counts as accurate.
        max_dose: Dose of noise up to which it does not count as out of distribution.
        pooling: Pooling of the stitching layer.
        residual: Part of the stitching layer (``body``, ``prefix``) -> ``‖T f − g‖² / ‖g‖²`` over all positions at the
            target cut (Balogh and Jelasity 2025, direct matching, structural; squared and relative as in their code).
            0 for the target's own activations, 1 for activations no better than zeros.
        detections: Part (``body``; ``prefix`` if there are prefix tokens) -> detector -> what it finds, with its
            controls.
        known: Fingerprint of the samples to which the detectors were fitted.
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
        """Name of the figure on which :attr:`is_accurate` is based."""
        scores = self.evaluation.scores["stitched"]
        figures = [figure for figure in task_named(self.evaluation.task).compared if figure in scores]
        return next((figure for figure in figures if not np.isnan(scores[figure].value)), figures[0])

    @property
    def is_accurate(self) -> bool:
        """Whether the figure reaches the threshold and its interval is better than the mean-only baseline and chance.

        For language models, the relative perplexity must be at most the inverse of the threshold.
        """
        scores = {who: row[self.figure] for who, row in self.evaluation.scores.items()}
        own, rivals = scores["stitched"], [scores[who].value for who in ("mean_only", "chance")]
        if not task_named(self.evaluation.task).figures[self.figure]:
            return own.value <= 1 / self.min_relative_accuracy and own.high < min(rivals)
        return own.value >= self.min_relative_accuracy and own.low > max(rivals)

    @property
    def doses(self) -> dict[str, Score]:
        """Equivalent dose of noise, by detector that counts; behind it the part, if there are prefix tokens."""
        return {name: _score(found, "dose") for name, found in self._all.items() if not _silent(found)}

    @property
    def left_out(self) -> dict[str, str]:
        """Detector that does not count -> why."""
        return {name: why for name, found in self._all.items() if (why := _silent(found))}

    @property
    def is_shrunk(self) -> bool:
        """Whether a detector that counts scores the stitched activations lower than the target's own."""
        counted = (
            found for found in self._all.values() if not _silent(found) and "one_sided" in found.figures[STITCHED]
        )
        return any(_score(found, "one_sided").high < 0.5 for found in counted)

    @property
    def in_distribution(self) -> bool | None:
        """Whether the dose of every detector that counts is at most :attr:`max_dose`.

        False if the whole interval of one is above; ``None`` if undecided, because an interval contains it or no
        detector counts.
        """
        doses = self.doses.values()
        if any(dose.low > self.max_dose for dose in doses):
            return False
        return True if doses and all(dose.high <= self.max_dose for dose in doses) else None

    @property
    def verdict(self) -> str:
        """One sentence without figures."""
        first = "accurate" if self.is_accurate else "inaccurate"
        if self.in_distribution is None:
            why = "the interval is too wide"
            if not self.doses:
                why = f"no detector counts ({'; '.join(f'{name} {text}' for name, text in self.left_out.items())})"
            return f"{first}, undecided whether out of distribution: {why}"
        if self.in_distribution:
            first += f", {'and' if self.is_accurate else 'though'} no detector finds it out of distribution"
            first += " (it is shrunk, which hides what is strange)" if self.is_shrunk else ""
            return first if self.is_accurate else f"{first}: no sign of similarity"
        if self.is_accurate:
            return "accurate but out of distribution: do not read this as similarity"
        return "inaccurate, and out of distribution: no sign of similarity"

    def __str__(self) -> str:
        """Return the verdict with its figures."""
        doses = ", ".join(f"{name} {dose}" for name, dose in self.doses.items()) or "none"
        far = all("far" in found.controls for found in self._all.values())
        notes = "" if far else "; without far_data, it is unknown whether the detectors tell any samples apart"
        uncounted = "".join(f"; {name} does not count, it {why}" for name, why in self.left_out.items())
        return visible(
            f"{self.verdict} ({self.figure.replace('_', ' ')} {self.evaluation[self.figure]}; as strange as noise of "
            f"relative residual {doses}, where up to {self.max_dose:g} does not count as strange{notes}{uncounted}; "
            f"relative residual {self.residual['body']:.3f})"
        )

    def __rich__(self) -> Group:
        """Return the verdict and the tables that ``rich`` prints."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        controls = list(dict.fromkeys(name for found in self._all.values() for name in found.controls))
        table = Table(
            "detector", "dose", "AUROC", *controls,
            title=f"stitched against target activations, pooling: {self.pooling}; strange above a dose of "
            f"{self.max_dose:g}",
        )  # fmt: skip
        for name, found in self._all.items():
            shown = [str(Score(*map(float, found.controls[c][0]))) if c in found.controls else "–" for c in controls]
            notes = [Text(why)] if (why := _silent(found)) else []  # a column without a title, if there are some
            table.add_row(Text(name), str(_score(found, "dose")), str(_score(found, "auroc")), *shown, *notes)
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
            for name, found in detections.items():
                measured = {figure: values[0, 0] for figure, values in found.figures[STITCHED].items()}
                measured |= {row.measure: (row.value, row.low, row.high) for row in found.to_pandas().itertuples()}
                rows += [
                    {"part": part, "detector": name, "figure": figure, "value": v[0], "low": v[1], "high": v[2]}
                    for figure, v in measured.items()
                ]
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """Plot the AUROCs of stitched activations, noise and controls with their intervals."""
        from hf_stitch.plots import intervals

        scores: dict[str, tuple[float, float, float]] = {}
        for name, found in self._all.items():
            rows = {"stitched": _score(found, "auroc")}
            rows |= {
                f"noise {d:g}": Score(*map(float, row))
                for d, row in zip(DOSES, found.doses["coloured"][0], strict=True)
            }
            rows |= {control: Score(*map(float, values[0])) for control, values in found.controls.items()}
            scores |= {f"{name}: {row}": (s.value, s.low, s.high) for row, s in rows.items() if not np.isnan(s.value)}
        return intervals(scores, label="AUROC against the target's own activations")

    @property
    def _all(self) -> dict[str, Detection]:
        several = len(self.detections) > 1
        return {
            f"{name} ({part})" if several else name: found
            for part, detections in self.detections.items()
            for name, found in detections.items()
        }


def _score(found: Detection, figure: str) -> Score:
    return Score(*map(float, found.figures[STITCHED][figure][0, 0]))


def _silent(found: Detection) -> str:
    """Return why a detector does not count; empty if it does."""
    for why in found.blind.values():
        return why
    if np.isnan(_score(found, "dose").value):
        return next((f"is undefined: {why}" for what, why in found.undefined.items() if " -> " in what), "is undefined")
    return ""
