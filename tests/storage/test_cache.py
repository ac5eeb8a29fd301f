"""A cache on disk stays whole, small and right, whoever writes, reads, kills and fills meanwhile."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_stitch.storage.cache import ABANDONED, Cache, bytes_of, default_folder

from killing import killed_at_every_operation, survives  # isort: skip
from processes import exit_codes, start  # isort: skip


def key(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def tensors(seed: int, size: int = 300) -> dict[str, torch.Tensor]:
    values = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {"values": values, "mask": values[:, 0] > 0}


def same(found: Any, seed: int) -> bool:
    return found is not None and all(torch.equal(found[0][n], each) for n, each in tensors(seed).items())


SIZE = 3400
"""Bytes that a file of :func:`tensors` exceeds, and of which two exceed three times this."""


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new")
    assert cache.read(key("a")) is None and cache.entries() == [] and cache.shrink() == []
    cache.write(key("a"), tensors(1), {"layer": "fc", "grid": [2, 3]})
    cache.write(key("b"), {}, {"candidates": ["x"]})
    cache.write(key("c"), {"values": torch.empty(0, 3), "more": torch.ones(3, dtype=torch.float64)}, {})
    empty = cache.read(key("c"))
    assert empty is not None and empty[0]["values"].shape == (0, 3) and empty[0]["more"].tolist() == [1, 1, 1]
    cache.remove(entry for entry in cache.entries() if entry.key == key("c"))
    found = cache.read(key("a"))
    assert same(found, 1) and found is not None and found[1] == {"layer": "fc", "grid": [2, 3]}
    assert set(found[0]) == {"values", "mask"} and cache.read(key("b")) == ({}, {"candidates": ["x"]})
    assert {entry.key: entry.about for entry in cache.entries()} == {
        key("a"): {"layer": "fc", "grid": [2, 3]},
        key("b"): {"candidates": ["x"]},
    }


def test_a_key_is_not_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        Cache(tmp_path).read("../secret")


def test_what_is_read_may_be_changed_without_changing_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {})
    found = cache.read(key(1))
    assert found is not None
    found[0]["values"].zero_()
    assert same(cache.read(key(1)), 1)


def broken(content: bytes) -> dict[str, bytes]:
    middle = len(content) - 200
    return {
        "flipped bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut off": content[:-7],
        "empty": b"",
        "header cut off": content[:20],
        "header too long": b"\xff" * 8 + content[8:],
        "other text": content.replace(b"fc", b"fd"),
        "no digest": content.replace(b"digest", b"digset"),
        "no offsets": content.replace(b"data_offsets", b"daat_offsets"),
        "other offsets": content.replace(b"[0,", b"[9,"),
        "other shape": content.replace(b"[300,5]", b"[300,6]"),
        "other dtype": content.replace(b"BF16", b"BF61"),
        "no text": b'@\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{}}'.ljust(72),
    }


@pytest.mark.parametrize("damage", broken(b" " * 300))
def test_a_broken_entry_is_removed_and_said(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {"layer": "fc"})
    (entry,) = cache.entries()
    entry.path.write_bytes(broken(entry.path.read_bytes())[damage])
    assert isinstance(cache.entries()[0].about, dict)
    with pytest.warns(UserWarning, match="broken"):
        assert cache.read(key(1)) is None
    assert not entry.path.exists()
    cache.write(key(1), tensors(1), {"layer": "fc"})
    assert same(cache.read(key(1)), 1)


def test_an_entry_under_the_key_of_another_is_broken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {})
    cache.entries()[0].path.rename(tmp_path / f"{key(2)}.safetensors")
    with pytest.warns(UserWarning, match="broken"):
        assert cache.read(key(2)) is None


def test_an_entry_that_cannot_be_read_is_none_and_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (tmp_path / f"{key(1)}.safetensors").mkdir()
    with pytest.warns(UserWarning, match="could not be read"):
        assert cache.read(key(1)) is None
    assert len(cache.entries()) == 1 and cache.shrink(0) == []


# -- size --------------------------------------------------------------------------------------------------------------
def test_the_entries_go_that_were_not_used_for_the_longest_time(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=4 * SIZE)
    for number in range(3):
        cache.write(key(number), tensors(number), {})
        os.utime(cache._path(key(number)), (number, number))
    assert same(cache.read(key(0)), 0)  # used last now
    cache.write(key(3), tensors(3), {})
    assert {entry.key for entry in cache.entries()} == {key(0), key(2), key(3)}
    assert cache.entries()[0].key == key(3)
    gone = cache.shrink(2 * SIZE)
    assert [entry.key for entry in gone] == [key(2), key(0)]
    assert [entry.key for entry in cache.shrink(0)] == [key(3)]


def test_an_entry_beyond_the_limit_is_not_written_and_removes_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=2 * SIZE)
    cache.write(key(1), tensors(1), {})
    with pytest.warns(UserWarning, match="HF_STITCH_CACHE_SIZE"):
        cache.write(key(2), tensors(2, 3000), {})
    assert [entry.key for entry in cache.entries()] == [key(1)]


def test_tensors_that_were_read_outlive_their_file(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {})
    found = cache.read(key(1))
    assert len(cache.shrink(0)) == 1 and list(tmp_path.iterdir()) == []
    cache.write(key(2), tensors(2), {})
    assert same(found, 1)


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("model.safetensors", f"{key(1)}.json", f"{key(1)}x.safetensors", "a")]
    for path in others:
        path.write_text("of a person")
        os.utime(path, (1, 1))
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {})
    cache.remove(cache.entries())
    cache.shrink(0)
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("1.5MiB", 1572864),
        ("70", 70),
        ("0", 0),
        ("2kB", 2000),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "five", "-1GB", "5 XB", "1e9", "5GB5"])
def test_what_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="for example 5GB"):
        bytes_of(text)
    if text:
        monkeypatch.setenv("HF_STITCH_CACHE_SIZE", text)
        with pytest.raises(ValueError, match="HF_STITCH_CACHE_SIZE"):
            Cache()


def test_the_environment_chooses_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_STITCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_folder() == Path.home() / ".cache" / "hf-stitch"
    monkeypatch.setenv("XDG_CACHE_HOME", "/data")
    assert default_folder() == Path("/data/hf-stitch")
    monkeypatch.setenv("HF_STITCH_CACHE", "~/mine")
    assert default_folder() == Path.home() / "mine"


# -- kills, full disks, several processes ------------------------------------------------------------------------------
def test_a_process_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    states = set()
    cache.write(key(1), tensors(1), {"state": "old"})

    def replace() -> None:
        Cache(tmp_path).write(key(1), tensors(2), {"state": "new"})

    for _ in killed_at_every_operation(replace):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = cache.read(key(1))
        assert found is not None and same(found, {"old": 1, "new": 2}[found[1]["state"]])
        states.add(found[1]["state"])
        cache.write(key(1), tensors(1), {"state": "old"})
    assert "old" in states
    assert [path.name for path in tmp_path.iterdir()] == [f"{key(1)}.safetensors"]


def test_what_a_killed_process_has_left_is_removed_later(tmp_path: Path) -> None:
    left = tmp_path / f"{key(1)}.safetensors.othermachine.1.1.unfinished"
    left.write_bytes(b"half")
    cache = Cache(tmp_path)
    cache.shrink()
    assert left.exists()  # perhaps another machine writes it
    os.utime(left, (time.time() - ABANDONED - 1,) * 2)
    cache.write(key(2), tensors(2), {})
    assert not left.exists()


def test_what_a_process_of_this_machine_has_left_is_removed_at_once(tmp_path: Path) -> None:
    def half(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def attempt() -> None:
        safetensors.torch.save_file = half
        Cache(tmp_path).write(key(1), tensors(1), {})

    assert not survives(attempt)
    assert len(list(tmp_path.iterdir())) == 1
    Cache(tmp_path).sweep()
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_no_entry(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{key(1)}.safetensors")
    cache = Cache(tmp_path)
    assert cache.entries() == []
    with pytest.warns(UserWarning, match="is a pipe"):
        assert cache.read(key(1)) is None


def test_a_full_disk_leaves_the_old(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {})

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="unchanged"):
            Cache(tmp_path).write(key(1), tensors(2), {})

    assert survives(fill)
    assert same(cache.read(key(1)), 1) and len(list(tmp_path.iterdir())) == 1


def test_threads_share_a_cache(tmp_path: Path) -> None:
    def use(number: int) -> bool:
        cache = Cache(tmp_path, limit=4 * SIZE)
        cache.write(key(number % 3), tensors(number % 3), {})
        found = cache.read(key(number % 3))
        cache.shrink(2 * SIZE)
        return found is None or same(found, number % 3)

    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(pool.map(use, range(200)))
    assert all(path.suffix == ".safetensors" for path in tmp_path.iterdir())


KEYS = 12


def work(folder: Path, seed: int, kills: bool) -> None:
    """Write, read, list and shrink, with any warning an error; to be killed, go on forever."""
    warnings.simplefilter("error")
    cache = Cache(folder, limit=6 * SIZE)
    draw = torch.Generator().manual_seed(seed)
    step = 0
    while kills or step < 150:
        step += 1
        number = int(torch.randint(KEYS, (1,), generator=draw))
        found = cache.read(key(number))
        assert found is None or same(found, number)
        if found is None:
            cache.write(key(number), tensors(number), {"number": number})
        for entry in cache.entries():
            assert entry.about in ({}, {"number": entry.about.get("number")})
        if step % 10 == 0:
            cache.shrink(3 * SIZE)
        assert found is None or same(found, number)  # its file may be gone


def test_an_entry_that_another_process_removes_while_it_is_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    cache.write(key(1), tensors(1), {"number": 1})

    def removed(path: Path, name: str) -> Any:
        path.unlink()
        raise RuntimeError("unable to open file in read-only mode")  # as safetensors says it

    monkeypatch.setattr("hf_stitch.storage.tensors._read", removed)
    assert cache.read(key(1)) is None


def test_four_processes_write_read_and_remove_at_once_while_others_are_killed(tmp_path: Path) -> None:
    workers = [start(work, tmp_path, seed, False) for seed in range(4)]
    for seed in range(4, 9):
        victim = start(work, tmp_path, seed, True)
        time.sleep(0.4)
        assert victim.is_alive() and victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    assert exit_codes(*workers) == [0] * 4
    cache = Cache(tmp_path, limit=6 * SIZE)
    cache.shrink()
    assert sum(entry.size for entry in cache.entries()) <= 6 * SIZE
    for entry in cache.entries():
        assert same(cache.read(entry.key), entry.about["number"])
