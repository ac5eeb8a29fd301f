"""Find the changes between two versions of a network: :func:`diff`."""

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
"""Minimum number of samples for intervals."""

WORST = 5
"""Number of reported samples with the largest differences of the outputs."""

QUANTILES = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the distances of single samples."""

BOUNDS: Mapping[str, Callable[[Difference], float]] = {
    "KL": lambda found: _distance(found, "KL"),
    "squared_difference": lambda found: _distance(found, "squared difference"),
    "disagreement": lambda found: 1 - _agreement(found),
    "weight_change": lambda found: found.weights.change,
}
"""Quantity that can be bounded -> function that computes it."""


@checked
def diff(
    a: str | nn.Module | Adapter, b: str | nn.Module | Adapter, data: Data | None = None, *,
    within: Iterable[str] = (), fail_above: Mapping[str, float] | None = None,
    confidence: Annotated[float, Within(0, 1, above=True, below=True)] = 0.95, **options: Unpack[RunOptions],
) -> Difference:  # fmt: skip
    """Find the changes of weights, outputs and activations between two versions of a network, and their causes.

    Each part of the second network (a block, the embeddings, the head) is exchanged with the same part of the first.
    The effect on the outputs is compared with noise on the weights of the part that has the norm of their change,
    weight by weight: quantization acts as such noise, fine-tuning does more. A part is a finding if the lower end of
    the interval of this ratio, over samples and for all parts at once, is above 3.

    Hybrids continue from recorded outputs of earlier parts, so a network of n parts needs about 3 n + 2 forward passes
    per batch. Both networks compute in float32, or in float64 if one has float64 weights.

    Args:
        a: The first network, the base: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The second network. Its weights are paired by names and shapes, also under another prefix; PEFT adapters are
            merged, and quantized weights dequantized.
        data: Raw samples, labelled or not; a few hundred. Without data, only weights are compared.
        within: Parts to divide into their modules, such as a block into attention, MLP and norms.
        fail_above: Upper bounds on ``KL``, ``squared_difference`` (networks without classes), ``disagreement`` and
            ``weight_change``. ``failed`` lists exceeded bounds, and the command exits with 1.
        confidence: Level of confidence intervals, between 0 and 1.
        **options: Options of the run: ``batch_size``, ``seed`` (of noise and resamples), ``progress`` and
            ``accelerator``, as in :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The verdict, and a table of the parts.

    Raises:
        ValueError: If the networks have few common weights (then use :func:`hf_stitch.compare`), weights or outputs are
            not finite, the networks have different classes, or the name of a bound is unknown.

    Example:
        >>> import copy, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> base = Sequential(Linear(4, 9), ReLU(), Linear(9, 9), ReLU(), Linear(9, 3))
        >>> tuned = copy.deepcopy(base)
        >>> _ = tuned[2].weight.data.add_(torch.ones(9, 9))
        >>> a, b = (hf_stitch.load(model, example_inputs=torch.randn(2, 4)) for model in (base, tuned))
        >>> difference = diff(a, b, torch.randn(50, 4), progress=False)
        >>> [part.name for part in difference.parts if part.weights.change], difference.outputs.measure
        (['2'], 'squared difference')
    """
    if unknown := [name for name in fail_above or () if name not in BOUNDS]:
        raise ValueError(f"keys of fail_above must be {', '.join(BOUNDS)}, got {unknown[0]!r}")
    with Run.of(diff, options, takes=WITHOUT_STATE) as run:
        first, second = (in_memory(load_on(network, run.processes.device)) for network in (a, b))
        measure = Measure.of(first.task or second.task)
        for name in fail_above or () if data is not None else ():
            if name != "weight_change" and (name == "squared_difference") == measure.is_divergence:
                raise ValueError(
                    f"fail_above bounds {name}, but the outputs of these networks are compared by {measure.name}"
                )
        pairing = pair(first, second, effective(first.model), effective(second.model), tuple(within))
        samples = None if data is None else Samples.of(data)
        if samples is None and (with_data := [name for name in fail_above or () if name != "weight_change"]):
            raise ValueError(
                f"fail_above bounds {with_data[0]}, which requires data: pass data, or bound weight_change"
            )
        difference = _difference(first, second, pairing, samples, measure, confidence, run)
        bounds = ((name, BOUNDS[name](difference), most) for name, most in (fail_above or {}).items())
        failed = [f"{name} is {value:.3g}, above {most:g}" for name, value, most in bounds if not value <= most]
        bounded = next((name for name in fail_above or () if name != "weight_change"), None)
        if bounded is not None:
            failed += [
                f"{bounded} holds for the inputs of the first network; the second network's own differ: {reason}"
                for reason in difference.inputs[:1] if reason != OTHER_SIDE
            ]  # fmt: skip
        return replace(difference, failed=tuple(failed))


def _difference(
    a: Adapter, b: Adapter, pairing: Pairing, samples: Samples | None, measure: Measure, confidence: float, run: Run
) -> Difference:  # fmt: skip
    """Compare weights, then outputs and hybrids."""
    changes = {part.name: weight_change(_of(pairing.a, part), _of(pairing.b, part)) for part in pairing.parts}
    blocks = [part.name for part in pairing.parts if part.block]
    notes = _notes(pairing)
    rest: Estimate | None = None
    inputs: tuple[str, ...] = ()
    effects, curves = dict[str, Effect](), dict[str, tuple[Estimate, Estimate]]()
    outputs, moves, forwards = None, {}, 0.0
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
        moves = {name: move for name in blocks if (move := engine.moved.move(name)) is not None}
        forwards = engine.cost / engine.batches
        if "elsewhere" in measured:
            notes.append(
                f"the vocabularies have {engine.widths[0]} and {engine.widths[1]} tokens: tokens of only one of them "
                f"cause {resampling.mean(measured['elsewhere'])} of the KL"
            )
        if len(ids) < FEWEST:
            notes.append(f"intervals require at least {FEWEST} samples, got {len(ids)}")
        inputs = tuple(engine.inputs)
        notes += [
            f"the second network runs on the inputs of the first; its own differ: {reason}" for reason in inputs[:1]
        ]
        notes += [f"the output {name} is not compared" for name in engine.left_out]
        if not engine.replays:
            notes.append("halves were not exchanged: the network cannot continue from recorded outputs of its parts")
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
        tuple(f"{name} {shapes[0]} against {shapes[1]}" for name, shapes in pairing.reshaped.items()), confidence,
        forwards, (), tuple(notes), inputs,
    )  # fmt: skip


def _notes(pairing: Pairing) -> list[str]:
    """Return notes on weights and parts that are not compared."""
    notes = []
    for names, sentence in (
        (pairing.missing, "only the first network has"),
        (pairing.extra, "only the second network has"),
    ):
        if names:
            notes.append(f"{sentence} {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1))
    if pairing.reshaped:
        name, (first_shape, second_shape) = next(iter(pairing.reshaped.items()))
        notes.append(f"{name} has shape {first_shape} against {second_shape}" + _more(len(pairing.reshaped)))
    if partial := [part.name for part in pairing.parts if not part.whole]:
        notes.append(f"{partial[0]}{_more(len(partial))} cannot be exchanged: weights lack a partner of the same shape")
    return notes


def _more(count: int) -> str:
    return f" and {count - 1} more" * (count > 1)


def _of(weights: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return the weights of a part that a network has."""
    return {name: weights[name] for name in part.members if name in weights}


