"""Can this stitch be believed?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.distribution import SEPARABLE, Distribution, Rows, compare_distributions
from hf_stitch.analysis.evaluation import Evaluation, evaluate
from hf_stitch.analysis.scoring import whole_target
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples, check_same_order, paired_batches
from hf_stitch.registry import registries
from hf_stitch.representation import Representation, RowsPolicy
from hf_stitch.statistics import Moments
from hf_stitch.stitches.layer import paired_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

Parts = Mapping[str, tuple[Tensor, Tensor, Tensor]]
"""Part of a stitching layer -> stitched rows, the target's rows, and the sample of the batch that each belongs to."""


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found.

    Attributes:
        evaluation: The scores beside their baselines.
        accurate: Share of the target's accuracy from which the stitch counts as accurate.
        rows: The rows policy of the residual and of the distributions.
        residual: ``‖T f − g‖² / ‖g‖²`` over all rows at the target's cut (Balogh and Jelasity 2025, direct matching,
            structural; squared and relative as in their code) by part of the stitching layer: 0 the target's own
            representations; 1 no better than zeros.
        distributions: How stitched representations are told from the target's, by part (``body``; ``prefix`` where
            there are prefix tokens).
        control: Fingerprint of the samples of the control, ``None`` without one.
        seed: Of the bootstrap and of the rows drawn.
    """

    evaluation: Evaluation
    accurate: float
    rows: RowsPolicy
    residual: Mapping[str, float]
    distributions: Mapping[str, Distribution]
    control: str | None
    seed: int

    @property
    def figure(self) -> str:
        """The figure that tells whether the stitch is accurate."""
        figures = self.evaluation.scores["stitched"]
        return next(f for f in ("relative_accuracy", "relative_perplexity", "agreement") if f in figures)

    @property
    def is_accurate(self) -> bool:
        """Whether it reaches the threshold, and with its whole interval is better than the mean alone and chance.

        Of language models, the relative perplexity must be at most the inverse of the threshold.
        """
        scores = {who: row[self.figure] for who, row in self.evaluation.scores.items()}
        own, rivals = scores["stitched"], [scores[who].value for who in ("mean only", "chance")]
        if self.figure == "relative_perplexity":
            return own.value <= 1 / self.accurate and own.high < min(rivals)
        return own.value >= self.accurate and own.low > max(rivals)

    @property
    def in_distribution(self) -> bool | None:
        """Whether every part is; ``None`` if no part is out and one cannot be told."""
        separated = [d.separated for d in self.distributions.values()]
        return False if True in separated else None if None in separated else True

    @property
    def worst(self) -> Distribution:
        """Of the parts, the one told from the target's best."""
        return max(self.distributions.values(), key=lambda d: d.separation.value)

    @property
    def verdict(self) -> str:
        """One plain sentence, without figures."""
        if self.in_distribution is None:
            why = (
                "the target's own representations of these samples are told from those it was trained on"
                if any(d.control is not None and d.control.high >= SEPARABLE for d in self.distributions.values())
                else "the interval is too wide"
            )
            first = "accurate" if self.is_accurate else "inaccurate"
            return f"{first}, and whether in distribution cannot be told: {why}"
        if self.is_accurate:
            return (
                "accurate and in distribution"
                if self.in_distribution
                else "accurate but out of distribution: do not read this as similarity"
            )
        return (
            f"inaccurate, {'though in' if self.in_distribution else 'and out of'} distribution: no sign of similarity"
        )

    def __str__(self) -> str:
        """The sentence with its figures."""
        worst = self.worst
        side = f", {worst.side}" if worst.separated else ""
        control = "no control" if worst.control is None else f"control {worst.control}"
        return (
            f"{self.verdict} ({self.figure.replace('_', ' ')} {self.evaluation[self.figure]}; told from the target's "
            f"own with AUROC {worst.separation}{side}, {control}; relative residual "
            f"{self.residual['body']:.3f})"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back. ``verdict`` is written for readers, not read."""
        return {
            "verdict": self.verdict,
            "evaluation": self.evaluation.to_dict(),
            "accurate": self.accurate,
            "rows": self.rows,
            "residual": dict(self.residual),
            "distributions": {part: found.to_dict() for part, found in self.distributions.items()},
            "control": self.control,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Audit:
        """Read :meth:`to_dict`."""
        read = {
            "evaluation": Evaluation.from_dict(record["evaluation"]),
            "distributions": {part: Distribution.from_dict(d) for part, d in record["distributions"].items()},
        }
        return cls(**{key: value for key, value in {**record, **read}.items() if key != "verdict"})

    def __rich__(self) -> Group:
        """The sentence and the tables that ``rich`` prints."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "part", "raw", "compensated", "distance", "control", "residual",
            title=f"AUROC, stitched against the target's own, rows: {self.rows}",
        )  # fmt: skip
        for part, found in self.distributions.items():
            scores = (found.raw, found.compensated, found.distance, found.control or "–")
            table.add_row(part, *(Text(str(score)) for score in scores), f"{self.residual[part]:.3f}")
        return Group(Text(self.verdict, style="bold"), self.evaluation.__rich__(), table)

    def plot(self) -> Figure:
        """The AUROCs with their intervals."""
        from hf_stitch.plots import intervals

        several = len(self.distributions) > 1
        scores = {
            f"{part}: {name}" if several else name: (score.value, score.low, score.high)
            for part, found in self.distributions.items()
            for name, score in (
                ("raw", found.raw), ("compensated", found.compensated), ("distance", found.distance),
                ("control", found.control),
            )
            if score is not None
        }  # fmt: skip
        return intervals(scores, label="AUROC, stitched against the target's own")


