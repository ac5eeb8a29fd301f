"""An interrupted job resumes bit for bit from the checkpoint that it wrote, and is refused any other."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch import Samples
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.storage.files import write_whole
from hf_stitch.training import TaskLoss

from killing import survives  # isort: skip

BATCH, N = 8, 60


def sides() -> tuple[Any, Any]:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        found.append(hf_stitch.load(network, example_inputs=torch.randn(2, 5, dtype=torch.float64)))
    return found[0], found[1]


def samples() -> Samples:
    points = torch.randn(N, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return Samples.of(points, label=[number % 3 for number in range(N)])


LAYERS = {"layers_a": ["1", "3"], "layers_b": ["1", "3"]}


def compare(folder: Path) -> Any:
    """Its checkpoint has rows in files, and sums."""
    metrics = ["linear_cka", "rsa", hf_stitch.registries.metrics.build("minibatch_cka", batch_size=16)]
    options = {"batch_size": BATCH, "checkpoint_dir": folder, "progress": False}
    found = hf_stitch.compare(*sides(), samples(), metrics=metrics, **options).values
    return {name: values.tolist() for name, values in found.items()}


def grid(folder: Path) -> Any:
    """Its checkpoint has moments, measures, and that of a training."""
    options = {"batch_size": BATCH, "checkpoint_dir": folder, "progress": False, "resamples": 20}
    matchers = ["lstsq", TaskLoss(max_steps=6, batch_size=BATCH)]
    options |= {"matchers": matchers, "task": "image-classification"}
    return hf_stitch.stitch_grid(*sides(), samples(), **LAYERS, **options).to_dict()


def training(folder: Path) -> Any:
    options = {"source_layer": "1", "target_layer": "3", "task": "image-classification", "progress": False}
    model = hf_stitch.stitch(*sides(), samples(), **options)
    found = TaskLoss(max_steps=12, batch_size=BATCH, patience=3).fit(
        model, samples(), validation_data=samples(), checkpoint_dir=folder, save_every=1, progress=False
    )
    return [value.tolist() for value in found.state_dict().values()]


JOBS: dict[str, tuple[Callable[[Path], Any], tuple[int, ...]]] = {
    "compare": (compare, (3, 8)),
    "grid": (grid, (4, 10)),
    "training": (training, (5, 12)),
}


@pytest.fixture(scope="module", params=JOBS)
def interrupted(request: Any, tmp_path_factory: Any) -> tuple[Callable[[Path], Any], Any, list[Path]]:
    """A job, its result, and its checkpoints after some saves."""
    job, places = JOBS[request.param]
    folder, save, due = tmp_path_factory.mktemp(request.param), Checkpoint.save, Checkpoint.due
    torch.set_num_threads(1)
    Checkpoint.due = lambda self, done: self.lasting  # type: ignore[method-assign]
    try:
        whole = job(folder / "whole")
        for number in places:
            left = number

            def stop(self: Checkpoint, *arguments: Any) -> None:
                nonlocal left
                save(self, *arguments)
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

            Checkpoint.save = stop  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                job(folder / str(number))
    finally:
        Checkpoint.save, Checkpoint.due = save, due  # type: ignore[method-assign]
    return job, whole, [folder / str(number) for number in places]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content)) if draw.random() < 0.7 else draw.randrange(min(len(content), 400))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "flipped": flipped,
    "cut off": lambda content, draw: content[: draw.randrange(len(content))],
    "garbage": lambda content, draw: draw.randbytes(len(content)),
    "zeros": lambda content, draw: bytes(len(content)),
    "nested": lambda content, draw: b"[" * 100_000,
    "gone": lambda content, draw: None,
}


def resumed(job: Callable[[Path], Any], folder: Path, whole: Any) -> str:
    """Resume a job, which must be refused or end with the same bits."""
    try:
        assert json.dumps(job(folder)) == json.dumps(whole)
    except ValueError as error:
        assert type(error) is ValueError and "delete the folder" in str(error), error
        assert str(folder) in str(error)
        return "refused"
    return "equal"


def test_a_checkpoint_resumes_to_the_same_bits(interrupted: Any, tmp_path: Path) -> None:
    job, whole, places = interrupted
    for place in places:
        shutil.copytree(place, tmp_path / place.name)
        assert resumed(job, tmp_path / place.name, whole) == "equal"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_or_makes_no_difference(interrupted: Any, damage: str, tmp_path: Path) -> None:
    job, whole, places = interrupted
    draw, found = random.Random(damage), []
    for place in places:
        for file in files(place):
            for number in range(3 if damage == "flipped" else 1):
                again = tmp_path / f"{place.name}-{file.name}-{file.parent.name}-{number}"
                shutil.copytree(place, again)
                broken, content = again / file.relative_to(place), DAMAGES[damage](file.read_bytes(), draw)
                broken.unlink()
                if content is not None:
                    broken.write_bytes(content)
                found.append(resumed(job, again, whole) if content != file.read_bytes() else "equal")
    assert damage == "gone" or found.count("refused") > len(found) / 2


# -- states that are written well and do not fit -----------------------------------------------------------------------
CPU, JOB = torch.device("cpu"), {"metric": "rsa"}


def begun(folder: Path, recipe: Any = JOB) -> Checkpoint:
    found = Checkpoint(folder, 0, lasting=True)
    found.begin(recipe, lambda: "route")
    return found


def refused(folder: Path) -> Any:
    return pytest.raises(ValueError, match=rf"delete the folder {folder} and run again")


@pytest.mark.parametrize("position", [10**9, 11, -1])
def test_a_position_outside_of_the_job_is_refused(position: int, tmp_path: Path) -> None:
    begun(tmp_path).save(position, {"sum": torch.ones(2)})
    with refused(tmp_path):
        begun(tmp_path).load(CPU, range(11), lambda *_: None)


def test_the_state_of_another_job_or_process_is_refused(tmp_path: Path) -> None:
    begun(tmp_path / "one").save(3, {"sum": torch.ones(2)})
    begun(tmp_path / "two", {"metric": "cka"})
    for source, target in (("one/state-0", "two/state-0"), ("one/state-0", "one/state-1")):
        shutil.copyfile(tmp_path / f"{source}.safetensors", tmp_path / f"{target}.safetensors")
    with refused(tmp_path / "two"):
        begun(tmp_path / "two", {"metric": "cka"}).load(CPU, range(11), lambda *_: None)
    other = Checkpoint(tmp_path / "one", 1, lasting=True)
    other.begin(JOB, lambda: "route")
    with refused(tmp_path / "one"):
        other.load(CPU, range(11), lambda *_: None)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """A file that the job does not write again would keep it for ever."""
    begun(tmp_path)
    assert not survives(lambda: write_whole(tmp_path / "job.json", lambda _: os.kill(os.getpid(), signal.SIGKILL)))
    assert len([*tmp_path.iterdir()]) == 2
    begun(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_tensors_that_do_not_fit_are_refused(interrupted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed as the job does, with another shape, and without any."""
    job = interrupted[0]
    save = Checkpoint.save
    for number, change in enumerate((lambda value: value[..., None], lambda value: None)):

        def stop(self: Checkpoint, position: int, tensors: Any, change: Any = change) -> None:
            changed = {name: change(value) for name, value in tensors.items()}
            save(self, position, {name: value for name, value in changed.items() if value is not None})
            raise KeyboardInterrupt

        monkeypatch.setattr(Checkpoint, "save", stop)
        monkeypatch.setattr(Checkpoint, "due", lambda self, done: self.lasting)
        with pytest.raises(KeyboardInterrupt):
            job(tmp_path / str(number))
        monkeypatch.undo()
        with refused(tmp_path / str(number)):
            job(tmp_path / str(number))


def test_a_checkpoint_of_version_0_2_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"recipe": JOB, "decided": "route"}))
    with refused(tmp_path):
        begun(tmp_path)
