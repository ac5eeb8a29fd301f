"""Vectors are read from any container, bad ones are refused, and remote encoders fail without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import (
    CostLimitError,
    EmbeddingMap,
    NetworkEncoder,
    RemoteEncoder,
    check_pairs,
    check_vectors,
    encode,
    evaluate_retrieval,
    exact_search,
    fit_embedding_map,
    monitor,
    normalized,
    read_vectors,
    rows_first,
)

from hf_stitch.stitches import LinearStitch


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


class Row:
    """A vector of a database driver, as pgvector makes them: no sequence, of big-endian float32."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values.astype(">f4")

    def to_numpy(self) -> np.ndarray:
        return self.values


def test_every_container_gives_the_same_vectors(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    wanted = rows(7, 3)
    np.save(tmp_path / "vectors.npy", wanted)
    lists = wanted.tolist()
    given = {
        "torch": torch.from_numpy(wanted),
        "lists": lists,
        "file": tmp_path / "vectors.npy",
        "stream": iter([wanted[:3], torch.from_numpy(wanted[3:])]),
        "arrow": pyarrow.array(lists, type=pyarrow.list_(pyarrow.float32())),
        "arrow fixed": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(wanted.ravel()), 3),
        "arrow chunks": pyarrow.chunked_array([pyarrow.array(lists[:2]), pyarrow.array(lists[2:])]),
        "series": pandas.Series(list(wanted)),
        "frame": pandas.DataFrame(wanted),
        "rows of a stream": iter(lists),
        "tensors": list(torch.from_numpy(wanted)),
        "of a database": list(map(Row, wanted)),
        "of a database, a stream": iter(list(map(Row, wanted))),
        "of a database, in batches": iter([list(map(Row, wanted[:3])), list(map(Row, wanted[3:]))]),
        "of a database, in a frame": pandas.Series(list(map(Row, wanted))),
        "objects": np.array([*map(Row, wanted)], dtype=object),
    }
    for name, each in given.items():
        np.testing.assert_array_equal(read_vectors(each).astype(np.float32), wanted, err_msg=name)
    assert isinstance(read_vectors(tmp_path / "vectors.npy"), np.memmap)
    assert read_vectors(torch.ones(2, 2, dtype=torch.bfloat16)).dtype == np.float32


def test_columns_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    wanted = rows(9000, 3)
    table = datasets.Dataset.from_dict({"vector": wanted.tolist(), "text": ["a"] * 9000})
    for given in (table, table.with_format("numpy"), table.with_format("torch"), table.to_iterable_dataset()):
        np.testing.assert_array_equal(read_vectors(given["vector"]).astype(np.float32), wanted)
    for given in (table, table.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"got dict, .*select the vectors, one of vector, text"):
            read_vectors(given)


BITS = np.random.default_rng(0).random((40, 21)) > 0.4
SIGNS = np.where(np.pad(BITS, ((0, 0), (0, 3))), 1.0, -1.0)


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_packed_bits_are_read_as_signs(precision: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    packed = quantization.quantize_embeddings(BITS - 0.5, precision)
    np.save(tmp_path / "packed.npy", packed)
    for given in (packed, torch.from_numpy(packed), tmp_path / "packed.npy", iter([packed[:7], packed[7:]]), SIGNS > 0):
        found = read_vectors(given, quantization="binary")
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, SIGNS)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_codes_of_ranges_are_read_to_half_a_step(precision: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    wanted = rows(200, 5) + np.arange(5, dtype=np.float32)
    wanted[:, 3] = 7  # a constant column
    ranges = np.stack([wanted.min(0), wanted.max(0)])
    np.save(tmp_path / "ranges.npy", ranges)
    codes = quantization.quantize_embeddings(wanted, precision, ranges=ranges)
    half = (ranges[1] - ranges[0]) / 255 / 2
    for given in (ranges, ranges.tolist(), tmp_path / "ranges.npy"):
        found = read_vectors(codes, quantization="int8", ranges=given)
        assert (np.abs(found - wanted) <= half + np.where(wanted == ranges[1], half, 0) + 1e-5).all()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            np.ones((2, 3), np.int8),
            {},
            "must be floating point, got int8 without a quantization. Pass quantization='binary'",
        ),
        ([[1, 2], [3, 4]], {}, r"got int64 .*vectors.astype.np.float32. for plain numbers"),
        (SIGNS > 0, {}, "got bool"),
        (np.ones((2, 3), np.int16), {"quantization": "int8", "ranges": (0, 1)}, "for quantization='int8', got int16"),
        (np.ones((2, 3)), {"quantization": "binary"}, "must be int8 or uint8 for quantization='binary', got float64"),
        (SIGNS > 0, {"quantization": "int8", "ranges": (0, 1)}, "for quantization='int8', got bool"),
        (np.ones((2, 3), np.int8), {"quantization": "int8"}, "ranges .* got quantization='int8' without ranges"),
        (np.ones((2, 3), np.int8), {"ranges": (0, 1)}, "got quantization=None with ranges"),
        (np.ones((2, 3), np.int8), {"quantization": "bits"}, "quantization must be one of 'binary', 'int8' or None"),
        (
            np.ones((2, 3), np.int8),
            {"quantization": "int8", "ranges": np.ones((2, 4))},
            r"\(2, 3\) numbers, got .*2, 4",
        ),
        (np.ones((2, 3), np.int8), {"quantization": "int8", "ranges": (1, 0)}, "infinite, NaN or reversed limits"),
        (np.ones((2, 3), np.int8), {"quantization": "int8", "ranges": (0, np.nan)}, "infinite, NaN or reversed limits"),
    ],
)
def test_integers_that_mean_something_else_are_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_vectors(given, **options)


