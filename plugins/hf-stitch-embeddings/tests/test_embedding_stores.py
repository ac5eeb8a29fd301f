"""Upgrades of every store: values, ids and metadata, interruptions, bad input.

A new store adds a row to ``STORES`` in ``embedding_store_rows.py``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_store_cases import Case
from embedding_store_rows import STORES
from hf_stitch_embeddings import EmbeddingMap, upgrade
from hf_stitch_embeddings.stores import VectorStore

from hf_stitch.stitches import LinearStitch

OLD, NEW, ROWS = 12, 16, 600
IDS = [f"doc-{number}" for number in range(ROWS)]
TEXTS = [f"text {number}" for number in range(ROWS)]


def old_vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, OLD)).astype(np.float32)


def a_map(seed: int = 0, direction: Any = "index", metric: Any = "cosine", width: int = OLD) -> EmbeddingMap:
    weight = torch.randn(NEW, width, generator=torch.Generator().manual_seed(seed))
    return EmbeddingMap.of(LinearStitch.of(weight=weight), direction=direction, metric=metric)


@pytest.fixture(params=list(STORES))
def case(request: pytest.FixtureRequest) -> Case:
    for package in STORES[request.param].needs:
        pytest.importorskip(package)
    return STORES[request.param]


def check_whole(case: Case, folder: Path, embedding_map: EmbeddingMap) -> None:
    """Compare everything in the store with what it must contain."""
    expected = embedding_map(old_vectors())
    found = case.read(folder)
    assert len(found) == ROWS
    for number, (name, text) in enumerate(zip(case.ids(IDS), case.texts(TEXTS), strict=True)):
        vector, kept = found[name]
        assert kept == text
        np.testing.assert_allclose(vector, expected[number], atol=1e-6)


def interrupted_upgrade(store: VectorStore, batches: int, embedding_map: EmbeddingMap) -> None:
    """Upgrade until some batches are written."""
    write, left = store.write, [None] * batches

    def written(ids: Any, vectors: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write(ids, vectors)

    store.write = written  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        upgrade(store, embedding_map, batch_size=100, progress=False)


def test_all_rows_are_mapped(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    with case.open(tmp_path) as store:
        done = upgrade(store, a_map(), batch_size=100, progress=False)
    assert (done.rows, done.mapped, done.verified) == (ROWS, ROWS, ROWS)
    assert done.difference < 1e-6
    check_whole(case, tmp_path, a_map())


def test_an_interrupted_upgrade_is_continued(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    with case.open(tmp_path) as store:
        interrupted_upgrade(store, 2, a_map())
    with case.open(tmp_path) as store:
        done = upgrade(store, a_map(), batch_size=100, progress=False)
    assert done.mapped == ROWS - 200
    check_whole(case, tmp_path, a_map())


@pytest.mark.filterwarnings("ignore:.*of another map")
def test_another_map_does_not_continue_it(case: Case, tmp_path: Path) -> None:
    """The half of the first map stays, or is refused; the rows of both are never mixed."""
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    with case.open(tmp_path) as store:
        interrupted_upgrade(store, 2, a_map())
    try:
        with case.open(tmp_path) as store:
            upgrade(store, a_map(seed=1), batch_size=100, progress=False)
    except ValueError as error:
        assert "another map" in str(error)
    else:
        check_whole(case, tmp_path, a_map(seed=1))


@pytest.mark.parametrize(
    "options, message",
    [({"direction": "query"}, "does not rewrite an index"), ({"width": 9}, "of width 12")],
)
def test_maps_that_do_not_fit(case: Case, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    with case.open(tmp_path) as store, pytest.raises(ValueError, match=message):
        upgrade(store, a_map(**options), progress=False)


def test_a_metric_that_does_not_fit(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    with case.open(tmp_path) as store:
        other = next((metric for metric in ("l2", "dot") if metric not in store.describe().metrics), None)
        if other is None:
            pytest.skip("the store ranks by every metric")
        with pytest.raises(ValueError, match=f"a map for {other}"):
            upgrade(store, a_map(metric=other), progress=False)


def test_zero_vectors(case: Case, tmp_path: Path) -> None:
    vectors = old_vectors()
    vectors[250] = 0
    case.make(tmp_path, IDS, vectors, TEXTS)
    with case.open(tmp_path) as store, pytest.raises(ValueError, match="zero or not finite"):
        upgrade(store, a_map(), batch_size=100, progress=False)


def test_search_and_replacement_afterwards(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    expected = a_map()(old_vectors())
    names = case.ids(IDS)
    with case.open(tmp_path) as store:
        upgrade(store, a_map(), progress=False)
        assert [found[0] for found in store.search(expected[:5], 3)] == names[:5]
        exact = -expected[:2]
        store.replace(names[:2], exact)
        np.testing.assert_allclose(store.vectors(names[:3]), [*exact, expected[2]], atol=1e-6)
        assert [found[0] for found in store.search(exact, 1)] == names[:2]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from embedding_store_rows import STORES
from hf_stitch_embeddings import upgrade
from test_embedding_stores import a_map
with STORES[{name!r}].open(Path({folder!r})) as store:
    write = store.write

    def told(ids, vectors):
        print("writing", flush=True)
        write(ids, vectors)

    store.write = told
    upgrade(store, a_map(), batch_size=10, progress=False)
"""


def killed_upgrade(name: str, folder: Path, seconds: float) -> bool:
    """Run an upgrade in a process that is killed some seconds after its first write; return whether it was."""
    code = CHILD.format(tests=str(Path(__file__).parent), name=name, folder=str(folder))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    ended = child.wait()
    assert ended in (0, -signal.SIGKILL), f"the upgrade failed with {ended}"
    return ended != 0


@pytest.mark.slow
def test_it_survives_kills(case: Case, tmp_path: Path) -> None:
    """Ten kills at random moments; then the upgrade is whole, nothing is lost or doubled."""
    case.make(tmp_path, IDS, old_vectors(), TEXTS)
    name = next(name for name in STORES if STORES[name] is case)
    moments = random.Random(0)
    kills, longest = 0, 0.05
    for _ in range(60):
        killed = killed_upgrade(name, tmp_path, moments.uniform(0, longest))
        kills += killed
        if not killed or case.finished(tmp_path):  # start again: the moments must fall into the work
            check_whole(case, tmp_path, a_map())
            case.remove(tmp_path)
            case.make(tmp_path, IDS, old_vectors(), TEXTS)
        if kills >= 10:
            break
    assert kills >= 10
    if not case.finished(tmp_path):
        with case.open(tmp_path) as store:
            upgrade(store, a_map(), batch_size=10, progress=False)
    check_whole(case, tmp_path, a_map())