def _second_name(pairing: Pairing, part: Part) -> str:
    """Return the name of a part in the second network: of its first module, or of its first weight."""
    names = (pairing.names[name] for name in part.members if name in pairing.names)
    return next(filter(None, part.modules.values()), None) or next(names)


def _other_code(a: Adapter, b: Adapter, part: Part) -> bool:
    """Return whether the modules of a part have different classes or settings."""
    return any(
        repr(a.model.get_submodule(mine)) != repr(b.model.get_submodule(theirs))
        for mine, theirs in part.modules.items()
    )


# -- estimates --------------------------------------------------------------------------------------------------------
class Resampling:
    """Bootstrap resamples of the samples, shared by all estimates."""

    def __init__(self, n: int, confidence: float, seed: int) -> None:
        self.confidence = confidence
        self.weights = np.concatenate(list(resampled(n, RESAMPLES, seed))) / n if n >= FEWEST else np.ones((1, n)) / n

    def mean(self, values: Array, many: int = 1) -> Estimate:
        """Return a mean; its interval holds for ``many`` values at once (Bonferroni)."""
        return self.ratio(values, np.ones_like(values), many)

    def over(self, values: Array, defined: NDArray[np.bool_]) -> Estimate:
        """Return the mean over the samples with a known value."""
        return self.ratio(np.where(defined, values, 0), defined.astype(np.float64))

    def ratio(self, upper: Array, lower: Array, many: int = 1) -> Estimate:
        """Return a ratio of means."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = (self.weights @ upper) / (self.weights @ lower)
        if len(ratios) == 1 or not np.isfinite(ratios).all():
            return Estimate(float(ratios[0]), np.nan, np.nan)
        tail = (1 - self.confidence) / 2 / many
        low, high = np.quantile(ratios[1:], [tail, 1 - tail])
        return Estimate(float(ratios[0]), float(low), float(high))


def _relative(measured: dict[str, Array]) -> dict[str, Array]:
    """Divide squared differences by the variance of the outputs of the first network."""
    if "squares" not in measured:
        return measured
    squares, means = measured.pop("squares"), measured.pop("means")
    spread = float(squares.mean() - np.square(means.mean(0)).sum())
    if not spread > 0:
        raise ValueError(
            "the outputs of the first network are equal for all samples, so the scale of differences is not defined"
        )
    return {name: values / spread for name, values in measured.items()}


@dataclass(frozen=True)
class Tests:
    """Tests of whether a part is a finding."""

    resampling: Resampling
    count: int  # number of parts: intervals of ratios hold for all at once
    local: Mapping[str, list[float]]  # part -> sums of squares of the difference of its outputs, and of the outputs

    def effect(self, name: str, measured: Mapping[str, Array]) -> Effect:
        """Return the effect of a part on the outputs."""
        patch, weights = measured[f"patch {name}"], measured[f"weights {name}"]
        noise = np.mean([measured[f"noise {seed} {name}"] for seed in range(SEEDS)], axis=0)
        ratio = self.resampling.ratio(weights, noise, self.count)
        gap, norm = self.local.get(name, [0.0, 0.0])
        mean = self.resampling.mean
        return Effect(
            mean(patch), mean(weights), mean(measured[f"revert {name}"]), float(noise.mean()),
            self.resampling.ratio(patch, measured["total"]), ratio, gap / norm if norm else np.nan,
            ratio.low > LEAST_RATIO,
        )  # fmt: skip


def _curves(
    order: tuple[str, ...], measured: Mapping[str, Array], resampling: Resampling
) -> dict[str, tuple[Estimate, Estimate]]:  # fmt: skip
    """Return the two curves of hybrids, with the two networks at their ends."""
    whole, none = resampling.mean(measured["total"]), Estimate(0.0, 0.0, 0.0)
    curves = {"(none)": (whole, none)}
    for name in order:
        curves[name] = resampling.mean(measured[f"{FIRST} {name}"]), resampling.mean(measured[f"{OTHER} {name}"])
    return curves if order else {}


def _outputs(measure: Measure, measured: Mapping[str, Array], ids: list[Any], resampling: Resampling) -> Outputs:
    """Summarize the differences of the outputs."""
    total = measured["total"]
    worst_samples = [(str(ids[place]), float(total[place])) for place in np.argsort(-total, kind="stable")[:WORST]]
    scores = {}
    for name, label in (("right", "accuracy"), ("cross_entropy", "cross-entropy"), ("confidence", "confidence")):
        if f"a {name}" in measured:
            first, second = measured[f"a {name}"], measured[f"b {name}"]
            defined = ~np.isnan(first)  # a text of one token lacks a next token
            if not defined.all():
                means = float(first[defined].mean()), float(second[defined].mean())
                scores[label] = *means, resampling.over(second - first, defined)
                continue
            scores[label] = float(first.mean()), float(second.mean()), resampling.mean(second - first)
    if "a right" in measured and not measure.causal:
        errors = [
            calibration_error({key: measured[f"{side} {key}"] for key in ("confidence", "right")}) for side in "ab"
        ]
        scores["calibration error"] = errors[0], errors[1], Estimate(errors[1] - errors[0], np.nan, np.nan)
    return Outputs(
        measure.name, measure.what, resampling.mean(total), resampling.mean(measured["back"]),
        {f"{share:g}": float(np.quantile(total, share)) for share in QUANTILES}, tuple(worst_samples),
        resampling.mean(measured["agreement"]) if "agreement" in measured else None, scores,
    )  # fmt: skip


def _distance(difference: Difference, measure: str) -> float:
    """Return the distance of the outputs; raise an error if it is not this measure."""
    assert difference.outputs is not None
    if difference.outputs.measure != measure:
        raise ValueError(f"fail_above bounds {measure}, but the outputs are compared by {difference.outputs.measure}")
    return difference.outputs.forth.value


def _agreement(difference: Difference) -> float:
    """Return the share of equal predictions."""
    if difference.outputs is None or difference.outputs.agreement is None:
        raise ValueError("fail_above bounds disagreement, which requires networks that predict classes")
    return difference.outputs.agreement.value
