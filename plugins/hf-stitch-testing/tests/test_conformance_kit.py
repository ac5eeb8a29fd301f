"""Checks as a whole and as tests of pytest: ids, expected failures, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import hf_stitch_testing
import pytest
from hf_stitch_testing import check_metric, check_similarity, conformance, parametrize_with_checks

from hf_stitch.metrics._cka import LinearCKA
from hf_stitch.relative.similarities import Lp

RAN: list[str] = []


@conformance
def check_word(word: str, *, longest: int = 9) -> Any:
    """Check a word."""

    def short() -> None:
        RAN.append("short")
        assert len(word) <= longest, f"{word} is too long"

    def plural() -> None:
        RAN.append("plural")
        if not word.endswith("s"):
            raise SkipTest(f"{word} is no plural")

    def lower() -> None:
        RAN.append("lower")
        assert word.islower(), f"{word} must be in lower case"

    yield "short", short
    yield "plural", plural
    yield "lower", lower


@pytest.fixture(autouse=True)
def none_ran() -> None:
    RAN.clear()


def test_a_call_runs_all_parts_in_order_and_passes_over_what_does_not_apply() -> None:
    check_word("stitch")
    assert RAN == ["short", "plural", "lower"]
    with pytest.raises(AssertionError, match="Stitching is too long"):
        check_word("Stitching", longest=3)
    assert RAN[3:] == ["short"]


def test_parts_are_listed_without_running_one() -> None:
    assert [part.name for part in check_word.parts("word")] == ["short", "plural", "lower"]
    assert RAN == []
    check_metric.parts("no_such_metric")  # which is built by the first part that runs


def test_a_check_looks_like_its_function() -> None:
    assert repr(check_word) == "<conformance check_word>"
    assert (check_word.__name__, check_word.__doc__) == ("check_word", "Check a word.")
    assert all(callable(getattr(hf_stitch_testing, name)) for name in hf_stitch_testing.__all__)


@pytest.mark.parametrize(
    ("entry", "options", "shown"),
    [
        ("lp", {}, "lp"),
        ("lp", {"p": 3}, "lp(p=3)"),
        (Lp(p=3), {}, "lp(p=3)"),
        (LinearCKA, {"debiased": True}, "linear_cka(debiased=True)"),
        (LinearCKA(), {}, "linear_cka"),
        (object(), {}, "object"),
        (test_a_check_looks_like_its_function, {}, "test_a_check_looks_like_its_function"),
    ],
)
def test_entries_have_short_names(entry: Any, options: dict[str, Any], shown: str) -> None:
    assert check_metric.parts(entry, **options)[0].entry == shown


def cases(decorate: Any) -> dict[str, tuple[Any, ...]]:
    """The tests that a decorator makes, with their marks."""

    @decorate
    def test(check: Any) -> None:
        check()

    (mark,) = test.pytestmark
    assert mark.args[0] == "check"
    return {case.id: case.marks for case in mark.args[1]}


def test_every_part_is_one_test_with_an_id() -> None:
    found = cases(parametrize_with_checks(check_metric, "linear_cka"))
    assert list(found)[:4] == [f"linear_cka-{part}" for part in ("declarations", "range", "symmetric", "triangle")]
    assert not any(found.values()) and len(found) == 17


def test_expected_failures_are_marked_with_their_reason() -> None:
    reason = "it weights the directions of one side"
    found = cases(parametrize_with_checks(check_metric, "pwcca", expected_failures={"symmetric": reason}))
    (mark,) = found["pwcca-symmetric"]
    assert mark.name == "xfail"
    assert mark.kwargs == {"reason": reason, "raises": AssertionError, "strict": True}
    assert sum(map(len, found.values())) == 1


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"gradeint": "none"}, "'gradeint' of check_similarity; did you mean 'gradient'.* Its parts: config"),
        ({"zzz": "none"}, r"unknown part 'zzz' of check_similarity\. Its parts: config"),
        ({"gradient": " "}, "must have a reason for 'gradient'"),
    ],
)
def test_wrong_expected_failures_are_refused(expected: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parametrize_with_checks(check_similarity, "cosine", expected_failures=expected)


@parametrize_with_checks(check_word, "Stitches", expected_failures={"lower": "it is a name"})
def test_an_expected_failure_is_no_failure(check: Any) -> None:
    check()


def test_an_expected_failure_that_passes_or_raises_another_error_fails(tmp_path: Path) -> None:
    (tmp_path / "test_of_a_kit_alone.py").write_text("""
from hf_stitch_testing import conformance, parametrize_with_checks
from unittest import SkipTest

@conformance
def check(word):
    def skipped():
        raise SkipTest("not for words")
    yield "passes", lambda: None
    yield "raises", lambda: word.no_such_method()
    yield "skipped", skipped

@parametrize_with_checks(check, "a", expected_failures={"passes": "why not", "raises": "why not"})
def test_conforms(check):
    check()
""")

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                found[report.nodeid.partition("[")[2]] = (report.outcome, str(report.longrepr))

    found: dict[str, tuple[str, str]] = {}
    # In this process, of which the plugins are loaded already: another one would take seconds to start.
    without = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "timeout", "faulthandler", "xdist")]
    pytest.main([f"--rootdir={tmp_path}", "--import-mode=importlib", *without, str(tmp_path)], plugins=[Recorder()])
    outcomes = {name: outcome for name, (outcome, _) in found.items()}
    assert outcomes == {"a-passes]": "failed", "a-raises]": "failed", "a-skipped]": "skipped"}
    assert "[XPASS(strict)] why not" in found["a-passes]"][1] and "AttributeError" in found["a-raises]"][1]
    assert "not for words" in found["a-skipped]"][1]


def test_pytest_is_imported_only_by_those_who_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Path(hf_stitch_testing.__file__).parent.rglob("*.py")
    assert not [file for file in files if re.search(r"^(import|from) pytest", file.read_text(), re.MULTILINE)]
    monkeypatch.setitem(sys.modules, "pytest", None)
    check_similarity("cosine")
    with pytest.raises(ImportError, match="pip install pytest"):
        parametrize_with_checks(check_similarity, "cosine")
