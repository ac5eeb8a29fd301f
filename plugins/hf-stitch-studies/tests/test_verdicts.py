"""Verdicts follow the rules that the pages state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import study
from study_scripts import RESULTS, of

TASKS, CUTS = ("cifar10", "cifar100", "fashion_mnist"), ("bn5", "bn6", "final")


def score(value: float, half: float = 0.01) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


@pytest.mark.parametrize(("parts", "verdict"), [
    ([True, True], "confirmed"), ([False], "refuted"), ([True, False, None], "in part"), ([True, None], "undecided"),
    ([False, None], "undecided"), ([None], "undecided"), ([], "undecided"),
])  # fmt: skip
def test_what_is_not_known_does_not_decide(parts: list[bool | None], verdict: str) -> None:
    assert study.decided(parts) == verdict


def test_a_claim_is_decided_by_its_parts() -> None:
    claim = study.Claim("4", "table 1", "it works", "100%", "at least .9")
    row = claim.row("0.95", "3 pairs", [True], 3)
    assert (row["verdict"], row["rule"], row["published"]) == ("stand-in confirmed", "at least .9", "100%")
    assert claim.row("0.95", "3 pairs", [None], 3)["verdict"] == "undecided"
    alone = claim.row("0.95", "1 pair", [True], 1)
    assert (alone["verdict"], alone["n"]) == ("undecided", "1 pair: too few to decide")
    untested = claim.untested("ten networks")
    assert (untested["verdict"], untested["ours"]) == ("not tested", "takes ten networks")


def test_a_claim_needs_a_rule_and_a_known_verdict() -> None:
    with pytest.raises(ValueError, match="a claim requires a rule"):
        study.Claim("4", "table 1", "it works", "100%", "")
    with pytest.raises(ValueError, match=r"verdict must be one of .* got 'not yet'"):
        study.claim("4", "table 1", "it works", "100%", "0.95", "3 pairs", "not yet")


def test_a_table_has_a_row_for_each_item() -> None:
    columns = {"layer": "{name}", "score": "{value:.1f}", "high": lambda item: item["value"] > 1}
    assert study.table([{"name": "a|b", "value": 2.0}], columns).splitlines()[2] == "| a\\|b | 2.0 | True |"
    pairs = study.table([("a", [1.0, 0.5, 1.5])], {"": "{0}", "score": lambda _, values: study.ranged(values)})
    assert pairs == "|  | score |\n| --- | --- |\n| a | 1.00 [0.50, 1.50] |"
    assert study.table(["a", "b"], {"name": str, "twice": "{0}{0}"}).endswith("| a | aa |\n| b | bb |")


def test_one_pair_of_networks_decides_nothing() -> None:
    counted = of("dr_frankenstein.experiment").counted
    assert counted(["0 → 1", "1 → 0"]) == ("1 pair, both directions", 1)
    assert counted(["0 → 1", "1 → 2", "2 → 0"]) == ("3 pairs", 3)
    rows = [*study.claim("1", "", "", "", "", "2 pairs", "confirmed", units=1).values()]
    assert rows[-2:] == ["2 pairs: too few to decide", "undecided"]


@pytest.mark.parametrize(("beyond", "verdict"), [
    ([(-0.2, 0.1), (-0.1, 0.05)], "refuted"), ([(0.02, 0.05), (-0.1, 0.05)], "undecided"),
    ([(0.2, 0.1), (-0.1, 0.05)], "confirmed"), ([(0.02, 0.05), (0.1, 0.05)], "confirmed"),
])  # fmt: skip
def test_a_measure_that_may_beat_the_baselines_is_not_refuted(beyond: list[tuple[float, float]], verdict: str) -> None:
    bench = of("how_not_to_stitch.bench")
    tau = score(0.5)
    scores = {
        name: {"tau": tau, "beyond": {"rank only": score(*each), "depth only": score(float("nan"))}}
        for name, each in zip("ab", beyond, strict=True)
    } | {name: {"tau": tau, "beyond": {}} for name in ("rank only", "depth only", bench.RELIABILITY)}
    row = bench._baselines("sensitivity", bench.BASELINES["sensitivity"], scores, "10 networks", 10)
    assert row["verdict"].removeprefix("stand-in ") == verdict


def strange(passes: bool) -> dict[str, Any]:
    """A run with eight layers, at which the energy calls everything strange, and passes its tests or does not."""
    controls = {"far": [[float(passes)] * 3] * 8, "train": [[0.5] * 3] * 8}
    of = {"relative_accuracy": [[1.0] * 8] * 8, "energy": {"auroc": [[1.0] * 8] * 8}}
    return {
        "matchers": {"task loss, 2 steps": of}, "controls": {"energy": controls},
        "doses": {"energy": {"coloured": [[0.9] * 5] * 8}},
    }  # fmt: skip


@pytest.mark.parametrize(("itself", "pairs", "verdict"), [
    (False, [True, True], "stand-in confirmed"), (True, [True, True], "stand-in confirmed"),
    (True, [True], "undecided"), (True, [True, False], "undecided"), (False, [False, False], "undecided"),
])  # fmt: skip
def test_one_pair_in_which_the_energy_passes_decides_nothing(itself: bool, pairs: list[bool], verdict: str) -> None:
    module = of("how_not_to_stitch.strange_activations")
    between = {f"{i}a -> {i}b": strange(each) for i, each in enumerate(pairs)}
    runs = module._Runs({"0a -> 0a": strange(itself)}, between, "task loss, 2 steps", 8)
    assert module._strangeness(*module.STRANGENESS[0], runs)["verdict"] == verdict


def test_cells_without_a_detector_are_no_evidence() -> None:
    cause = of("how_not_to_stitch.cause")
    detectors = {name: [["nan", 0.5]] for name in cause.DETECTORS}
    one = {
        "matchers": {name: {"relative_accuracy": [[1.0, 1.0]], **detectors} for name in (cause.DIRECT, "residual 1")},
        "far": {name: [0.0, 1.0] for name in cause.DETECTORS},
    }
    cells = cause._Cells(one)
    assert cells.judged.tolist() == [False, True]
    assert cells.kept().tolist() == [[False, True]]


def test_intervals_allow_for_choices() -> None:
    assert study.adjusted(score(0.9), 1) == pytest.approx(score(0.9))
    wide = study.adjusted({"value": 0.9, "low": 0.8, "high": 0.95}, 5)
    assert wide["low"] == pytest.approx(0.9 - 0.1 * 2.5758 / 1.96, abs=1e-4)
    assert wide["high"] == pytest.approx(0.9 + 0.05 * 2.5758 / 1.96, abs=1e-4)
    assert study.adjusted(score(0.9), 5, 2)["high"] > study.adjusted(score(0.9), 5)["high"]


def test_figures_of_one_unit_have_no_interval() -> None:
    assert study.shown(study.over([0.5])) == "0.500"
    assert study.shown(study.over([0.4, 0.6]), 1) == "0.5 [-0.8, 1.8]"
    assert study.above(study.over([]), 0) is None


def test_weights_of_pairs_are_those_of_their_networks() -> None:
    weights = study.network_weights([("a", "b"), ("b", "c"), ("a", "c")], 100)
    assert weights.shape == (100, 3) and np.allclose(weights.sum(1), 1) and (weights.std(0) > 0).all()
    assert np.allclose(study.network_weights([("a", "b")], 5), 1)  # one pair has no spread


def test_intervals_decide_only_where_they_exclude_the_bound() -> None:
    assert [study.above(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [True, None, False]
    assert [study.below(score(0.9), bound) for bound in (0.88, 0.9, 0.92)] == [False, None, True]
    assert study.above(dict.fromkeys(("value", "low", "high"), float("nan")), 0.5) is None
    apart = study.difference(score(0.9, 0.03), score(0.8, 0.04))
    assert [round(apart[name], 6) for name in ("value", "low", "high")] == [0.1, 0.05, 0.15]


@pytest.mark.parametrize(("direct", "task", "found"), [
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (1.0, 0.5)], (0.4, 0.6)),
    ([(0.7, 0.6), (0.9, 0.2)], [(0.0, 1.0), (0.6, 0.9)], (0.4, float("nan"))),  # the sparsity is not reached
])  # fmt: skip
def test_methods_are_compared_at_the_same_sparsity(direct: Any, task: Any, found: tuple[float, float]) -> None:
    sparsity = of("dr_frankenstein.sparsity")
    curves = {sparsity.DIRECT: direct, sparsity.PROXIMAL: task}
    run = {
        method: [{"sparsity": share, "penalty": 0.0, "score": score(value)} for share, value in points]
        for method, points in curves.items()
    }
    assert sparsity.compared({"0 → 1": run}, sparsity.PROXIMAL)["0 → 1"] == pytest.approx(found, nan_ok=True)


@pytest.mark.parametrize(("accuracies", "wide", "verdict"), [
    ((0.7, 0.72), 0.9, "confirmed"), ((0.7, 0.6), 0.9, "confirmed"), ((0.7, 0.8), 0.9, "undecided"),
    ((0.7, 0.7), 0.81, "undecided"), ((0.7, 0.7), 0.7, "refuted"),
])  # fmt: skip
def test_wider_networks_that_are_more_accurate_do_not_decide(accuracies: Any, wide: float, verdict: str) -> None:
    widths = of("dr_frankenstein.widths")
    kinds = {
        name: {"accuracies": [own, own], "layers": ["conv1"], "relative_accuracy": {widths.TASK: [score(value)]}}
        for name, own, value in zip(("½", "1"), accuracies, (0.8, wide), strict=True)
    }
    record = {"kinds": kinds, "pairs": [("½", "1")]}
    assert study.decided(widths.parts(record, "½", "1")) == verdict
    assert widths.claims(record)[0]["verdict"] == "undecided"  # one pair of each width


@pytest.mark.parametrize(("half", "random", "direct", "verdict"), [
    ([0.5], [0.5], 0.95, "confirmed"), ([0.9], [0.9], 0.95, "in part"),  # none is stuck
    ([0.85], [0.5], 0.95, "in part"),  # not half way
    ([0.5], [0.5, 0.9, 0.9], 0.95, "undecided"),  # in one pair only
    ([0.5], [0.5], 0.5, "in part"),
])  # fmt: skip
def test_starts_are_stuck_by_pairs(half: list[float], random: list[float], direct: float, verdict: str) -> None:
    starts = of("dr_frankenstein.initialisations")
    found = {
        "pairs": ["0 → 1", "2 → 3", "4 → 5"], "relative_accuracy": {
            kind: [value for i in range(3) for value in [*[rest] * 9, worst[i % len(worst)]]]
            for kind, rest, worst in (
                (starts.HALF, 0.88, half), (starts.RANDOM, 0.9, random), (starts.DIRECT, 0.95, [direct])
            )
        },
    }  # fmt: skip
    assert study.decided(starts.parts(found)) == verdict
    short = {kind: [value / 2 for value in values] for kind, values in found["relative_accuracy"].items()}
    assert study.decided(starts.parts({**found, "relative_accuracy": short})) in ("undecided", "in part")


@pytest.mark.parametrize(("value", "half", "held"), [
    (0.992, 0.001, True), (0.989, 0.01, None), (0.97, 0.01, False), (0.992, 0.012, None)
])  # fmt: skip
def test_accuracy_is_unchanged_where_the_whole_interval_is(value: float, half: float, held: bool | None) -> None:
    points = [{"cka": 1.0, "score": score(1.0, 0.0)}, {"cka": 0.65, "score": score(value, half)}]
    assert of("dr_frankenstein.low_cka").unchanged(points) is held


def test_layers_without_room_do_not_count_against_least_squares() -> None:
    matching = of("dr_frankenstein.matching")
    full, room = score(1.0, 0.002), score(0.9)
    found = {
        "pairs": ["0 → 1", "1 → 2"], "layers": ["bn1", "bn2"], "gain": [score(0.0, 0.002), score(0.05)],
        "relative_accuracy": {matching.DIRECT: [full, room], matching.TASK: [full, score(0.95)]},
        "by_pair": {matching.TASK: [[1.0, 0.9], [0.8, 0.7]], matching.HARD: [[1.0, 0.9], [0.8, 0.7]]},
    }  # fmt: skip
    rows = {row["claim"]: row for row in matching.claims({"architectures": {"tiny10": found}})}
    row = rows["Tiny-10: least squares significantly underperforms task loss"]
    assert row["verdict"] == "confirmed" and "1 of 1 layers" in row["ours"]


@pytest.mark.parametrize(("count", "parts", "held"), [
    (2, (True, True, False), True), (2, (True, None, False), None), (2, (True, False, False), False),
    (1, (None,), None),
])  # fmt: skip
def test_conditions_that_are_not_known_decide_nothing(count: int, parts: Any, held: bool | None) -> None:
    assert study.at_least(count, parts) is held


@pytest.mark.parametrize(
    ("relative", "absolute", "untrained", "verdict"),
    [
        (85.0, 10.0, 12.0, "confirmed"),
        (60.0, 10.0, 12.0, "in part"),
        (85.0, 40.0, 12.0, "in part"),
        (85.0, 10.0, 88.0, "in part"),
        (10.0, 10.0, 12.0, "refuted"),
    ],
)
def test_verdict_on_other_seeds(relative: float, absolute: float, untrained: float, verdict: str) -> None:
    def scores(method: str, stitched: float, encoders: str = "trained") -> list[dict[str, Any]]:
        f1 = np.full((3, 3), stitched)
        np.fill_diagonal(f1, 90.0 if method != "chance" else stitched)
        places = [{"task": task, "cut": cut} for task in TASKS for cut in CUTS]
        return [{**place, "method": method, "encoders": encoders, "f1": f1.tolist()} for place in places]

    record = {
        "networks": ["a", "b", "c"],
        "untrained": ["d", "e", "f"],
        "cuts": list(CUTS),
        "scores": scores("relative", relative)
        + scores("absolute", absolute)
        + scores("chance", 10.0)
        + scores("relative", untrained, "untrained"),
    }
    assert study.decided(of("relative_representations.cross_seed").parts(record)) == verdict


def test_angles_are_compared_with_untrained_networks_of_their_kind() -> None:
    script = of("relative_representations.angles")

    def row(networks: str, measure: str, value: float) -> dict[str, Any]:
        place = {"modality": "text", "data": "TREC", "cut": "words", "networks": networks, "centre": "origin"}
        values = np.full((4, 4), value)
        return {**place, "measure": measure, "values": (values if networks == "trained" else values[:2, :2]).tolist()}

    record = {
        "networks": {"text": {"trained": ["bert", "bert", "electra", "electra"], "untrained": ["bert", "bert"]}},
        "scores": [
            row("trained", "correlation", 0.8), row("untrained", "correlation", 0.5), row("trained", "difference", 9.0),
            row("trained", "difference, paired at random", 12.0),
        ],
    }  # fmt: skip
    found = script.Measured(record, "text")
    assert found.cells == [("TREC", "words")]
    assert found.more("other architectures", found.cells[0]).value == pytest.approx(0.3)
    assert [found.preserved(kind, found.cells[0]) for kind in script.KINDS] == [True, True]
    record["scores"][1] = row("untrained", "correlation", 0.9)
    assert script.Measured(record, "text").preserved("other seeds", found.cells[0]) is False


@pytest.mark.parametrize(
    ("low", "atom", "verdict"),
    [(0.85, 0.9, "confirmed"), (0.3, 0.9, "in part"), (-0.1, 0.9, "refuted"), (0.85, 0.97, "undecided")],
)
def test_verdict_on_the_correlation(low: float, atom: float, verdict: str) -> None:
    correlation = of("filter_atoms.correlation")
    interval = {"value": 0.9, "low": low, "high": 1.0}
    arm = {
        "groups": [{"pairs": {correlation.ATOM: [atom, atom]}}],
        "r": {correlation.ATOM: {f"{target} pearson": interval for target in correlation.TARGETS}},
        "grassmann": interval,
    }
    found = correlation.decided({"arms": {correlation.MAIN: arm, "six": arm}})
    assert {study.decided(parts) for parts in found.values()} == {verdict}


@pytest.mark.parametrize(
    ("patches", "answer"),
    [(0.05, "Yes: patch cosine."), (-0.05, "No."), (1e-8, "No.")],
    ids=["better", "worse", "equal"],
)
def test_a_rival_is_better_if_its_interval_is_above_rounding(patches: float, answer: str) -> None:
    correlation = of("filter_atoms.correlation")
    better = {
        rival: {"pearson": {"low": patches if rival == correlation.PATCHES else -0.1}} for rival in correlation.RIVALS
    }
    arms = {name: {"better": better} for name in (correlation.MAIN, "overlapping")}
    assert correlation.answer({"arms": arms}).startswith(answer)


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.95, 1.0, "confirmed"), (0.6, 0.8, "in part"), (0.6, 0.95, "undecided"), (0.3, 0.45, "refuted"),
    (None, None, "undecided"),
])  # fmt: skip
def test_clusters_are_distinct_or_visible(low: float | None, high: float | None, expected: str) -> None:
    found = {"low": low, "high": high, "value": low}
    assert study.decided(of("filter_atoms.experiment").above(found, bound) for bound in (0.5, 0.9)) == expected


def test_each_sentence_on_clients_has_a_row() -> None:
    script = of("filter_atoms.federated")
    record = json.loads((RESULTS / "federated.json").read_text())
    words = [row["claim"] for row in script.claims(record)]
    assert len(words) == len(set(words)) == 8
    through = record["arms"][script.MAIN]["through"]
    through["1"]["digits"] = through["1"]["subtask"] = 0.5  # as permuted groups
    assert {row["claim"]: row["verdict"] for row in script.claims(record)}[script.THROUGH.text] == "stand-in refuted"


def test_go_is_predicted_for_each_pair_from_the_others() -> None:
    script = of("embedding_upgrade.upgrade_table")
    rows = [
        {"pair": [f"old {n}", "new"], "pairs": 1000, "predicted": value, "old": 0.1,
         "rules": {"auto": {"recall": value + 0.01}}}
        for n, value in enumerate((0.2, 0.3, 0.4, 0.8, 0.9, 0.95))
    ]  # fmt: skip
    found = script.verdicts(rows)
    assert found["auc"][0] == 1.0
    assert (found["go"], found["hits"], found["false_go"]) == (3, 3, 0)
    assert script.verdicts(rows[:3])["auc"] is None


def test_few_pairs_leave_only_safe_choices() -> None:
    script = of("embedding_upgrade.upgrade_table")
    held = {
        "old model": {"retrieval": 0.3},
        "ridge, index": {"retrieval": 0.5, "r2": 0.9, "cosine": 0.8},
        "ridge_to_identity, index": {"retrieval": 0.4, "r2": 0.1, "cosine": 0.9},
    }
    assert script.choices(held, 100)["auto"] == "ridge_to_identity, index"
    assert script.choices(held, 1000) == {
        "auto": "ridge, index", "held-out retrieval": "ridge, index", "R²": "ridge, index",
        "cosine": "ridge_to_identity, index",
    }  # fmt: skip


def _language(fraction: float = 0.7, margin: float = 30.0, **lows: float) -> dict[str, Any]:
    lows = {"shuffled anchors": 5.0, "absolute": 5.0, "random projection": 5.0} | lows
    return {
        "fraction": fraction,
        "margin": margin,
        "over": {name: [low + 3, low, low + 6] for name, low in lows.items()},
    }


@pytest.mark.parametrize(
    ("languages", "verdict"),
    [
        ([_language()] * 3, "confirmed"),
        ([_language(), _language(), _language(fraction=0.59)], "in part"),
        ([_language(), _language(), _language(absolute=-1.0)], "in part"),
        ([_language(), _language(), _language(**{"shuffled anchors": -1.0})], "in part"),
        ([_language(**{"shuffled anchors": -1.0})] * 3, "refuted"),
        ([_language(), _language(), _language(margin=9.0)], "undecided"),
    ],
)
def test_verdict_on_other_languages(languages: list[dict[str, Any]], verdict: str) -> None:
    labels = of("relative_representations.translated_labels")
    assert study.decided(map(labels.accepted, languages)) == verdict


def _scores(script: Any, **figures: tuple[list[float], list[float]]) -> Any:
    """Scores with reciprocal ranks and Jaccard indices of methods, alike in all pairs and directions."""
    rows = [
        {
            "pair": pair, "source": source, "target": target, "method": method,
            "scores": {"mrr 10": mrr, "jaccard 10": jaccard},
        }
        for pair in script.TWO
        for source, target in script.DIRECTIONS
        for method, (mrr, jaccard) in figures.items()
    ]  # fmt: skip
    return script.Scores({"rows": rows})


@pytest.mark.parametrize(
    ("relative", "shuffled", "verdict"),
    [
        (([0.93, 0.95], [0.33, 0.35]), ([0.002, 0.001], [0.0, 0.0]), "undecided"),  # two draws: wide intervals
        (([0.93, 0.931], [0.33, 0.331]), ([0.002, 0.001], [0.0, 0.0]), "confirmed"),
        (([0.93, 0.931], [0.28, 0.281]), ([0.002, 0.001], [0.0, 0.0]), "in part"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.002, 0.001], [0.0, 0.0]), "in part"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.40, 0.401], [0.0, 0.0]), "refuted"),
        (([0.30, 0.301], [0.10, 0.101]), ([0.30, 0.302], [0.0, 0.0]), "undecided"),
    ],
)
def test_verdict_on_word_vectors(relative: Any, shuffled: Any, verdict: str) -> None:
    pytest.importorskip("hf_stitch_word_vectors")
    script = of("relative_representations.word_vectors")
    absolute = ([0.001, 0.0012], [0.0, 0.0])
    methods = {script.RELATIVE: relative, script.ABSOLUTE: absolute, script.SHUFFLED: shuffled}
    assert study.decided(script.agree(_scores(script, **methods))) == verdict
    assert study.decided(script.disagree(_scores(script, **methods))) == "confirmed"


def test_a_map_is_better_if_it_is_in_every_draw() -> None:
    pytest.importorskip("hf_stitch_word_vectors")
    script = of("relative_representations.word_vectors")
    zeros = [0.0, 0.0, 0.0]
    relative, better, unsure = [0.30, 0.40, 0.50], [0.35, 0.46, 0.55], [0.25, 0.60, 0.55]
    found = _scores(
        script, **{script.RELATIVE: (relative, zeros)}, lstsq=(better, zeros), ridge=(unsure, zeros),
        random=(zeros, zeros),
    )  # fmt: skip
    assert found.better(script.TWO) == ["lstsq"]
