"""Several files are replaced together, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_stitch.storage.files import ASIDE, JOURNAL, NEW, complete, load_whole, replacing, write_whole, written_aside

from killing import killed_at_every_operation, survives  # isort: skip

OLD = {"config.json": "old", "weights.bin": "old weights", "processor.json": "old processor"}
NEWER = {"config.json": "new", "weights.bin": "new weights", "more.bin": "more weights"}
OTHERS = {"optimizer.pt": "of a trainer", "notes.txt": "of a person"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def save(folder: Path, files: dict[str, str], **options: bool) -> None:
    with replacing(folder, lambda folder: OLD, **options) as fresh:
        write(fresh, files)


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "saved", OLD)
    write(tmp_path / "saved", OTHERS)
    return tmp_path / "saved"


@pytest.mark.parametrize("sync", [False, True])
def test_all_files_are_replaced_stale_ones_go_and_others_stay(folder: Path, sync: bool) -> None:
    inside = (folder / "notes.txt").stat().st_ino
    save(folder, NEWER, sync=sync)
    assert read(folder) == NEWER | OTHERS
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    assert (folder / "notes.txt").stat().st_ino == inside


@pytest.mark.parametrize("sync", [False, True])
def test_a_kill_at_any_operation_leaves_the_old_files_or_the_new_ones(folder: Path, sync: bool) -> None:
    seen = []
    for _ in killed_at_every_operation(lambda: save(folder, NEWER, sync=sync)):
        complete(folder)
        seen.append("new" if "more.bin" in read(folder) else "old")
        assert read(folder) == (OLD if seen[-1] == "old" else NEWER) | OTHERS
        save(folder, OLD)
        (folder / "more.bin").unlink(missing_ok=True)
        assert read(folder) == OLD | OTHERS
        assert not (folder / ASIDE).exists()
    assert seen.count("old") > 5 and seen.count("new") > 5


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What reaches the disk: each sync with its inode, each rename with the inode, and each removal of the journal."""
    happened: list[tuple[str, int]] = []
    replace, unlink = Path.replace, Path.unlink

    def renamed(path: Path, target: Path) -> Path:
        happened.append(("rename", path.stat().st_ino))
        return replace(path, target)

    def removed(path: Path, missing_ok: bool = False) -> None:
        happened.extend([("done", path.stat().st_ino)] if path.name == JOURNAL else [])
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", lambda file: happened.append(("sync", os.fstat(file).st_ino)))
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", removed)
    return happened


def test_a_power_failure_finds_each_file_on_the_disk_before_its_name(folder: Path, disk: list[tuple[str, int]]) -> None:
    save(folder, NEWER, sync=True)
    new, here = {(folder / name).stat().st_ino for name in NEWER}, folder.stat().st_ino
    journal = next(inode for what, inode in disk if what == "done")
    decided, done = disk.index(("rename", journal)), disk.index(("done", journal))
    assert {*new, journal} <= {inode for what, inode in disk[:decided] if what == "sync"}
    placed = [disk.index(("rename", inode)) for inode in new]
    assert "sync" in [what for what, _ in disk[decided : min(placed)]]
    assert ("sync", here) in disk[max(placed) : done]


def test_a_power_failure_finds_the_names_of_new_folders(folder: Path, disk: list[tuple[str, int]]) -> None:
    save(folder, NEWER, sync=True)
    assert ("sync", folder.parent.stat().st_ino) not in disk
    save(folder / "below" / "new", NEWER, sync=True)
    assert {("sync", each.stat().st_ino) for each in (folder, folder / "below", folder / "below" / "new")} <= {*disk}


def test_a_power_failure_finds_a_whole_file_on_the_disk(tmp_path: Path, disk: list[tuple[str, int]]) -> None:
    write_whole(tmp_path / "values.txt", lambda place: place.write_text("new"), sync=True)
    file = (tmp_path / "values.txt").stat().st_ino
    assert disk == [("sync", file), ("rename", file), ("sync", tmp_path.stat().st_ino)]


