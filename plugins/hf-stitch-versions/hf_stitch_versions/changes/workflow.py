"""What changed between two versions of a network: :func:`diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.data import Data
from hf_stitch.options import Within, checked
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.tasks.base import resampled
from hf_stitch_versions.changes.effects import FIRST, OTHER, SEEDS, Effects
from hf_stitch_versions.changes.lineage import lineage
from hf_stitch_versions.changes.outputs import Array, Measure, calibration_error
from hf_stitch_versions.changes.parts import Pairing, Part, pair
from hf_stitch_versions.changes.result import LEAST_RATIO, Change, Difference, Effect, Estimate, Outputs
from hf_stitch_versions.changes.weights import effective, weight_change
from hf_stitch_versions.inputs import OTHER_SIDE
from hf_stitch_versions.sources import in_memory

RESAMPLES = 5000
"""Number of bootstrap resamples of the samples."""

FEWEST = 20
"""Least number of samples for intervals; with fewer there are none."""

WORST = 5
"""Number of samples that are named because their outputs differ most."""

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the distances of single samples."""

BOUNDS: Mapping[str, Callable[[Difference], float]] = {
    "KL": lambda found: _distance(found, "KL"),
    "squared_difference": lambda found: _distance(found, "squared difference"),
    "disagreement": lambda found: 1 - _agreement(found),
    "weight_change": lambda found: found.weights.change,
}
"""What can be bounded -> its value."""


@checked
def diff(
    a: str | nn.Module | Adapter, b: str | nn.Module | Adapter, data: Data | None = None, *,
    within: Iterable[str] = (), fail_above: Mapping[str, float] | None = None,
    confidence: Annotated[float, Within(0, 1, above=True, below=True)] = 0.95, **options: Unpack[RunOptions],
) -> Difference:  # fmt: skip
    """Tell what changed between two versions of a network: in weights, outputs and activations, and which part does it.

    Each part of the second network (a block, the embeddings, the head) is put into the first one, and each part of the
    first into the second. What this does to the outputs stands beside what noise does that is added to the weights of
    the same part and has the norm of their change, weight by weight: rounding acts as such noise, tuning does more. A
    part is a finding if the lower end of this ratio, over samples and for all parts at once, is above 3.

    Hybrids go on from the recorded outputs of the parts before them, so that a network of n parts takes about 3 n + 2
    forwards per batch. Both networks compute in float32, or in float64 if one has such weights.

    Args:
        a: The first network, the base: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The second network. Its weights are paired by names and shapes, also under another prefix; adapters of PEFT
            count as merged, quantised weights as what they stand for.
        data: Raw samples, labelled or not; some hundreds. Without them only weights are compared.
        within: Parts to divide into the modules in them, as a block into attention, MLP and norms.
        fail_above: Bounds: ``KL``, ``squared_difference`` (networks without classes), ``disagreement``,
            ``weight_change`` -> greatest value. What is above is told in ``failed``, and the command ends with 1.
        confidence: Confidence of intervals, between 0 and 1.
        **options: Options of the run: ``batch_size``, ``seed`` (of noise and resamples), ``progress`` and
            ``accelerator``, as in :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The answer in a few sentences, and a table of the parts.

    Raises:
        ValueError: If the networks have few weights in common (then use :func:`hf_stitch.compare`), weights or outputs
            are not finite, outputs have other classes, or a bound has an unknown name.

    Example:
        >>> import copy, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> base = Sequential(Linear(4, 9), ReLU(), Linear(9, 9), ReLU(), Linear(9, 3))
        >>> tuned = copy.deepcopy(base)
        >>> _ = tuned[2].weight.data.add_(torch.ones(9, 9))
        >>> a, b = (hf_stitch.load(each, example_inputs=torch.randn(2, 4)) for each in (base, tuned))
        >>> found = diff(a, b, torch.randn(50, 4), progress=False)
        >>> [part.name for part in found.parts if part.weights.change], found.outputs.measure
        (['2'], 'squared difference')
    """
    if unknown := [name for name in fail_above or () if name not in BOUNDS]:
        raise ValueError(f"fail_above has no bound {unknown[0]!r}; bounds: {', '.join(BOUNDS)}")
    with Run.of(diff, options, takes=WITHOUT_STATE) as run:
        first, second = (in_memory(load_on(each, run.processes.device)) for each in (a, b))
        measure = Measure.of(first.task or second.task)
        for name in fail_above or () if data is not None else ():
            if name != "weight_change" and (name == "squared_difference") == measure.is_divergence:
                raise ValueError(
                    f"fail_above bounds {name}, and the outputs of these networks are compared by {measure.name}"
                )
        pairing = pair(first, second, effective(first.model), effective(second.model), tuple(within))
        samples = None if data is None else Samples.of(data)
        if samples is None and (needed := [name for name in fail_above or () if name != "weight_change"]):
            raise ValueError(f"fail_above bounds {needed[0]}, which needs data: pass data, or bound weight_change")
        found = _difference(first, second, pairing, samples, measure, confidence, run)
        bounds = ((name, BOUNDS[name](found), most) for name, most in (fail_above or {}).items())
        failed = [f"{name} is {value:.3g}, above {most:g}" for name, value, most in bounds if not value <= most]
        if (bounded := next((each for each in fail_above or () if each != "weight_change"), None)) and found.inputs:
            failed += [
                f"{bounded} is of outputs on the inputs of the first network; the second one's own differ: {each}"
                for each in found.inputs[:1] if each != OTHER_SIDE
            ]  # fmt: skip
        return replace(found, failed=tuple(failed))


