"""Federated and continual learning with filter atoms: methods, similarities, verdicts, and the scripts themselves."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import study
import torch
from study_scripts import RESULTS, run_script

pytestmark = pytest.mark.slow

NAMES = ("federated", "federated_ensembles", "federated_table", "continual")


def imported(name: str) -> Any:
    """Import a script."""
    return importlib.import_module(f"filter_atoms.{name}")


@pytest.fixture
def clients() -> list[Any]:
    """Random images of three clients, the second with twice as many."""
    random = torch.Generator().manual_seed(0)
    made = []
    for n in (4, 8, 4):
        pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=random)
        made.append(imported("networks").Images(pixels, torch.randint(0, 4, (n,), generator=random)))
    return made


@pytest.fixture
def network() -> Any:
    """A small network with atoms."""
    return imported("federated").atomic(imported("federated").initial(0.0625, 4))


def recipe(epochs: int = 1) -> Any:
    return imported("networks").Recipe(epochs, lr=0.01, batch=4, schedule="constant")


def federated(network: Any, clients: list[Any], method: str, rounds: int = 1) -> Any:
    methods = imported("federated_methods")
    plan = methods.Plan(rounds, 1.0, recipe())
    return methods.federate(network, clients, methods.METHODS[method], plan, seed=0)


def test_fedavg_shares_the_mean_weighted_by_images(network: Any, clients: list[Any]) -> None:
    methods = imported("federated_methods")
    start = methods.snapshot(network)
    shared, own = federated(network, clients, "fedavg")
    network.load_state_dict(start)
    # With nothing shared, clients end where they would before the mean is taken.
    _, alone = federated(network, clients, "local")
    assert own == [{}, {}, {}]
    for name, value in shared.items():
        expected = sum(w * state[name] for w, state in zip((0.25, 0.5, 0.25), alone, strict=True))
        assert torch.allclose(value, expected, atol=1e-6), name
        assert not torch.equal(value, start[name]), name


@pytest.mark.parametrize(("method", "kept"), [("fedper", "fc."), ("fedrep", "fc."), ("evolving", ("fc.", "atoms"))])
def test_what_clients_keep(method: str, kept: tuple[str, ...], network: Any, clients: list[Any]) -> None:
    start = imported("federated_methods").snapshot(network)
    shared, own = federated(network, clients, method)
    for state in own:
        assert state and all(name.startswith(kept) or name.endswith(kept) for name in state)
        assert all(torch.equal(shared[name], start[name]) for name in state)
        assert all(name in state or not torch.equal(shared[name], start[name]) for name in shared)
    assert not torch.equal(own[0]["fc.weight"], own[1]["fc.weight"])


def test_only_atoms_and_head_move_on_fixed_coefficients(network: Any, clients: list[Any]) -> None:
    methods = imported("federated_methods")
    start = methods.snapshot(network)
    _, own = federated(network, clients, "fixed")
    moved = {name for name, value in own[0].items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if methods.kind_of(name) in methods.PERSONAL}


def test_a_client_goes_on_from_its_own_parameters(network: Any, clients: list[Any]) -> None:
    one, _ = (federated(network, clients[:1], "local", rounds)[1][0]["fc.weight"] for rounds in (1, 2))
    methods = imported("federated_methods")
    start = imported("federated").atomic(imported("federated").initial(0.0625, 4))
    seen: list[Any] = []
    plan = methods.Plan(2, 1.0, recipe())
    methods.federate(
        start, clients[:1], methods.METHODS["local"], plan, 0,
        lambda number, shared, own: seen.append(own[0]["fc.weight"]),
    )  # fmt: skip
    assert torch.equal(seen[0], one) and not torch.equal(seen[0], seen[1])


def test_the_proximal_term_keeps_networks_close(network: Any, clients: list[Any]) -> None:
    methods = imported("federated_methods")
    start = methods.snapshot(network)

    def distance(weight: float) -> float:
        trained = methods.train_locally(
            network, start, clients[1], methods.WHOLE, recipe(5), seed=0, near=start, weight=weight
        )  # fmt: skip
        return sum(float((value - start[name]).square().sum()) for name, value in trained.items())

    assert distance(5.0) < 0.5 * distance(0.0)


def test_fedrep_trains_the_head_first(network: Any, clients: list[Any]) -> None:
    methods = imported("federated_methods")
    start = methods.snapshot(network)
    head = methods.train_locally(
        network, start, clients[0], methods.HEAD_FIRST[:1], recipe(3), seed=0, near=start, weight=0.0
    )  # fmt: skip
    both = methods.train_locally(
        network, start, clients[0], methods.HEAD_FIRST, recipe(3), seed=0, near=start, weight=0.0
    )  # fmt: skip
    assert torch.equal(head["fc.weight"], both["fc.weight"]) and not torch.equal(head["fc.weight"], start["fc.weight"])
    assert torch.equal(head["conv1.atoms"], start["conv1.atoms"])
    assert not torch.equal(both["conv1.atoms"], start["conv1.atoms"])


def test_similarities_are_those_of_the_library(network: Any, clients: list[Any]) -> None:
    from hf_stitch import registries
    from hf_stitch.metrics import linear_cka

    ensembles = imported("ensembles")
    _, states = federated(network, clients, "fixed", rounds=3)
    probes = imported("networks").noise(20).inputs()
    found, costs = ensembles.measured(network, states, probes)
    layers = ensembles.activations(network, states, probes)
    expected = np.mean([linear_cka(rows[0], rows[1]) for rows in layers.values()])
    assert float(found["cka"][0, 1]) == pytest.approx(float(expected), abs=1e-4)
    if "filter_atoms" in registries.metrics:
        metric: Any = registries.metrics.build("filter_atoms")
        reads = []
        for state in states[:2]:
            network.load_state_dict(state)
            reads.append(metric.read(network))
        values = {layer: metric.value(reads[0][layer], reads[1][layer]) for layer in reads[0]}
        assert float(found["atom"][0, 1]) == pytest.approx(metric.combine(values), abs=1e-6)
    for matrix in found.values():
        assert torch.allclose(matrix, matrix.T) and torch.allclose(matrix.diagonal(), torch.ones(3).double(), atol=1e-4)
    operations = {name: cost["operations"] for name, cost in costs.items()}
    assert operations["atom"] == 3 * 3 * 2 * 81 < operations["cka"] < operations["cca"]


def test_cca_is_invariant_to_invertible_maps_and_leaves_out_dead_channels() -> None:
    ensembles = imported("ensembles")
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 4, generator=random)
    mapped = rows @ torch.randn(4, 4, generator=random)
    dead = torch.cat([rows[:, :3], torch.zeros(50, 1)], 1)
    stacked = torch.stack([rows, mapped, dead])
    found = ensembles.cca({"relu1": stacked - stacked.mean(1, keepdim=True)})
    assert float(found[0, 1]) == pytest.approx(1, abs=1e-4) and float(found[0, 2]) == pytest.approx(1, abs=1e-4)


def test_most_and_least_similar() -> None:
    similarity = torch.tensor([[1.0, 0.2, 0.9, 0.5]])
    most_similar = imported("ensembles").most_similar
    assert most_similar(similarity, 0, 2) == [2, 3] and most_similar(similarity, 0, 2, least=True) == [1, 3]


def test_an_ensemble_averages_probabilities_of_tuned_heads(network: Any, clients: list[Any]) -> None:
    ensembles = imported("ensembles")
    _, states = federated(network, clients, "fixed")
    found = ensembles.ensemble_accuracies(
        network, states, clients[1], clients[1], {"own": [1], "all": [1, 0, 2]}, recipe(100), seed=0
    )  # fmt: skip
    assert found == {"own": 1.0, "all": 1.0}


def test_auroc_counts_pairs_of_a_cluster() -> None:
    federated = imported("federated")
    groups = np.array([0.0, 0, 1, 1, 2, 2])
    same = np.equal.outer(groups, groups).astype(float)
    for kind, masks in federated.clusters(groups, 2).items():
        assert federated.auroc(federated.pairs_of(same, masks)) == 1, kind
        assert federated.auroc(federated.pairs_of(-same, masks)) == 0, kind
        assert federated.auroc(federated.pairs_of(np.ones((6, 6)), masks)) == 0.5, kind
    counted = {kind: int(masks["counted"].sum()) for kind, masks in federated.clusters(groups, 2).items()}
    assert counted == {"subtask": 16, "digits": 20}


def test_images_are_dealt_without_overlap() -> None:
    federated, networks, table = imported("federated"), imported("networks"), imported("federated_table")
    numbers = torch.arange(200)
    images = networks.Images(numbers.to(torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32), numbers % 10)
    dealt = federated.dealt_out(images, torch.tensor([1, 2]), 3, torch.Generator().manual_seed(0))
    seen = torch.cat([part.pixels[:, 0, 0, 0] for part in dealt])
    assert len(seen) == len(seen.unique()) == 40
    assert {int(label) for part in dealt for label in part.labels} == {1, 2}
    clients = table.distributed(table.Setting("cifar10", 10, 2, ()), images, 12, 10)
    assert [len(part) for part in clients] == [12] * 10 and all(len(part.labels.unique()) == 2 for part in clients)
    seen = torch.cat([part.pixels[:, 0, 0, 0] for part in clients])
    assert len(seen) == len(seen.unique())


def ensembles_record(**accuracies: np.ndarray) -> dict[str, Any]:
    """Return a record of one base, whose ensembles have some accuracies."""
    return {"bases": {"fedavg": {"accuracies": accuracies}}, "groups": list(range(20)), "sizes": {"resamples": 200}}


@pytest.mark.parametrize(
    ("own", "random", "least", "improved", "because"),
    [
        (2.0, 1.0, 1.0, "confirmed", "confirmed"), (2.0, 1.0, 0.0, "confirmed", "undecided"),
        (2.0, -1.0, 1.0, "confirmed", "in part"), (-2.0, -1.0, -1.0, "refuted", "refuted"),
        (0.0, 1.0, 1.0, "undecided", "confirmed"),
    ],
)  # fmt: skip
def test_ensembles_must_gain_over_other_members(
    own: float, random: float, least: float, improved: str, because: str
) -> None:
    script = imported("federated_ensembles")
    base = np.linspace(0.4, 0.6, 20)
    noise = np.tile([0.005, -0.005], 10)
    atom = base + own / 100 + noise
    others = {"random": atom - random / 100 + noise, "least": atom - least / 100 + noise}
    found = script.parts(ensembles_record(own=base, atom=atom, cka=atom, cca=atom, **others))
    assert {name: study.decided(parts) for name, parts in found.items()} == {
        "improved": improved, "comparable": "confirmed", "because": because,
    }  # fmt: skip


@pytest.mark.parametrize(("own", "random", "expected"), [
    (2.0, 1.0, "confirmed"), (2.0, -1.0, "in part"), (-2.0, 1.0, "refuted"), (0.0, 1.0, "undecided"),
])  # fmt: skip
def test_members_in_a_stream_must_gain_over_random_ones(own: float, random: float, expected: str) -> None:
    base, noise = np.linspace(0.4, 0.6, 20), np.tile([0.005, -0.005], 10)
    atom = base + own / 100 + noise
    stream = {"accuracies": {"own": base, "atom": atom, "random": atom - random / 100 + noise}}
    record = {"streams": [stream], "sizes": {"resamples": 200}}
    assert study.decided(imported("continual").parts(record)) == expected


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.95, 1.0, "confirmed"), (0.6, 0.8, "in part"), (0.6, 0.95, "undecided"), (0.3, 0.45, "refuted"),
    (None, None, "undecided"),
])  # fmt: skip
def test_clusters_are_distinct_or_visible(low: float | None, high: float | None, expected: str) -> None:
    found = {"low": low, "high": high, "value": low}
    assert study.decided(imported("experiment").above(found, bound) for bound in (0.5, 0.9)) == expected


def test_each_sentence_on_clients_has_a_row() -> None:
    script = imported("federated")
    record = json.loads((RESULTS / "federated.json").read_text())
    words = [row["claim"] for row in script.claims(record)]
    assert len(words) == len(set(words)) == 8
    through = record["arms"][script.MAIN]["through"]
    through["1"]["digits"] = through["1"]["subtask"] = 0.5  # as permuted groups
    assert {row["claim"]: row["verdict"] for row in script.claims(record)}[script.THROUGH.text] == "stand-in refuted"


def test_the_paper_s_table_meets_the_rule() -> None:
    script = imported("federated_table")
    accuracies = [
        {name: {"value": value} for name, value in zip(script.ROWS, setting.published, strict=True)}
        for setting in script.SETTINGS
    ]
    apart = {"fedavg": {"low": 0.1, "high": 1.0}}
    settings = [{"accuracy": one, "ours_minus": apart} for one in accuracies]
    assert script.comparable(settings) == script.LEAST and study.decided(script.parts(settings)) == "confirmed"
    alike = [{**one, "ours_minus": {"fedavg": {"low": -0.1, "high": 1.0}}} for one in settings]
    assert study.decided(script.parts(alike)) == "undecided"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data sets of random images, with 20 or 200 of each class, and return their folder."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    sets = {
        "cifar10": ("img", (32, 32, 3), 10),
        "cifar100": ("img", (32, 32, 3), 100),
        "mnist": ("image", (28, 28), 10),
    }
    for name, (column, shape, classes) in {**sets, "mnist": ("image", (28, 28), 10)}.items():
        (folder / name).mkdir()
        n, label = 100 if name == "mnist" else 2000, "fine_label" if name == "cifar100" else "label"
        for split in ("train", "test"):
            images = list(random.integers(0, 256, (n, *shape), dtype=np.uint8))
            kinds = datasets.Features({column: datasets.Image(), label: datasets.ClassLabel(num_classes=classes)})
            columns = {column: images, label: [i % classes for i in range(n)]}
            datasets.Dataset.from_dict(columns, kinds).to_parquet(folder / name / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_experiment_writes_record_and_page(name: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("hf_stitch_filter_atoms")
    options = "--data-dir", data, "--networks", tmp_path / "networks", "--out", tmp_path / "out"
    run_script(f"filter_atoms.{name}", "--preset", "test", *options)
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert record["preset"] == "test"
    assert "demonstration" in (tmp_path / "out" / f"{name}.md").read_text()
    assert (tmp_path / "out" / "federated.png").is_file() == (name == "federated")
