"""One pass that scores predictors between halves of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hf_stitch.adapters import Adapter
from hf_stitch.data import PairedSamples
from hf_stitch.pairs import Pair
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.scoring.halves import HalvesOfModel, HalvesOfPair, Predictor, models_of
from hf_stitch.scoring.measured import Record
from hf_stitch.scoring.passing import Scoring, State
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.heads import task_named

RUN = Run(batch_size=64, progress=False)
MEAN = ("mean_only",)
TASK = task_named("image-classification")


def stitches_of(place: Any) -> dict[str, StitchingLayer]:
    own = place.stitched.stitch
    return {"stitched": own, "identity": own.identity(), "mean_only": own.mean_only()}


def of_model(place: Any, **options: Any) -> Scoring:
    halves = HalvesOfModel(place.stitched, place.source)
    predictors = list(halves.predictors(stitches_of(place), constant=MEAN))
    return Scoring(place.target, {"": halves}, predictors, TASK, **options)


@dataclass
class Watching:
    """Keeps the ids of samples and sums of activations."""

    fingerprint: bytes = b""

    def record_own(self, y: Mapping[str, Representation], ids: Sequence[Any]) -> dict[Record, Any]:
        found: dict[Record, Any] = {Record("ids", "none", ""): np.array(ids)}
        return found | {Record("own", "none", key): own.values.flatten(1).sum(1).numpy() for key, own in y.items()}

    def record_stitched(self, predictor: Predictor, mapped: Any, y: Any, ids: Sequence[Any]) -> dict[Record, Any]:
        return {stitched(predictor.name): (mapped.values - y.values).flatten(1).norm(dim=1).numpy()}


def stitched(name: str) -> Record:
    return Record("stitched", "none", name)


def test_halves_of_a_model_and_of_its_parents_measure_the_same(place: Any) -> None:
    samples = PairedSamples.of(place.test)
    own = of_model(place).run(samples, RUN).answers[""]
    pair = Pair(place.source, place.target, task="image-classification").at([("0", "0")])
    predictors = [Predictor(name, "0", "0", layer) for name, layer in stitches_of(place).items()]
    found = Scoring(place.target, {"": HalvesOfPair(pair, with_source=True)}, predictors, TASK).run(samples, RUN)
    assert list(own) == list(found.answers[""]) == ["stitched", "identity", "mean_only", "source", "target"]
    for who, row in own.items():
        assert set(row) == {"class", "label", "agreement", "right", "cross_entropy", "distance", "kl_divergence"}
        for measure, values in row.items():
            np.testing.assert_allclose(found.answers[""][who][measure], values, rtol=1e-5, atol=1e-6)
    assert own["stitched"]["right"].mean() > 0.8 > own["mean_only"]["right"].mean()


def test_a_predictor_that_ignores_the_source_runs_once_for_all_samples(place: Any) -> None:
    entered: list[int] = []
    scoring = of_model(place)
    (halves,) = scoring.halves.values()
    finish, constant = halves.finish, scoring.predictors[-1]
    mapped = constant.stitch(halves.encode(next(place.test.batches(2))).activations["source"]).values[:1]

    def counted(handed: Representation, *given: Any) -> Any:
        entered.append(int(torch.equal(handed.values[:1], mapped)))
        return finish(handed, *given)

    halves.finish = counted  # type: ignore[method-assign]
    found = scoring.run(PairedSamples.of(place.test), RUN).answers[""]["mean_only"]
    assert constant.constant and len(entered) == 2 * 7 + 1 and sum(entered) == 1
    halves.finish = finish  # type: ignore[method-assign]
    each = Scoring(place.target, scoring.halves, [constant._replace(constant=False)], TASK)
    for measure, values in each.run(PairedSamples.of(place.test), RUN).answers[""]["mean_only"].items():
        np.testing.assert_allclose(found[measure], values, rtol=1e-6)


def test_models_with_one_front_and_one_source_run_both_once(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = {str(number): HalvesOfModel(place.stitched, place.source) for number in range(3)}
    predictors = [each for name, own in halves.items() for each in own.predictors(stitches_of(place), name)]
    encoded, forwards, encode, forward = [0], [0], HalvesOfModel.encode, Adapter.forward

    def encodes(self: Any, batch: Any) -> Any:
        encoded[0] += 1
        return encode(self, batch)

    def runs(self: Any, inputs: Any) -> Any:
        forwards[0] += self is place.source
        return forward(self, inputs)

    monkeypatch.setattr(HalvesOfModel, "encode", encodes)
    monkeypatch.setattr(Adapter, "forward", runs)
    found = Scoring(place.target, halves, predictors, TASK).run(PairedSamples.of(place.test), RUN)
    assert encoded == forwards == [7]  # 400 samples in batches of 64
    for name in ("1", "2"):
        for who, row in found.answers["0"].items():
            assert all(np.array_equal(found.answers[name][who][measure], values) for measure, values in row.items())


def test_a_watch_is_shown_the_activations_of_target_and_stitches(place: Any) -> None:
    seen = of_model(place, watch=Watching()).run(PairedSamples.of(place.test), RUN).seen
    ids, own = Record("ids", "none", ""), Record("own", "none", "0")
    assert seen[ids].tolist() == list(place.test.ids)
    assert set(seen) == {ids, own, stitched("stitched"), stitched("identity")}
    assert seen[stitched("stitched")].mean() < seen[stitched("identity")].mean()


def test_an_interrupted_pass_resumes_with_the_same_watch(place: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Checkpoint, "due", lambda self, done: True)
    samples, left, measure = PairedSamples.of(place.test), [3], Scoring._measure
    kept = {"earlier": torch.ones(2)}

    def stops(self: Scoring, batch: Any, twin: Any) -> Any:
        if left[0] == 0:
            raise RuntimeError("interrupted")
        left[0] -= 1
        return measure(self, batch, twin)

    def state() -> State:
        checkpoint = Checkpoint(tmp_path, 0, lasting=True)
        checkpoint.begin({}, dict)
        return State(checkpoint, 10, kept)

    monkeypatch.setattr(Scoring, "_measure", stops)
    with pytest.raises(RuntimeError, match="interrupted"):
        of_model(place, watch=Watching(b"one")).run(samples, RUN, state())
    left[0] = 4  # of the 7 batches, 3 are measured
    found = of_model(place, watch=Watching(b"one")).run(samples, RUN, state())
    assert left == [0]
    left[0] = 7
    whole = of_model(place, watch=Watching(b"one")).run(samples, RUN)
    for who, row in whole.answers[""].items():
        assert all(np.array_equal(found.answers[""][who][measure], values) for measure, values in row.items())
    assert all(np.array_equal(found.seen[key], values) for key, values in whole.seen.items())
    left[0] = 7
    with pytest.warns(UserWarning, match="the detectors differ from the interrupted job"):
        of_model(place, watch=Watching(b"other")).run(samples, RUN, state())
    assert left == [0]


def test_a_state_with_the_names_of_an_earlier_version_is_refused(place: Any, tmp_path: Any) -> None:
    checkpoint = Checkpoint(tmp_path, 0, lasting=True)
    checkpoint.begin({}, dict)
    checkpoint.save(2, {'measures.["seen", "norm", "none", "0"]': torch.ones(2)})
    with pytest.raises(ValueError, match=r"format of an earlier version.*delete the folder"):
        of_model(place).run(PairedSamples.of(place.test), RUN, State(checkpoint, 0, {}))


def test_several_models_are_told_from_one(place: Any) -> None:
    assert models_of(place.stitched) == ([place.stitched], False)
    assert models_of(each for each in [place.stitched]) == ([place.stitched], True)