def test_integers_are_refused_wherever_vectors_are_taken() -> None:
    packed, new = np.packbits(rows(60, 64) > 0, axis=1), rows(60, 5)
    signs = read_vectors(packed, quantization="binary")
    made = fit_embedding_map(signs, new, ids=range(60), map="ridge", direction="index", progress=False)
    assert made.in_features == 64
    for take in (
        lambda: fit_embedding_map(packed, new, map="ridge", progress=False),
        lambda: check_pairs(packed, new),
        lambda: check_vectors(packed),
        lambda: exact_search(packed, packed, 2),
        lambda: evaluate_retrieval(made, packed, new, packed, new, k=1),
        lambda: monitor(made, packed, new),
        lambda: rows_first(packed, 3),
        lambda: encode(lambda texts: packed[: len(texts)], ["a"]),
        lambda: EmbeddingMap.of(LinearStitch(8, 5))(packed),
    ):
        with pytest.raises(ValueError, match=r"must be floating point, got uint8 without a quantization"):
            take()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["[0.1, 0.2]"], "got str, e.g. '.0.1, 0.2.'; parse rows with json.loads, or register"),
        ([b"abcd"], "got bytes, .*np.frombuffer"),
        ([{"id": 1, "v": [1.0]}], "got dict, .* one of id, v$"),
        ({"id": [1], "v": [[1.0]]}, "vectors must be one column, got id, v; pass one"),
        ([[1.0], None], "vectors have 1 empty rows, e.g. row 1; remove them"),
        ([object()], "got object, .*pass lists of numbers"),
        (iter(["[1]"]), "got str"),
        (Row(np.ones(3)), r"got >f4 of shape \(3,\)"),
        (3.0, "got a float: pass rows"),
        ([Row(np.ones(3)), Row(np.ones(2))], r"must have the same shape, got \[\(2,\), \(3,\)\]"),
        (np.ones(3), "shape"),
        (np.ones((0, 3)), "empty"),
        ([["a", "b"]], "numbers"),
        ([[1.0], [1.0, 2.0]], "same shape"),
        (iter([]), "empty"),
        (iter([np.ones((1, 2)), np.ones((1, 3))]), "same width"),
    ],
)
def test_what_is_no_matrix_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_vectors(given)


def test_rows_that_do_not_correspond_are_refused() -> None:
    old = rows(200, 8)
    new = old @ rows(8, 6, 1)
    ids = [f"document {row}" for row in range(200)]
    check_pairs(old, new)
    check_pairs(old, new, ids=ids)
    check_pairs(old, new, ids=(ids, ids))
    with pytest.raises(ValueError, match="sort both sides by id"):
        check_pairs(old, new, ids=(ids, ids[::-1]))
    with pytest.raises(ValueError, match="keep the ids"):
        check_pairs(old, new, ids=(ids, [*ids[:-1], "other"]))
    with pytest.raises(ValueError, match="must be unique"):
        check_pairs(old, new, ids=["same"] * 200)
    with pytest.raises(ValueError, match="got 199"):
        check_pairs(old, new, ids=ids[1:])
    for wrong in (np.roll(new, 1, axis=0), new[np.random.default_rng(2).permutation(200)]):
        with pytest.raises(ValueError, match="do not correspond"):
            check_pairs(old, wrong)