def _difference(
    a: Adapter, b: Adapter, pairing: Pairing, samples: Samples | None, measure: Measure, confidence: float, run: Run
) -> Difference:  # fmt: skip
    """Compare weights, then outputs and hybrids."""
    changes = {part.name: weight_change(_of(pairing.a, part), _of(pairing.b, part)) for part in pairing.parts}
    blocks = [part.name for part in pairing.parts if part.block]
    notes = _notes(pairing)
    rest: Estimate | None = None
    inputs: tuple[str, ...] = ()
    outputs, effects, curves, moves, forwards = (
        None,
        dict[str, Effect](),
        dict[str, tuple[Estimate, Estimate]](),
        {},
        0.0,
    )
    if samples is not None:
        differ = frozenset(part.name for part in pairing.parts if changes[part.name].change or _other_code(a, b, part))
        engine = Effects(a, b, pairing, differ, measure, run)
        measured, ids = engine.measured(samples)
        resampling = Resampling(len(ids), confidence, run.seed)
        measured = _relative(measured)
        outputs = _outputs(measure, measured, ids, resampling)
        rest = resampling.mean(measured["rest"])
        tests = Tests(resampling, len(engine.parts), engine.local)
        effects = {part.name: tests.effect(part.name, measured) for part in engine.parts}
        curves = _curves(engine.order, measured, resampling)
        moves = {name: move for name in blocks if (move := engine.moved.found(name)) is not None}
        forwards = engine.cost / engine.batches
        if "elsewhere" in measured:
            notes.append(
                f"the vocabularies have {engine.widths[0]} and {engine.widths[1]} tokens: "
                f"{resampling.mean(measured['elsewhere'])} of the KL is probability of tokens that only one has"
            )
        if len(ids) < FEWEST:
            notes.append(f"{len(ids)} samples are too few for intervals: pass {FEWEST} or more")
        inputs = tuple(engine.inputs)
        notes += [f"the second network reads the inputs of the first; its own differ: {each}" for each in inputs[:1]]
        notes += [f"of the outputs, {name} is not compared" for name in engine.left_out]
        if not engine.replays:
            notes.append("the network cannot go on from outputs of its parts, so that halves were not exchanged")
    parts = [
        Change(
            part.name, _second_name(pairing, part), part.block, changes[part.name], effects.get(part.name),
            moves.get(part.name), part.tied,
        )
        for part in pairing.parts
    ]  # fmt: skip
    return Difference(
        str(a.reference), str(b.reference), 0 if samples is None else len(samples),
        None if samples is None else samples.fingerprint, weight_change(pairing.a, pairing.b), outputs, tuple(parts),
        rest, curves, lineage(pairing.a, pairing.b, blocks), pairing.missing, pairing.extra,
        tuple(f"{name} {one} against {two}" for name, (one, two) in pairing.reshaped.items()), confidence, forwards, (),
        tuple(notes), inputs,
    )  # fmt: skip


