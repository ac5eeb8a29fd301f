"""The common tests of transformers on stitched models (``make suites``).

They come with the source distribution of the installed version. It is downloaded once into a cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from filelock import FileLock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from testers import FAMILIES, Family, ModelTester  # noqa: E402 - needs tests/ in the path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf-stitch-tests"
PACKAGE = "tests_of_transformers"
LACKING = {  # files that the source distribution lacks
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}

WRITTEN = ROOT / "docs/reference/suites.md"
PAGE = """# Tests of transformers

<!-- Written by `make suites`. -->

Transformers tests all of its models and configs with a set of common tests. We run the tests of version {version} on
stitched models. A test *applies* if the target (the second network of the stitched model) passes it when tested alone,
in the same run. Transformers skips the remaining tests for this architecture, or they need an accelerator or a package.

| stitched model | apply | pass | fail |
|---|---|---|---|
{rows}

hf-stitch tests generation and pipelines separately, because the source distribution of transformers does not contain
tests for them.

## Why tests fail

{refused}

## Tests that apply

These tests apply to at least one stitched model:

{tests}
"""


def fetched() -> Path:
    """Return the folder with the package of the tests; download it if necessary.

    Raises:
        OSError: If the download fails: without a connection, or without a source distribution of the version.
    """
    folder = CACHE / f"transformers-{transformers.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / PACKAGE).exists():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                _download(Path(place))
                (Path(place) / PACKAGE).rename(folder / PACKAGE)
    return folder


def _download(place: Path) -> None:
    wanted = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"the source distribution of {wanted} cannot be downloaded: {done.stderr.strip()[-300:]}")
    for name, text in LACKING.items():
        (path := place / PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and member.name.split("/")[1:-1] == ["tests"] and member.name.endswith(".py"):
                (place / PACKAGE / Path(member.name).name).write_bytes(files.extractfile(member).read())  # type: ignore[union-attr]


def cases(family: Family, stitched: bool) -> Iterator[unittest.TestCase]:
    """Yield the tests of models and of configs, for a stitched model or for its target alone."""
    if (folder := str(fetched())) not in sys.path:
        sys.path.append(folder)
    common, configs, generation = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("test_modeling_common", "test_configuration_common", "generation.test_utils")
    )
    tester = ModelTester(family, stitched)
    generates = (generation.GenerationTesterMixin,) if tester.model_class.can_generate() else ()
    words = family.names is not FAMILIES["images"].names

    def set_up(self: Any) -> None:
        self.model_tester = tester

    body = {"setUp": set_up, "all_model_classes": (tester.model_class,), "test_resize_embeddings": words}
    models: Any = type("Models", (common.ModelTesterMixin, *generates, unittest.TestCase), body)

    def config_test(name: str) -> Any:
        def run(self: Any) -> None:
            tester = configs.ConfigTester(self, type(self.model_tester.get_config()), words)
            getattr(tester, name)()

        return run

    prefixes = ("create_and_test_", "check_config_")
    found = [name for name in dir(configs.ConfigTester) if name.startswith(prefixes)]
    named = {"test_" + name.removeprefix(prefixes[0]).removeprefix("check_"): config_test(name) for name in found}
    own: Any = type("Configs", (unittest.TestCase,), {"setUp": set_up, **named})
    for kind in (models, own):
        yield from (kind(name) for name in unittest.TestLoader().getTestCaseNames(kind))


def outcomes(family: Family, stitched: bool) -> dict[str, str]:
    """Run all tests: name -> ``"passed"``, or the reason of the failure."""
    listed = {"hf_stitch": type(family.stitched).__name__} if stitched else {}
    found = {}
    with mock.patch.dict(family.names, listed):
        for case in cases(family, stitched):
            case.run(result := unittest.TestResult())
            wrong = [text.strip().splitlines()[-1] for _, text in (*result.failures, *result.errors)]
            skipped = [f"skipped: {why}" for _, why in result.skipped]
            found[case._testMethodName] = next(iter([*wrong, *skipped]), "passed")
    return found


@dataclass(frozen=True)
class Report:
    """Outcomes of the tests of a family: passes of its target that the stitched model fails, with reasons.

    Attributes:
        title: The networks.
        applied: The tests that the target passes.
        failed: Those of them that the stitched model fails, with the outcome.
        reasons: Test -> reason, as in ``reasons.toml``.
    """

    title: str
    applied: list[str]
    failed: dict[str, str]
    reasons: dict[str, str]

    @classmethod
    def of(cls, name: str) -> Report:
        """Run both suites of a family in a separate process, because tests of transformers change settings."""
        command = [sys.executable, __file__, "--family", name]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
        if done.returncode:
            raise RuntimeError(done.stderr)
        alone, stitched = json.loads(done.stdout.splitlines()[-1])
        table = tomllib.loads((Path(__file__).parent / "reasons.toml").read_text("utf-8"))["reason"]
        applied = [test for test, outcome in alone.items() if outcome == "passed"]
        failed = {test: stitched[test] for test in applied if stitched[test] != "passed"}
        return cls(
            FAMILIES[name].title, applied, failed, {test: row["because"] for row in table for test in row.get(name, ())}
        )

    @property
    def wrong(self) -> list[str]:
        """Failed tests without a reason, and reasons for tests that pass."""
        missing = [f"{test} has no reason: {said}" for test, said in self.failed.items() if test not in self.reasons]
        passed = {*self.applied} - self.failed.keys()
        return missing + [f"{test} has a reason and passes" for test in self.reasons if test in passed]


def reports() -> list[Report]:
    """Run the tests of all families, several at a time."""
    fetched()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(Report.of, FAMILIES)]


def page(found: list[Report]) -> str:
    """Return the page of the documentation."""
    counts = [(each.title, len(each.applied), len(each.failed)) for each in found]
    rows = [f"| {title} | {applied} | {applied - failed} | {failed} |" for title, applied, failed in counts]
    refused: dict[str, list[str]] = {}
    for each in found:
        for test in each.failed:
            refused.setdefault(each.reasons.get(test, each.failed[test]), []).append(f"{each.title}: `{test}`")
    lines = [f"- {why}\n" + "".join(f"  - {test}\n" for test in tests) for why, tests in refused.items()]
    return PAGE.format(
        version=transformers.__version__, rows="\n".join(rows), refused="\n".join(lines).rstrip(),
        tests="\n".join(f"- `{test}`" for test in sorted({test for each in found for test in each.applied})),
    )  # fmt: skip


def main() -> int:
    """Run the tests, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, help="run one family, and print its outcomes as JSON")
    if name := parser.parse_args().family:
        transformers.logging.disable_progress_bar()
        print("\n" + json.dumps([outcomes(FAMILIES[name], stitched) for stitched in (False, True)]))
        return 0
    found = reports()
    WRITTEN.write_text(page(found), "utf-8")
    for each in found:
        passed = len(each.applied) - len(each.failed)
        print(f"{each.title}: {passed} of {len(each.applied)} pass", *each.wrong, sep="\n  ")
    return int(any(each.wrong for each in found))


if __name__ == "__main__":
    sys.exit(main())