def test_one_sided_normalisation_is_detected() -> None:
    old, new = normalized(rows(100, 6)), 3 * rows(100, 6)
    with pytest.warns(UserWarning, match="only the old vectors"):
        check_pairs(old, new)
    for metric in ("dot", "l2"):
        with pytest.raises(ValueError, match="depends on lengths"):
            check_pairs(old, new, metric=metric)  # type: ignore[arg-type]


def test_zero_rows_matter_only_to_cosine() -> None:
    old = rows(50, 4)
    old[7] = 0
    with pytest.raises(ValueError, match=r"only zeros.*7"):
        check_pairs(old, old)
    check_pairs(old, old, metric="dot")
    with pytest.raises(ValueError, match="metric must be"):
        check_pairs(old, old, metric="jaccard")  # type: ignore[arg-type]


class Flaky:
    """A remote API that fails at given calls."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.calls = failing, 0

    def __call__(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        if self.calls in self.failing:
            raise ConnectionError("503")
        return [[len(text), 1.0] for text in texts]


def test_failed_calls_are_repeated() -> None:
    encoder = RemoteEncoder(Flaky(1, 2), batch_size=2, wait=0)
    assert encode(encoder, ["a", "bb", "ccc"])[:, 0].tolist() == [1, 2, 3]


def test_a_run_that_fails_midway_continues_from_its_cache(tmp_path: Path) -> None:
    texts = [str(number) for number in range(10)]
    broken = RemoteEncoder(Flaky(*range(3, 99)), batch_size=2, retries=1, wait=0, cache=tmp_path, name="a")
    with pytest.raises(RuntimeError, match=r"texts 4 to 5 of 10 failed 2 times.*rerun"):
        broken.encode(texts)
    assert len(list(tmp_path.iterdir())) == 2
    working = Flaky()
    assert len(RemoteEncoder(working, batch_size=2, cache=tmp_path, name="a").encode(texts)) == 10
    assert working.calls == 3


def test_the_cost_limit_holds() -> None:
    function = Flaky()
    encoder = RemoteEncoder(function, batch_size=1, cost_per_character=1.0, cost_limit=2.5)
    with pytest.raises(CostLimitError, match="raise cost_limit"):
        encoder.encode(["a", "b", "c"])
    assert function.calls == 2
    assert encoder.spent == 2


def test_an_encoder_that_drops_texts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one vector per text .2., got 1"):
        encode(lambda texts: [[1.0, 2.0]], ["a", "b"])


def test_a_network_is_an_encoder() -> None:
    import hf_stitch

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
    samples = torch.randn(5, 4)
    found = NetworkEncoder(adapter, "0").encode(list(samples))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, net[0](samples).detach().numpy(), atol=1e-6)


def test_a_cache_belongs_to_one_encoder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`cache` requires `name`"):
        RemoteEncoder(lambda texts: [[1.0]] * len(texts), cache=tmp_path)
    one, other = (
        RemoteEncoder(lambda texts, value=value: [[value]] * len(texts), cache=tmp_path, name=name)
        for name, value in (("a", 1.0), ("b", 2.0))
    )
    assert one.encode(["x"]).tolist() == [[1.0]] and other.encode(["x"]).tolist() == [[2.0]]
    with pytest.raises(ValueError, match="texts must not be empty"):
        one.encode([])


def test_documents_and_queries_have_their_prompts(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(("[UNK]", *"abcqd"))}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    encoder = library.SentenceTransformer(
        modules=[modules.StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu",
        prompts={"query": "q ", "passage": "d d "}, default_prompt_name="query",
    )  # fmt: skip
    texts = ["a b", "c", "b b a"]
    np.testing.assert_array_equal(encode(encoder, texts), encoder.encode_document(texts))
    np.testing.assert_array_equal(encode(encoder, texts, queries=True), encoder.encode_query(texts))
    assert np.abs(encoder.encode_document(texts) - encoder.encode_query(texts)).max() > 0.1
