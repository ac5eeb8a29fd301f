"""Train word vectors on texts: word2vec and fastText, both as skip-grams."""

import gzip
import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gensim.models import FastText, Word2Vec  # type: ignore[import-untyped]
from hf_stitch_word_vectors import WordVectors, read_vectors
from relative_representations.encoders import digest

from hf_stitch.storage.files import write_whole

WORDS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
ALGORITHMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "word2vec": (Word2Vec, {"alpha": 0.025}),
    "fastText": (FastText, {"alpha": 0.05, "bucket": 200_000}),
}
"""Name -> class and options; the learning rates are the defaults of the authors' programs."""


def lines_of(folder: Path) -> Iterator[str]:
    """Yield the lines of all ``.txt`` and ``.txt.gz`` files of a folder, in the order of their names."""
    files = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.gz")])
    if not files:
        raise SystemExit(f"{folder} must contain .txt or .txt.gz files; see the page for the texts")
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8", errors="replace") as text:
            yield from text


def tokens_of(lines: Iterator[str]) -> Iterator[str]:
    """Yield the words of every line in lower case, separated by spaces, without lines of a single word."""
    for line in lines:
        words = WORDS.findall(line.lower())
        if len(words) > 1:
            yield " ".join(words)


def written(lines: Iterator[str], cache: Path) -> tuple[Path, int]:
    """Write the words of lines to a file in the cache, named by its content; return its path and its word count."""
    count, content = 0, hashlib.sha256()
    for line in (tokens := list(tokens_of(lines))):
        count += line.count(" ") + 1
        content.update(line.encode() + b"\n")
    path = cache / f"tokens_{content.hexdigest()[:16]}.txt"
    if not path.is_file():
        write_whole(path, lambda unfinished: unfinished.write_text("\n".join(tokens) + "\n"))
    return path, count


def parts_of(folder: Path, cache: Path) -> dict[str, tuple[Path, int]]:
    """Write the words of all lines, of the even lines and of the odd lines, as in :func:`written`."""
    places = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}
    return {part: written(islice(lines_of(folder), start, None, step), cache) for part, (start, step) in places.items()}


def trained(algorithm: str, seed: int, words: Path, cache: Path, **options: Any) -> WordVectors:
    """Train word vectors in one thread for reproducibility, or read them from the cache."""
    create, defaults = ALGORITHMS[algorithm]
    chosen = {"sg": 1, "window": 5, "negative": 5, "sample": 1e-4, **defaults, **options}
    path = cache / f"{algorithm}_{digest(words.name, seed, chosen)}.bin"
    if not path.is_file():
        model = create(corpus_file=str(words), seed=seed, workers=1, **chosen)
        write_whole(path, lambda unfinished: model.wv.save_word2vec_format(str(unfinished), binary=True))
    return read_vectors(path)
