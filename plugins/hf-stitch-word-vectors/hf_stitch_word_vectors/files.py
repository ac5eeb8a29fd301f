"""Reader of word vectors from files: word2vec (text and binary), fastText and GloVe, without unpickling."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from hf_stitch.storage.files import decoding
from hf_stitch_word_vectors.vectors import WordVectors, as_word_vectors

FASTTEXT, GZIP, PICKLE = (793712314).to_bytes(4, "little"), b"\x1f\x8b", b"\x80"
"""First bytes of a fastText model, of a compressed file and of a pickle."""
LONGEST_HEADER = 64
"""Maximum size of a header in bytes; a longer first line contains a vector."""
LONGEST_LINE = 2**20
"""Maximum size of a line in bytes."""
UNPACKED = 20
"""Maximum ratio of uncompressed to compressed size."""


def read_vectors(path: str | Path, most_frequent: int | None = None, *, trust_pickle: bool = False) -> WordVectors:
    r"""Read word vectors from a file; the format is detected from the content.

    Formats: word2vec, text or binary; fastText, ``.vec`` or the model ``.bin``; GloVe, text without a header. Files may
    be compressed with gzip, except fastText models.

    Args:
        path: The file.
        most_frequent: Number of words to read from the start of the file, which is sorted by frequency. ``None``
            (default): all.
        trust_pickle: Whether to open files from gensim's ``save``. They are pickles, which can run any code: pass
            ``True`` only for trusted files.

    Returns:
        The vectors in the order of the file. For a repeated word, the first vector is used.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is a pickle, or its format is unknown; the message has the line number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "glove.txt")
        ...     _ = path.write_text("cat 1 2\ndog 3 4\n")
        ...     read_vectors(path).rows(["dog"])
        tensor([[3., 4.]])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if most_frequent is not None and most_frequent < 1:
        raise ValueError(f"most_frequent must be at least 1, got {most_frequent}")
    with decoding(path):
        return _read(path, most_frequent, trust_pickle)


def _read(path: Path, most_frequent: int | None, trust_pickle: bool) -> WordVectors:
    with _open(path) as file:
        first_line = file.readline(LONGEST_HEADER)
        if first_line.startswith(PICKLE):
            return _from_pickle(path, most_frequent, trust_pickle)
        if first_line.startswith(FASTTEXT):
            return _from_fasttext(path, most_frequent)
        header = _parse_header(first_line)
        if header is None:
            file.seek(0)
            return _from_text(path, file, None, most_frequent)
        if _is_text(file, header[1]):
            return _from_text(path, file, header, most_frequent)
    return _from_binary(path, header, most_frequent)


def _open(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        is_compressed = file.read(2) == GZIP
    return gzip.open(path, "rb") if is_compressed else open(path, "rb")  # type: ignore[return-value]


def _check_size(path: Path, position: int) -> None:
    """Raise an error if the uncompressed size is out of proportion to the size of the file."""
    if position > (limit := max(UNPACKED * path.stat().st_size, 2**24)):
        raise ValueError(f"{path} must not exceed {limit} bytes uncompressed, the limit for word vectors of its size")


def _parse_header(line: bytes) -> tuple[int, int] | None:
    """Return the number of words and the width from a header line, or None if the line is not a header."""
    fields = line.split()
    if line.endswith(b"\n") and len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]) > 0:
        return int(fields[0]), int(fields[1])
    return None


def _is_text(file: IO[bytes], width: int) -> bool:
    """Return whether the rest of a file is text, without moving the position."""
    position = file.tell()
    line = file.readline(LONGEST_HEADER * (width + 16))
    file.seek(position)
    try:
        return len([float(value) for value in line.decode().rstrip().rsplit(" ", width)[1:]]) == width
    except ValueError:  # including invalid UTF-8
        return False


def _from_text(path: Path, file: IO[bytes], header: tuple[int, int] | None, most_frequent: int | None) -> WordVectors:
    """Read a word and its numbers from each line; words may contain spaces."""
    first_number = 1 if header is None else 2
    lines: Iterator[bytes] = iter(lambda: file.readline(LONGEST_LINE), b"")
    if header is None:
        first_line = next(lines, b"")
        width = len(first_line.split()) - 1
        lines = chain([first_line], lines)
    else:
        width = header[1]
    rows: dict[str, NDArray[np.float32]] = {}
    line_count = 0
    for number, line in enumerate(islice(lines, most_frequent), first_number):
        try:
            word, *values = line.decode("utf-8", "replace").rstrip().rsplit(" ", width)
            row = np.array(values, dtype=np.float32)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} must be a word and {width} numbers ({error})") from error
        if len(row) != width or width < 1:
            raise ValueError(
                f"{path}: line {number} must be a word and {max(width, 1)} numbers separated by spaces; pass a file "
                "of word2vec (text or binary), fastText or GloVe"
            )
        rows.setdefault(word, row)
        line_count += 1
        if not number % 4096:
            _check_size(path, file.tell())
    if header is not None and line_count < min(header[0], most_frequent or header[0]):
        raise ValueError(f"{path} must have {header[0]} words according to its header, got {line_count}: it is damaged")
    if not rows:
        raise ValueError(f"{path} is empty")
    return WordVectors.of(list(rows), torch.from_numpy(np.stack(list(rows.values()))))


def _from_binary(path: Path, header: tuple[int, int], most_frequent: int | None) -> WordVectors:
    from gensim.models import KeyedVectors  # type: ignore[import-untyped]

    words, width = header
    min_size = 4 * width * min(words, most_frequent or words)
    size = 0
    with _open(path) as file:
        while size < min_size and (block := file.read(2**20)):
            size += len(block)
            _check_size(path, size)
    if size < min_size:
        raise ValueError(
            f"{path} must have {words} vectors of width {width} according to its header, but is shorter: it is "
            "damaged, or not in the binary format of word2vec"
        )
    try:
        keyed_vectors = KeyedVectors.load_word2vec_format(
            path, binary=True, limit=most_frequent, unicode_errors="replace"
        )
    except (EOFError, ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not in the binary format of word2vec, or is damaged: {error}") from error
    return as_word_vectors(keyed_vectors)


def _from_fasttext(path: Path, most_frequent: int | None) -> WordVectors:
    from gensim.models.fasttext import load_facebook_vectors  # type: ignore[import-untyped]

    return _most_frequent(as_word_vectors(load_facebook_vectors(str(path))), most_frequent)


def _from_pickle(path: Path, most_frequent: int | None, is_trusted: bool) -> WordVectors:
    from gensim.utils import unpickle  # type: ignore[import-untyped]

    if not is_trusted:
        raise ValueError(
            f"{path} is a pickle from gensim's save(): opening it can run any code. If you trust it, pass "
            "trust_remote_code=True to hf_stitch.load (trust_pickle=True to read_vectors), or convert it once: "
            "vectors.save_word2vec_format(path, binary=True)"
        )
    kind = type(unpickle(str(path)))
    return _most_frequent(as_word_vectors(kind.load(str(path))), most_frequent)


def _most_frequent(vectors: WordVectors, count: int | None) -> WordVectors:
    words = vectors.words[:count]
    return WordVectors.of(words, vectors.rows(words))