def audit(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    target_data: Any = None,
    train: Any = None,
    rows: RowsPolicy | None = None,
    accurate: float = 0.8,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Audit:
    """Say whether a stitched model is accurate, and whether its representations are such as the target has.

    A stitch that is trained on the task may drive the target's half by representations that the target never has: its
    score says nothing of similarity (Balogh and Jelasity 2025). Only accurate *and* in distribution is evidence.

    *Accurate*: at least ``accurate`` of the target's accuracy, and above the mean alone and chance.
    *In distribution*: a likelihood ratio from moments does not tell the stitched representations from the target's, of
    the same samples, or would not if they had not regressed to the mean (:func:`compare_distributions`): AUROC, with
    its whole 95% interval over samples, below .64. *Out*: above .64 and above the control; this tells the target's
    representations of ``data`` from those of ``train`` by the same score. Otherwise it cannot be told.

    The moments are those of all rows; one row of each sample is scored, under ``positions`` one position drawn at
    random (by the sample's id). The rows are those that the stitch maps: of others, such as means of positions, even a
    least-squares map of positions is no conditional mean.

    The verdict goes into the model's recipe too, so that its card says it when it is saved or pushed.

    Args:
        stitched: The model, with a head.
        data: Held-out raw samples, which the stitch was not fitted on.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        target_data: Where the target is to see other samples, with the same ids in the same order.
        train: Samples that the target was trained on, for the control, as it sees them; as many as in ``data`` will do.
        rows: Another rows policy than the stitch's own.
        accurate: Between 0 and 1; the default is the threshold of Csiszárik et al. 2021, section 8.
        batch_size: Samples per forward.
        seed: Of the bootstrap and of the rows drawn.
        resamples: Number of bootstrap resamples.
        progress: Show progress bars.

    Raises:
        ValueError: As :func:`hf_stitch.evaluate`; also if rows do not correspond under the policy, or there are too
            few samples for moments of that width.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> _ = torch.manual_seed(0)  # some random networks give all images one class
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 2))
        >>> images = torch.randn(300, 3, 2, 2)
        >>> net = hf_stitch.load(net, example_inputs=images[:2])
        >>> itself = hf_stitch.stitch(net, "2", net, "2", "identity", data=images)
        >>> hf_stitch.audit(itself, images).verdict
        'accurate and in distribution'
    """
    if not 0 < accurate <= 1:
        raise ValueError(f"accurate must be above 0 and at most 1, got {accurate}")
    whole, samples = whole_target(stitched, target), Samples.of(data)
    others = samples if target_data is None else Samples.of(target_data)
    check_same_order(samples, others)
    policy = rows or stitched.stitch.rows
    if stitched.task is None:
        raise ValueError(f"{type(stitched).__name__} has no head that could be scored; stitch with a task")
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    found = _collect(samples, others, partial(_stitched_rows, stitched, whole, policy), **options)
    seen = None if train is None else Samples.of(train)
    trained = {} if seen is None else _collect(seen, seen, partial(_target_rows, stitched, whole, policy), **options)
    distributions = {
        part: compare_distributions(of_part, trained.get(part), resamples=resamples, seed=seed)
        for part, of_part in found.items()
    }
    residual = registries.metrics.get("direct_matching").formula
    audited = Audit(
        evaluate(stitched, samples, target=whole, target_data=target_data, resamples=resamples, **options),
        accurate,
        policy,
        {part: float(residual(_merged(of_part.moments))) for part, of_part in found.items()},
        distributions,
        None if seen is None else seen.fingerprint,
        seed,
    )
    verdict = {"verdict": audited.verdict, "data": samples.fingerprint, "seed": seed}
    stitched.config.recipe = {**(stitched.config.recipe or {}), "audit": verdict}
    return audited


def _stitched_rows(
    stitched: StitchedModel, whole: Adapter, rows: RowsPolicy, raw: list[Any], other: list[Any]
) -> Parts:
    with evaluating(stitched):
        mapped = stitched.transfer(**stitched.preprocess(raw))
    return _parts(mapped, _own(stitched, whole, other), rows, fitted=rows == stitched.stitch.rows)


def _target_rows(stitched: StitchedModel, whole: Adapter, rows: RowsPolicy, raw: list[Any], other: list[Any]) -> Parts:
    real = _own(stitched, whole, other)
    return _parts(real, real, rows, fitted=rows == stitched.stitch.rows)


def _own(stitched: StitchedModel, whole: Adapter, raw: list[Any]) -> Representation:
    """The target's own representation at its cut."""
    layer = (stitched.config.target or {})["cut"]["layer"]
    return whole.encode(whole.preprocess(raw), layer)[layer]


def _parts(mapped: Representation, real: Representation, rows: RowsPolicy, *, fitted: bool) -> Parts:
    """Rows that correspond, with their samples; under the stitch's own policy, those that it was fitted on."""
    pairs = paired_rows(mapped, real, rows) if fitted else {"body": (mapped.rows(rows), real.rows(rows))}
    masked = real if mapped.mask is None else mapped
    owners = {"body": masked.row_samples(rows).cpu(), "prefix": torch.arange(real.batch)}
    return {part: (x.double().cpu(), y.double().cpu(), owners[part]) for part, (x, y) in pairs.items()}


@torch.no_grad()
def _collect(
    samples: Samples,
    others: Samples,
    rows_of: Callable[[list[Any], list[Any]], Parts],
    *,
    batch_size: int,
    seed: int,
    progress: bool,
) -> dict[str, Rows]:
    """The moments of all rows and a row of each sample, by part; the same whatever the order and the batches are."""
    order, draws = _by_id(samples, seed)
    halves, start = np.empty(len(samples), np.int64), 0
    halves[order] = np.arange(len(samples)) % 2
    moments: dict[str, tuple[Moments, Moments]] = {}
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch, other in paired_batches(samples, others, batch_size, "auditing" if progress else None):
        places = slice(start, start := start + len(batch.ids))
        for part, (x, y, owners) in rows_of(batch.samples, other.samples).items():
            of_part = moments.setdefault(part, (Moments(x.shape[1], y.shape[1]), Moments(x.shape[1], y.shape[1])))
            in_half = torch.from_numpy(halves[places])[owners]
            for half in (0, 1):
                of_part[half].update(x[in_half == half], y[in_half == half])
            one = _one_of_each(owners, draws[places])
            kept.setdefault(part, []).append((x[one], y[one]))
    return {
        part: Rows(
            {
                side: torch.cat([pair[i] for pair in kept[part]]).numpy()[order]
                for i, side in enumerate(("stitched", "target"))
            },
            moments[part],
        )
        for part in moments
    }


def _by_id(samples: Samples, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random order of the samples and a number in [0, 1) for each, which go with the ids."""
    random = np.random.default_rng(seed)
    by_id = np.array(sorted(range(len(samples)), key=lambda place: repr(samples.ids[place])))
    draws = np.empty(len(samples))
    draws[by_id] = random.random(len(samples))
    return by_id[random.permutation(len(samples))], draws


def _one_of_each(owners: Tensor, draws: np.ndarray) -> Tensor:
    """For each sample of a batch one of its rows, which stand together."""
    counts = torch.bincount(owners, minlength=len(draws))
    if not bool(counts.all()):
        raise ValueError("a sample has no row under this rows policy: it is masked entirely")
    return counts.cumsum(0) - counts + (torch.from_numpy(draws) * counts).long()


def _merged(halves: Sequence[Moments]) -> Moments:
    first, second = halves
    return Moments(first.dx, first.dy).merge(first).merge(second)