def test_an_exception_leaves_the_old_files(folder: Path) -> None:
    with pytest.raises(ValueError, match="no number"), replacing(folder, lambda folder: OLD) as fresh:
        write(fresh, NEWER)
        raise ValueError("no number")
    assert read(folder) == OLD | OTHERS
    assert not (folder / ASIDE).exists()


def test_an_interrupt_after_the_decision_leaves_the_new_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def interrupted(self: Path, to: Path) -> Path:
        done = rename(self, to)
        if to.name == JOURNAL:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(folder, NEWER)
    complete(folder)
    assert read(folder) == NEWER | OTHERS


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_files(folder: Path) -> None:
    with full_disk(), pytest.raises(OSError, match=r"saved could not be saved \(File too large\); .* unchanged"):
        save(folder, NEWER)
    assert read(folder) == OLD | OTHERS


def as_another_user(folder: Path, attempt: Callable[[], object]) -> bool:
    """Call a function as a user who may read the folder; the administrator may do anything anywhere."""
    for part in (folder, *folder.parents):
        if part.stat().st_uid == os.getuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)

    def run() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        attempt()

    return survives(run)


def test_a_read_only_folder_is_named(folder: Path) -> None:
    def attempt() -> None:
        with pytest.raises(PermissionError, match=r"saved could not be locked \(Permission denied\); .* unchanged"):
            save(folder, NEWER)

    folder.chmod(0o555)
    assert as_another_user(folder, attempt)
    assert read(folder) == OLD | OTHERS


def test_of_several_writers_one_wins_whole(folder: Path) -> None:
    errors: list[BaseException] = []

    def rewrite(number: int) -> None:
        for _ in range(20):
            save(folder, {name: f"{number}" for name in (*OLD, *(f"part-{k}" for k in range(number)))})

    def load() -> dict[str, str]:
        files = {name: (folder / name).read_text() for name in OLD}
        if len(set(files.values())) > 1:
            raise ValueError("mixed")
        return files

    def watch() -> None:
        try:
            for _ in range(100):
                load_whole(folder, "config.json", load)
        except BaseException as error:
            errors.append(error)

    save(folder, dict.fromkeys(OLD, "0"))
    writers = [threading.Thread(target=rewrite, args=(number,)) for number in (1, 2, 3)]
    threads = [*writers, threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(load().values())) == 1