def _notes(pairing: Pairing) -> list[str]:
    """Tell what is not compared."""
    notes = []
    for names, what in (
        (pairing.missing, "only the first network has"),
        (pairing.extra, "only the second network has"),
    ):
        if names:
            notes.append(f"{what} {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1))
    if pairing.reshaped:
        name, (one, two) = next(iter(pairing.reshaped.items()))
        notes.append(f"{name} has the shape {one} against {two}" + _more(len(pairing.reshaped)))
    if partial := [part.name for part in pairing.parts if not part.whole]:
        notes.append(f"{partial[0]}{_more(len(partial))} cannot be exchanged, because weights of it have no partner")
    return notes


def _more(count: int) -> str:
    return f" and {count - 1} more" * (count > 1)


def _of(weights: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the weights of a part, as far as a network has them."""
    return {name: weights[name] for name in part.members if name in weights}


def _second_name(pairing: Pairing, part: Part) -> str:
    """Return the name of a part in the second network: of its first module, or of its first weight."""
    names = (pairing.names[name] for name in part.members if name in pairing.names)
    return next(filter(None, part.modules.values()), None) or next(names)


def _other_code(a: Adapter, b: Adapter, part: Part) -> bool:
    """Return whether a part whose weights are equal is of other classes or has other settings."""
    return any(
        repr(a.model.get_submodule(mine)) != repr(b.model.get_submodule(theirs))
        for mine, theirs in part.modules.items()
    )


# -- estimates --------------------------------------------------------------------------------------------------------
class Resampling:
    """Bootstrap resamples of the samples, the same for everything that is estimated."""

    def __init__(self, n: int, confidence: float, seed: int) -> None:
        self.confidence = confidence
        self.weights = np.concatenate(list(resampled(n, RESAMPLES, seed))) / n if n >= FEWEST else np.ones((1, n)) / n

    def mean(self, values: Array, many: int = 1) -> Estimate:
        """Return a mean; its interval holds for ``many`` values at once (Bonferroni)."""
        return self.ratio(values, np.ones_like(values), many)

    def over(self, values: Array, known: NDArray[np.bool_]) -> Estimate:
        """Return the mean over samples of which something is known."""
        return self.ratio(np.where(known, values, 0), known.astype(np.float64))

    def ratio(self, upper: Array, lower: Array, many: int = 1) -> Estimate:
        """Return a ratio of means."""
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = (self.weights @ upper) / (self.weights @ lower)
        if len(drawn) == 1 or not np.isfinite(drawn).all():
            return Estimate(float(drawn[0]), np.nan, np.nan)
        tail = (1 - self.confidence) / 2 / many
        low, high = np.quantile(drawn[1:], [tail, 1 - tail])
        return Estimate(float(drawn[0]), float(low), float(high))


def _relative(measured: dict[str, Array]) -> dict[str, Array]:
    """Divide squared differences by the variance of the outputs of the first network."""
    if "squares" not in measured:
        return measured
    squares, means = measured.pop("squares"), measured.pop("means")
    spread = float(squares.mean() - np.square(means.mean(0)).sum())
    if not spread > 0:
        raise ValueError("the outputs of the first network are equal for all samples: a difference has no scale")
    return {name: values / spread for name, values in measured.items()}


@dataclass(frozen=True)
class Tests:
    """What decides whether a part is a finding."""

    resampling: Resampling
    count: int  # number of parts, for all of which intervals of ratios hold at once
    local: Mapping[str, list[float]]  # name of a part -> sums of squares of the difference of its outputs, and of them

    def effect(self, name: str, measured: Mapping[str, Array]) -> Effect:
        """Return what a part does to the outputs."""
        patch, weights = measured[f"patch {name}"], measured[f"weights {name}"]
        noise = np.mean([measured[f"noise {seed} {name}"] for seed in range(SEEDS)], axis=0)
        ratio = self.resampling.ratio(weights, noise, self.count)
        gap, size = self.local.get(name, [0.0, 0.0])
        mean = self.resampling.mean
        return Effect(
            mean(patch), mean(weights), mean(measured[f"revert {name}"]), float(noise.mean()),
            self.resampling.ratio(patch, measured["total"]), ratio, gap / size if size else np.nan,
            ratio.low > LEAST_RATIO,
        )  # fmt: skip


def _curves(
    order: tuple[str, ...], measured: Mapping[str, Array], resampling: Resampling
) -> dict[str, tuple[Estimate, Estimate]]:  # fmt: skip
    """Return the two curves of hybrids, with the networks themselves at their ends."""
    whole, none = resampling.mean(measured["total"]), Estimate(0.0, 0.0, 0.0)
    found = {"(none)": (whole, none)}
    for name in order:
        found[name] = resampling.mean(measured[f"{FIRST} {name}"]), resampling.mean(measured[f"{OTHER} {name}"])
    return found if order else {}


def _outputs(measure: Measure, measured: Mapping[str, Array], ids: list[Any], resampling: Resampling) -> Outputs:
    """Describe how outputs differ."""
    total = measured["total"]
    worst = [(str(ids[place]), float(total[place])) for place in np.argsort(-total, kind="stable")[:WORST]]
    scores = {}
    for name, label in (("right", "accuracy"), ("cross_entropy", "cross-entropy"), ("confidence", "confidence")):
        if f"a {name}" in measured:
            one, two = measured[f"a {name}"], measured[f"b {name}"]
            known = ~np.isnan(one)  # a text of one token has no next one
            if not known.all():
                scores[label] = float(one[known].mean()), float(two[known].mean()), resampling.over(two - one, known)
                continue
            scores[label] = float(one.mean()), float(two.mean()), resampling.mean(two - one)
    if "a right" in measured and not measure.causal:
        errors = [calibration_error({key: measured[f"{who} {key}"] for key in ("confidence", "right")}) for who in "ab"]
        scores["calibration error"] = errors[0], errors[1], Estimate(errors[1] - errors[0], np.nan, np.nan)
    return Outputs(
        measure.name, measure.what, resampling.mean(total), resampling.mean(measured["back"]),
        {f"{share:g}": float(np.quantile(total, share)) for share in QUANTILES}, tuple(worst),
        resampling.mean(measured["agreement"]) if "agreement" in measured else None, scores,
    )  # fmt: skip


def _distance(found: Difference, measure: str) -> float:
    """Return the distance of the outputs, if it is of this kind."""
    assert found.outputs is not None
    if found.outputs.measure != measure:
        raise ValueError(f"fail_above bounds {measure}, and the outputs are compared by {found.outputs.measure}")
    return found.outputs.forth.value


def _agreement(found: Difference) -> float:
    """Return the share of equal predictions."""
    if found.outputs is None or found.outputs.agreement is None:
        raise ValueError("fail_above bounds disagreement, and the networks predict no classes")
    return found.outputs.agreement.value
