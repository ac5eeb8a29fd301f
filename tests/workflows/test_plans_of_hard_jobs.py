"""Plans of jobs that do not fit, of small batches and of several processes; wrong input of plans and caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import pytest
import torch
from processes import run_ranks
from tiny_networks import network
from torch import Tensor, nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import resources
from hf_stitch.adapters.pins import Pins
from hf_stitch.analysis import extract_activations
from hf_stitch.cli import app
from hf_stitch.storage.cache import Cache

Jobs = Callable[..., Any]


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    return network("cnn"), network("cnn", 1)


@pytest.fixture(scope="module")
def stitched(both: tuple[Any, Any]) -> hf_stitch.StitchedModel:
    a, b = both
    others = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return hf_stitch.stitch(a, b, others, source_layer=a.layers[1], target_layer=b.layers[1], progress=False)


JOBS: dict[str, Jobs] = {
    "compare": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.compare, a, b, x, **options),
    "compare_all": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.compare_all, [a, b], x, **options),
    "stitch": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.stitch, a, b, x, **options),
    "stitch_grid": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.stitch_grid, a, b, x, **options),
    "evaluate": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.evaluate, model, x, **options),
    "audit": lambda model, a, b, x, **options: hf_stitch.plan(hf_stitch.audit, model, x, **options),
}


@pytest.mark.parametrize("job", JOBS)
def test_plans_with_batches_of_one_sample(job: str, stitched: Any, both: tuple[Any, Any], images: Tensor) -> None:
    plan = JOBS[job](stitched, *both, images, batch_size=1)
    assert plan.fits and plan.seconds > 0


@pytest.mark.parametrize("job", JOBS)
def test_plans_refuse_batches_of_no_sample(job: str, stitched: Any, both: tuple[Any, Any], images: Tensor) -> None:
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        JOBS[job](stitched, *both, images, batch_size=0)


def test_plans_draw_no_random_numbers(both: tuple[Any, Any], images: Tensor) -> None:
    before = torch.random.get_rng_state()
    hf_stitch.plan(hf_stitch.stitch, *both, images)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_comparison_without_a_route_does_not_fit(
    both: tuple[Any, Any], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_stitch.analysis.comparison.comparing.free_memory", lambda device: 200_000)
    plan = hf_stitch.plan(hf_stitch.compare, *both, images)  # a route may use half of the memory
    assert not plan.fits and "DOES NOT FIT" in str(plan)
    assert 100_000 < plan.memory["moments"] < 200_000
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))).fits is False
    with pytest.raises(ValueError, match="no route of linear_cka fits into memory"):
        hf_stitch.compare(*both, images, progress=False)


def test_moments_that_do_not_fit_are_not_collected_for_a_plan(
    both: tuple[Any, Any], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "free_memory", lambda device: 100)
    with pytest.raises(ValueError, match="the moments of layers up to"):
        hf_stitch.plan(hf_stitch.stitch, *both, images)
    by_rows = hf_stitch.plan(hf_stitch.stitch, *both, images, matcher="retrieval")  # collects none
    assert "moments" not in by_rows.memory and by_rows.memory["rows"] > 0


def test_rows_of_a_test_take_disk(both: tuple[Any, Any], images: Tensor) -> None:
    a, b = both
    widths = {layer: extract_activations(a, images[:2], progress=False).values[layer].shape[1] for layer in a.layers}
    rows = 4 * len(images) * 2 * sum(widths.values())
    tested = hf_stitch.plan(hf_stitch.compare, a, b, images, permutations=20)
    assert dict(tested.disk) == {"rows of the test": rows} and not tested.left_out
    resampled = hf_stitch.plan(hf_stitch.compare_all, [a, b], images, resamples=20)
    assert dict(resampled.disk) == {"rows of the test": rows} and "resamples" in resampled.left_out
    assert not hf_stitch.plan(hf_stitch.compare_all, [a, b], images).disk


def plan_of_a_rank(rank: int, folder: Path) -> None:
    a, b = network("cnn"), network("cnn", 1)
    x = torch.rand(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plans = {
        "compare": hf_stitch.plan(hf_stitch.compare, a, b, x),
        "stitch": hf_stitch.plan(hf_stitch.stitch, a, b, x, batch_size=8),
        "stitch_grid": hf_stitch.plan(hf_stitch.stitch_grid, a, b, x, batch_size=8),
    }
    found = {name: (plan.processes, dict(plan.memory), plan.fits) for name, plan in plans.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_all_processes_plan_the_same(tmp_path: Path) -> None:
    run_ranks(2, plan_of_a_rank, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and all(found[0] == 2 for found in first.values())


def test_a_cache_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert Cache(Path("~/own")).folder == tmp_path / "home" / "own"
    extract_activations(network("cnn"), torch.rand(4, 3, 32, 32), cache="~/own", progress=False)
    assert [place.name for place in tmp_path.iterdir()] == ["home"]


def doubled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(self, x)


def pins_of(folder: Path, *, offloaded: bool, patched: bool) -> tuple[str, dict[str, str]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    if patched:
        model[2].forward = MethodType(doubled, model[2])
    if offloaded:
        accelerate.dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=folder)
        assert model[2].weight.is_meta
    pins = Pins(without_weights=model)
    return pins.hash(model), pins.versions()


def test_an_offloaded_network_has_the_pins_of_the_one_in_memory(tmp_path: Path) -> None:
    plain, patched = (pins_of(tmp_path, offloaded=False, patched=each) for each in (False, True))
    assert plain != patched
    assert pins_of(tmp_path, offloaded=True, patched=False) == plain
    assert pins_of(tmp_path, offloaded=True, patched=True) == patched


def test_a_key_of_no_digits_is_that_of_no_entry(tmp_path: Path) -> None:
    Cache(tmp_path).write("ab" * 32, {"values": torch.ones(2)}, {})
    ended = CliRunner().invoke(app, ["cache", "rm", "", "--yes", "--folder", str(tmp_path)])
    assert ended.exit_code and len(Cache(tmp_path).entries()) == 1


def test_an_empty_name_is_no_folder_of_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="cache"):
        extract_activations(network("cnn"), torch.rand(4, 3, 32, 32), cache="", progress=False)


def test_a_cache_refuses_batches_of_no_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        extract_activations(network("cnn"), torch.rand(4, 3, 32, 32), cache=tmp_path, batch_size=0, progress=False)


def test_layers_that_are_named_twice_are_recorded_once() -> None:
    a = network("cnn")
    found = extract_activations(a, torch.rand(4, 3, 32, 32), layers=[a.layers[0], a.layers[0]], progress=False)
    assert list(found.values) == [a.layers[0]]
