"""LanceDB tables: the switch, indexes, changes by others, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, upgrade

from hf_stitch.stitches import LinearStitch

lancedb = pytest.importorskip("lancedb")
pyarrow = pytest.importorskip("pyarrow")
from hf_stitch_embeddings.stores.lancedb import LanceStore  # noqa: E402
from hf_stitch_embeddings.upgrading import fingerprint  # noqa: E402

ROWS, WIDTH = 400, 8
VECTORS = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
WEIGHT = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
MAP = EmbeddingMap.of(LinearStitch.of(weight=WEIGHT))


def lists(vectors: np.ndarray) -> Any:
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), vectors.shape[1])


def table_in(folder: Path, **columns: Any) -> Any:
    given = {"id": list(range(ROWS)), "vector": lists(VECTORS)} | columns
    return lancedb.connect(str(folder)).create_table("docs", pyarrow.table(given))


def test_queries_stay_as_they_are(tmp_path: Path) -> None:
    table_in(tmp_path)
    done = upgrade(LanceStore(str(tmp_path), "docs"), MAP, progress=False)
    table = lancedb.connect(str(tmp_path)).open_table("docs")
    found = table.search(MAP(VECTORS[7:8])[0]).limit(1).to_list()[0]
    assert (found["id"], found["_distance"]) == (7, pytest.approx(0, abs=1e-6))
    version = int(done.sentence.rpartition("restore(")[2].partition(")")[0])
    table.restore(version)
    assert table.search(VECTORS[7]).limit(1).to_list()[0]["id"] == 7


def test_equal_widths_need_queries_that_name_the_column(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    square = EmbeddingMap.of(LinearStitch.of(weight=WEIGHT[:WIDTH]))
    with pytest.warns(UserWarning, match="vector_column_name='vector'"):
        upgrade(LanceStore(str(tmp_path), "docs"), square, progress=False)
    table.checkout_latest()
    query = square(VECTORS[7:8])[0]
    with pytest.raises(ValueError, match="more than one vector column"):
        table.search(query)
    assert table.search(query, vector_column_name="vector").limit(1).to_list()[0]["id"] == 7
    table.drop_columns([next(name for name in table.schema.names if "before" in name)])
    assert table.search(query).limit(1).to_list()[0]["id"] == 7


@pytest.mark.filterwarnings("ignore:.*two columns of vectors")
def test_a_second_run_maps_nothing_twice(tmp_path: Path) -> None:
    table_in(tmp_path)
    square = EmbeddingMap.of(LinearStitch.of(weight=WEIGHT[:WIDTH]))
    upgrade(LanceStore(str(tmp_path), "docs"), square, progress=False)
    with pytest.raises(ValueError, match="is already upgraded"):
        upgrade(LanceStore(str(tmp_path), "docs"), square, progress=False)
    other = EmbeddingMap.of(LinearStitch.of(weight=WEIGHT[WIDTH:]))
    with pytest.raises(ValueError, match="is already upgraded"):
        upgrade(LanceStore(str(tmp_path), "docs"), other, progress=False)


def test_a_second_run_with_a_map_to_another_width(tmp_path: Path) -> None:
    table_in(tmp_path)
    upgrade(LanceStore(str(tmp_path), "docs"), MAP, progress=False)
    with pytest.raises(ValueError, match="is already upgraded"):  # not that widths differ
        upgrade(LanceStore(str(tmp_path), "docs"), MAP, progress=False)


def test_a_column_of_another_width_in_the_place_of_the_new_vectors(tmp_path: Path) -> None:
    fresh = f"vector_{fingerprint(MAP)}"
    table_in(tmp_path).add_columns(pyarrow.schema([pyarrow.field(fresh, pyarrow.list_(pyarrow.float32(), 3))]))
    with pytest.raises(
        ValueError, match=rf"{fresh}' of LanceDB table docs must hold vectors of width 16, got .*drop it"
    ):
        upgrade(LanceStore(str(tmp_path), "docs"), MAP, progress=False)


def test_a_table_that_is_replaced_meanwhile_by_one_of_another_width(tmp_path: Path) -> None:
    table_in(tmp_path)
    store = LanceStore(str(tmp_path), "docs")
    write = store.write

    def replaced(ids: Any, vectors: Any) -> None:
        other = pyarrow.table({"id": [0], "vector": lists(VECTORS[:1, :3])})
        lancedb.connect(str(tmp_path)).create_table("docs", other, mode="overwrite")
        write(ids, vectors)

    store.write = replaced  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"LanceDB table docs could not be written .* stop other writers, and rerun"):
        upgrade(store, MAP, progress=False)


@pytest.mark.parametrize("kind", ["IvfFlat", "IvfPq", "HnswSq"])
def test_an_index_is_built_for_the_new_vectors(kind: str, tmp_path: Path) -> None:
    index = getattr(lancedb.index, kind)(distance_type="cosine")
    table = table_in(tmp_path)
    table.create_index("vector", config=index)
    store = LanceStore(str(tmp_path), "docs")
    assert store.describe().metrics == ("cosine",)
    upgrade(store, MAP, progress=False)
    table.checkout_latest()
    kinds = {each.columns[0]: (each.index_type, each.num_indexed_rows) for each in table.list_indices()}
    old = next(name for name in kinds if name != "vector")
    assert kinds["vector"] == (kinds[old][0], ROWS)
    assert store.search(MAP(VECTORS[:3]), 5)[0][0] == 0


@pytest.mark.parametrize(
    ("kind", "options", "lost"),
    [
        ("IvfPq", {"num_sub_vectors": 4, "num_partitions": 1}, "num_partitions"),
        ("IvfPq", {"num_sub_vectors": 8, "num_partitions": 1}, "num_partitions and num_sub_vectors=8"),
        ("HnswSq", {"m": 12, "ef_construction": 77, "num_partitions": 1}, "num_partitions"),
        ("HnswPq", {"m": 9, "ef_construction": 77, "num_sub_vectors": 2, "num_partitions": 1}, "num_partitions"),
    ],
)
def test_the_new_index_has_the_settings_of_the_old_one(
    kind: str, options: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    table = table_in(tmp_path)
    table.create_index("vector", config=getattr(lancedb.index, kind)(distance_type="cosine", **options))
    narrow = EmbeddingMap.of(LinearStitch.of(weight=WEIGHT[:12]))
    done = upgrade(LanceStore(str(tmp_path), "docs"), narrow, progress=False)
    assert f"the settings of the old one, except {lost} with LanceDB's defaults" in done.sentence
    table.checkout_latest()
    new, old = sorted(table.list_indices(), key=lambda each: each.columns != ["vector"])
    if "sub" not in lost:
        for part in ("compression", "hnsw"):
            assert new.index_details.get(part) == old.index_details.get(part)


def test_half_precision_stays_and_integers_are_named(tmp_path: Path) -> None:
    half = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(VECTORS.ravel()).cast(pyarrow.float16()), WIDTH)
    table = table_in(tmp_path / "half", vector=half)
    upgrade(LanceStore(str(tmp_path / "half"), "docs"), MAP, progress=False)
    table.checkout_latest()
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float16(), 2 * WIDTH)
    packed = np.packbits(VECTORS > 0, axis=1)
    bits = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(packed.ravel()), 1)
    table = table_in(tmp_path / "bits", vector=bits)
    with pytest.raises(ValueError, match=r"column 'vector' of LanceDB table docs must be floating point, got uint8"):
        upgrade(LanceStore(str(tmp_path / "bits"), "docs"), MAP, progress=False)
    upgrade(LanceStore(str(tmp_path / "bits"), "docs", quantization="binary"), MAP, progress=False)
    wanted = MAP(np.where(VECTORS > 0, 1, -1).astype(np.float32))
    np.testing.assert_allclose(LanceStore(str(tmp_path / "bits"), "docs").vectors([3]), wanted[3:4], atol=1e-6)


def test_rows_that_are_added_meanwhile_are_mapped_too(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    store = LanceStore(str(tmp_path), "docs")
    write, added = store.write, [False]

    def written(ids: Any, vectors: Any) -> None:
        write(ids, vectors)
        if not added[0]:
            added[0] = True
            table.checkout_latest()
            table.add([{"id": 9000, "vector": np.ones(WIDTH, np.float32)}])

    store.write = written  # type: ignore[method-assign]
    done = upgrade(store, MAP, batch_size=100, progress=False)
    assert done.rows == done.mapped == ROWS + 1
    np.testing.assert_allclose(store.vectors([9000]), MAP(np.ones((1, WIDTH))), atol=1e-6)


def test_old_vectors_that_change_after_they_were_mapped(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    store = LanceStore(str(tmp_path), "docs")
    write, changed = store.write, [False]

    def written(ids: Any, vectors: Any) -> None:
        write(ids, vectors)
        if not changed[0]:
            changed[0] = True
            table.checkout_latest()
            table.update(where=f"id = {ids[0]}", values={"vector": [1.0] * WIDTH})

    store.write = written  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="1 of 400 verified rows"):  # all are compared, although 10 were asked for
        upgrade(store, MAP, batch_size=100, verify=10, progress=False)


@pytest.mark.parametrize(
    "columns, options, message",
    [
        ({"id": [1] * ROWS}, {}, "more than once"),
        ({"id": [None, *range(1, ROWS)]}, {}, "an empty id"),
        ({}, {"column": "embedding"}, "have a column 'embedding', got: id, vector"),
        ({}, {"id_column": "key"}, "have a column 'key'"),
        ({"text": ["a"] * ROWS}, {"column": "text"}, "vectors of equal width"),
        ({}, {"table": "pages"}, "LanceDB table 'pages' does not exist .*tables: docs"),
    ],
)
def test_bad_input(columns: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    table_in(tmp_path, **columns)
    before = lancedb.connect(str(tmp_path)).open_table("docs").version
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        upgrade(LanceStore(str(tmp_path), **{"table": "docs", **options}), MAP, progress=False)
    assert lancedb.connect(str(tmp_path)).open_table("docs").version == before


def test_rows_without_vectors(tmp_path: Path) -> None:
    kind = pyarrow.list_(pyarrow.float32(), WIDTH)
    given = pyarrow.table({"id": range(ROWS), "vector": pyarrow.array([None, *VECTORS[1:].tolist()], kind)})
    lancedb.connect(str(tmp_path)).create_table("docs", given, on_bad_vectors="null")
    with pytest.raises(ValueError, match="1 rows of LanceDB table docs lack a vector"):
        LanceStore(str(tmp_path), "docs").describe()


def test_ids_with_quotes(tmp_path: Path) -> None:
    names = [f"it's {number}" for number in range(ROWS)]
    table_in(tmp_path, id=names)
    store = LanceStore(str(tmp_path), "docs")
    upgrade(store, MAP, progress=False)
    np.testing.assert_allclose(store.vectors(["it's 3"]), MAP(VECTORS[3:4]), atol=1e-6)
    with pytest.raises(ValueError, match="id 'nobody' does not exist"):
        store.vectors(["nobody"])


def test_old_vectors_are_not_replaced(tmp_path: Path) -> None:
    table_in(tmp_path)
    with pytest.raises(ValueError, match="requires an upgraded table"):
        LanceStore(str(tmp_path), "docs").replace([1], VECTORS[:1])


@pytest.mark.parametrize("moment", ["_build_index", "_rename"])
def test_rows_that_are_added_at_the_switch(tmp_path: Path, moment: str) -> None:
    """They have no new vector, and would not be found any more."""
    table = table_in(tmp_path)
    table.create_index("vector", config=lancedb.index.IvfFlat(distance_type="cosine"))
    store = LanceStore(str(tmp_path), "docs")
    called, added = getattr(store, moment), [False]

    def late(*arguments: Any) -> None:
        if not added[0]:
            added[0] = True
            table.checkout_latest()
            table.add([{"id": 9000, "vector": np.ones(WIDTH, np.float32)}])
            store._table.checkout_latest()
        called(*arguments)

    setattr(store, moment, late)
    with pytest.raises(ValueError, match="rerun"):
        upgrade(store, MAP, progress=False)
    names = lancedb.connect(str(tmp_path)).open_table("docs").schema.names
    assert not any("before" in name for name in names)
    assert upgrade(LanceStore(str(tmp_path), "docs"), MAP, progress=False).mapped == 1
