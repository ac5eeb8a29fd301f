"""Files of word2vec, fastText and GloVe are read, and pickles are refused."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gensim.models import FastText, KeyedVectors
from gensim.models.fasttext import save_facebook_model
from hf_stitch_word_vectors import read_vectors
from hf_stitch_word_vectors.files import FASTTEXT

import hf_stitch

WORDS = ["the", "čeština", "new york", "word"]
VALUES = torch.tensor([[0.5, -1.25, 3.0], [2.0, 0.125, 1.0], [0.0, 1.0, -1.0], [1e-3, 4.0, 5.0]])
LINES = [f"{word} {' '.join(map(str, row))}" for word, row in zip(WORDS, VALUES.tolist(), strict=True)]
CONTENT = {
    "glove.txt": "\n".join(LINES),
    "word2vec.txt": "\n".join(["4 3", *LINES]) + "\n",
    "fasttext.vec": "\n".join(["4 3", *(f"{line} " for line in LINES)]) + "\n",
}


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("name", CONTENT)
def test_text_files_are_read(tmp_path: Path, name: str, is_compressed: bool) -> None:
    content = CONTENT[name].encode()
    path = tmp_path / (f"{name}.gz" if is_compressed else name)
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    found = read_vectors(path)
    assert found.words == tuple(WORDS)
    assert torch.equal(found.vectors.weight, VALUES)
    assert read_vectors(path, 2).words == tuple(WORDS[:2])


@pytest.mark.parametrize("name", ["vectors.bin", "vectors.bin.gz"])
def test_binary_files_are_read(tmp_path: Path, name: str) -> None:
    words = [word.replace(" ", "_") for word in WORDS]
    kept = KeyedVectors(3)
    kept.add_vectors(words, VALUES.numpy())
    kept.save_word2vec_format(tmp_path / "vectors.bin", binary=True)
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "vectors.bin").read_bytes()))
    found = read_vectors(tmp_path / name)
    assert found.words == tuple(words)
    assert torch.equal(found.vectors.weight, VALUES)
    assert len(read_vectors(tmp_path / name, 3)) == 3


def test_a_model_of_fasttext_is_read(tmp_path: Path) -> None:
    model = FastText([["red", "green", "blue"]] * 3, vector_size=4, min_count=1, bucket=20, epochs=1, workers=1)
    save_facebook_model(model, str(tmp_path / "model.bin"))
    found = read_vectors(tmp_path / "model.bin", 2)
    assert found.words == tuple(model.wv.index_to_key[:2])
    assert torch.allclose(found.vectors.weight, torch.from_numpy(model.wv.vectors[:2]), atol=1e-6)


def test_a_pickle_needs_the_consent_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "vectors.kv"
    kept = KeyedVectors(3)
    kept.add_vectors(WORDS, VALUES.numpy())
    kept.save(str(path))
    with pytest.raises(ValueError, match="is a pickle"):
        read_vectors(path)
    with pytest.raises(ValueError, match=r"is a pickle.*trust_remote_code=True"):
        hf_stitch.load(f"word_vectors:{path}")
    adapter = hf_stitch.load(f"word_vectors:{path}", trust_remote_code=True)
    assert torch.equal(adapter.model.vectors.weight, VALUES)
    assert "trust_remote_code" not in adapter.reference.kwargs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the 1 2\nhouse 1\n", "line 2 must be a word and 2 numbers"),
        (b"2 2\nthe 1 2\nhouse 1 x\n", "line 3 must be a word and 2 numbers"),
        (b"3 2\nthe 1 2\nhouse 1 3\n", "must have 3 words .*got 2"),
        (b"9 300\nthe \x00\x01", "must have 9 vectors"),
        (b"hello\n", "line 1"),
        (b"", "line 1"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "line 1"),
        (FASTTEXT + b"\x00" * 20, r"file\.txt cannot be read"),
        (b"a " * 2**20, "line 1"),
        (gzip.compress(b"the 1 2\n" * 2**22, 1), r"file\.txt must not exceed 16777216 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_vectors(tmp_path / "file.txt")


def test_word_vectors_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glove.txt").write_text(CONTENT["glove.txt"])
    adapter = hf_stitch.load(f"word_vectors:{tmp_path / 'glove.txt'}", most_frequent=3)
    assert len(adapter.model) == 3
    assert adapter.reference.kwargs == {"most_frequent": 3}
    monkeypatch.chdir(tmp_path)
    assert hf_stitch.load("word_vectors:glove.txt").reference.id == f"word_vectors:{tmp_path / 'glove.txt'}"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hf_stitch.load("word_vectors:./nothing.txt")
    with pytest.raises(TypeError, match=r"unknown loading option .* dtype"):
        hf_stitch.load(f"word_vectors:{tmp_path / 'glove.txt'}", dtype="float16")
    with pytest.raises(ValueError, match="at least 1"):
        hf_stitch.load(f"word_vectors:{tmp_path / 'glove.txt'}", most_frequent=0)


def test_word_vectors_are_loaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "glove.txt").write_text(CONTENT["glove.txt"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    adapter = hf_stitch.load("word_vectors:owner/name/data/glove.txt", local_files_only=True)
    assert adapter.model.words == tuple(WORDS)
    assert asked["repo_id"] == "owner/name"
    assert asked["allow_patterns"] == ["data/glove.txt"]
    assert asked["local_files_only"]
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match=r"file data/other\.txt does not exist"):
        hf_stitch.load("word_vectors:owner/name/data/other.txt", local_files_only=True)