def test_a_hidden_folder_that_disappears_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = os.mkdir
    raised: list[Path] = []

    def mkdir(path: Path, *rest: int) -> None:
        if Path(path).name == ASIDE and not raised:
            raised.append(path)
            raise FileExistsError(path)  # another writer's, which removes it before anybody looks
        made(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    save(folder, {"a": "new"})
    assert raised and read(folder)["a"] == "new"


@pytest.mark.parametrize("dangling", [False, True])
def test_a_file_in_place_of_the_hidden_folder_is_named(folder: Path, dangling: bool) -> None:
    (folder / ASIDE).symlink_to("nowhere") if dangling else (folder / ASIDE).write_text("mine")
    before = read(folder)
    with pytest.raises(OSError, match=rf"could not be locked .*{ASIDE} is not a folder; delete it"):
        save(folder, {"a": "new"})
    assert read(folder) == before


@pytest.mark.parametrize("named", ["../outside", "/etc/passwd", "", "..", 7])
def test_a_journal_reaches_only_its_own_folder(named: object, folder: Path) -> None:
    (folder.parent / "outside").write_text("precious")
    (folder / ASIDE / NEW).mkdir(parents=True)
    (folder / ASIDE / JOURNAL).write_text(json.dumps({"files": [], "stale": [named]}))
    with pytest.raises(ValueError, match=r"names files outside its folder"):
        complete(folder)
    assert (folder.parent / "outside").read_text() == "precious"


def test_a_journal_does_not_move_files_of_another_folder(folder: Path) -> None:
    (folder.parent / "mine").mkdir()
    (folder.parent / "mine" / "key").write_text("precious")
    (folder / ASIDE).mkdir()
    (folder / ASIDE / NEW).symlink_to(folder.parent / "mine")
    (folder / ASIDE / JOURNAL).write_text(json.dumps({"files": ["key"], "stale": []}))
    with pytest.raises(ValueError, match=r"names files outside its folder"):
        complete(folder)
    assert (folder.parent / "mine" / "key").exists()


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "values.txt"
    write_whole(path, lambda temporary: temporary.write_text("old"))
    for _ in killed_at_every_operation(lambda: write_whole(path, lambda temporary: temporary.write_text("newer"))):
        assert path.read_text() in ("old", "newer")
        write_whole(path, lambda temporary: temporary.write_text("old"), sync=True)
        assert [each.name for each in tmp_path.iterdir()] == ["values.txt"]
    with full_disk(), pytest.raises(OSError, match=r"values.txt could not be written \(File too large\); .* unchanged"):
        write_whole(path, lambda temporary: temporary.write_text("much longer than that"))
    assert path.read_text() == "newer"
    assert [each.name for each in tmp_path.iterdir()] == ["values.txt"]


# -- what killed processes leave, modes, and files that are none -------------------------------------------------------
def killed_while_writing(path: Path) -> None:
    """Kill a process that writes with safetensors, whose operations on files Python does not see."""

    def half(temporary: Path) -> None:
        (temporary.parent / ".tmpAb12Cd").write_bytes(b"half")  # as safetensors names it
        os.kill(os.getpid(), signal.SIGKILL)

    assert not survives(lambda: write_whole(path, half))


def test_what_a_killed_process_has_left_of_a_file_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "values.bin")
    write_whole(tmp_path / "values.bin", lambda temporary: temporary.write_text("whole"))
    assert [path.name for path in tmp_path.iterdir()] == ["values.bin"]


def test_what_a_killed_process_has_left_of_a_folder_is_removed_by_the_next_one(tmp_path: Path) -> None:
    def make() -> None:
        with written_aside(tmp_path / "made") as fresh:
            fresh.mkdir()
            (fresh / "a.txt").write_text("a")

    states = set()
    for _ in killed_at_every_operation(make):
        states.add((tmp_path / "made").exists())
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
        make()
        assert [path.name for path in tmp_path.rglob("*")] == ["made", "a.txt"]
        shutil.rmtree(tmp_path / "made")
    assert states == {False, True}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask_also_of_safetensors(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "a.safetensors", lambda path: save_file({"a": torch.ones(1)}, path))
        with replacing(tmp_path / "folder") as fresh:
            save_file({"a": torch.ones(1)}, fresh / "b.safetensors")
            write(fresh, OLD)
    finally:
        os.umask(before)
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*")}
    assert found.pop("folder") == oct(0o777 & ~umask)
    assert found == dict.fromkeys(["a.safetensors", "b.safetensors", *OLD], oct(mode))


@pytest.mark.parametrize("name", ["config.json", "weights.bin"])
def test_a_pipe_or_a_device_is_refused(folder: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(ValueError, match=rf"{name} is a pipe, a socket or a device"):
            load_whole(folder, "config.json", lambda: (folder / name).read_text())


def test_a_file_that_is_gone_meanwhile_is_not_one_that_may_not_be_read(folder: Path) -> None:
    (folder / ASIDE).mkdir()  # as that of another process that saves

    def load() -> None:
        shutil.rmtree(folder / ASIDE)
        (folder / "notes.txt").unlink()
        raise ValueError("they do not belong together")

    with pytest.raises(ValueError, match="do not belong together"):
        load_whole(folder, "config.json", load)


def test_a_file_that_this_user_may_not_read_is_named(folder: Path) -> None:
    def load() -> None:
        with safe_open(folder / "weights.bin", "pt"):
            pass

    def attempt() -> None:
        with pytest.raises(PermissionError, match=r"weights.bin: permission denied .* ask the owner"):
            load_whole(folder, "config.json", load)

    (folder / "weights.bin").chmod(0o600 if os.getuid() == 0 else 0o000)
    assert as_another_user(folder, attempt)
