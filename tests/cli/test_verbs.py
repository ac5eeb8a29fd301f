"""Commands from verbs: a parameter of the verb is an option of its command, without a line about it anywhere else."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import command_of
from hf_stitch.cli.verbs import Job, command
from hf_stitch.registry import registries

VERBS = {
    "compare": hf_stitch.compare, "stitch": hf_stitch.stitch, "grid": hf_stitch.stitch_grid, "swap": hf_stitch.swap,
    "evaluate": hf_stitch.evaluate, "audit": hf_stitch.audit,
}  # fmt: skip
READ = {"--data", "--data-dir", "--split", "--label", "--text", "--text-pair", "--image", "--batch-size"}
RUN = {"--device", "--dtype"}
SHARED = {*READ, *RUN, "--out", "--report", "--json", "--plan"}
ONLY_IN_PYTHON = {"baselines", "paired_anchors", "options"}
UPWARDS = typing.Literal["up", "down"]
VERB = '''
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Unpack
from hf_stitch.data import Data
from hf_stitch.matchers import Matcher
from hf_stitch.options import Within
from hf_stitch.running import RunOptions
from hf_stitch.workflows._checks import Named, Runs

USUAL = ("mean", "max")

def count(
    network: Runs, data: Data, *, sides: Iterable[str] = USUAL, way: Literal["up", "down"] = "up",
    share: Annotated[float, Within(0, 1)] = 0.5, quick: bool = True, matcher: Named | Matcher = "lstsq",
    inner: dict[str, Any] | None = None, **options: Unpack[RunOptions],
) -> None:
    """Count what ``network`` does.

    Args:
        network: The network (an adapter, a module, or a name).
        data: Samples.
        sides: Sides [of it], as in :func:`hf_stitch.stitch`. They are many.
        way: Where to, with ``quick=False`` too.
        share: The share.
        quick: Whether to hurry.
        matcher: The method: a name.
        inner: What only Python can pass.
        **options: ``seed`` of the run.
    """
'''


def options_of(made: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Return type, description and default of each argument and option."""
    found = {}
    for name, each in inspect.signature(made).parameters.items():
        typed, about = typing.get_args(each.annotation) or (each.annotation, typer.Option())
        named = about.default if isinstance(about.default, str) else None  # typer takes it for the name
        written = named or f"--{name.replace('_', '-')}"
        found[written if isinstance(about, OptionInfo) else name] = (typed, about, each.default)
    return found


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command of the verb above, whose function returns its job."""
    (tmp_path / "verb_of_a_test.py").write_text(VERB)
    monkeypatch.syspath_prepend(tmp_path)

    @command("verb_of_a_test:count", without=["plan"])
    def made(job: Job, more: int = 3) -> None:
        raise ValueError({**job.given, "more": more, "json": job.shared.json})

    return made


def test_parameters_are_options_with_their_types_defaults_and_descriptions(counted: Any) -> None:
    assert "verb_of_a_test" not in sys.modules and counted.__doc__ == "Count what NETWORK does."
    options = options_of(counted)
    assert [*options][:2] == ["network", "--data"]
    assert options.keys() >= {"--side", "--way", "--share", "--quick/--no-quick", "--matcher", "--seed", "--more"}
    assert not options.keys() & {"--inner", "--batch-size", "--plan"}
    assert options["--data"][2] is inspect.Parameter.empty and options["--seed"][::2] == (int, 0)
    assert options["--side"][::2] == (list[str], ["mean", "max"]) and options["--way"][::2] == (UPWARDS, "up")
    assert (options["--share"][1].min, options["--share"][1].max) == (0, 1)
    helps = {name: about.help for name, (_, about, _) in options.items()}
    assert helps["network"].startswith("The network: a Hub id") and helps["--side"] == r"Sides \[of it]. Repeatable."
    assert helps["--way"] == "Where to, with --quick False too."
    assert helps["--matcher"] == "The method: a name, or name:option=value,…; see hf-stitch list matchers."


def test_the_verb_gets_what_is_given(counted: Any) -> None:
    app = typer.Typer()
    app.command()(counted)
    call = ["net", "--data", "d", "--side", "a", "--no-quick", "--matcher", "ridge:ridge=0.5", "--more", "4"]
    (given,) = CliRunner().invoke(app, call).exception.args  # type: ignore[union-attr]
    matcher = registries.matchers.build("ridge:ridge=0.5")
    assert given == {
        "network": "net", "data": "d", "sides": ["a"], "way": "up", "share": 0.5, "quick": False, "matcher": matcher,
        "seed": 0, "more": 4, "json": False,
    }  # fmt: skip
    refused = CliRunner().invoke(app, ["net", "--data", "d", "--matcher", "rigde"])
    assert refused.exit_code == 2 and "did you mean 'ridge'" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["hf_stitch.running:nothing", "no_such_module:nothing"])
def test_a_verb_that_does_not_exist_is_named(verb: str) -> None:
    with pytest.raises((ValueError, ImportError), match=rf"{verb.partition(':')[0]}.*a command must refer to its .*"):
        command(verb)(lambda job: None)


@pytest.mark.parametrize("parameter", ["net: object", "net", "data: object = ()"])
def test_unsupported_parameters_are_refused(parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, name = f"own_verb_{len(parameter)}", parameter.partition(":")[0]
    (tmp_path / f"{verb}.py").write_text(f"def count({parameter}):\n    ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match=rf"the annotation of {name} in .* a network as str \| hf_stitch.Adapter"):
        command(f"{verb}:count")(lambda job: None)
    assert command(f"{verb}:count", without=[name])(lambda job: None)


@pytest.mark.parametrize("name", VERBS)
def test_commands_have_all_options_of_their_verbs(name: str) -> None:
    made: Any = registries.commands.get(name)
    assert isinstance(made, FunctionType) and options_of(made).keys() >= SHARED
    missing = inspect.signature(VERBS[name]).parameters.keys() - typing.get_type_hints(made).keys()
    assert missing <= ONLY_IN_PYTHON | ({"task"} if name in ("evaluate", "audit") else set())
    assert {"batch_size", "seed", "progress"} <= typing.get_type_hints(made).keys()


def test_every_command_that_reads_data_or_runs_networks_takes_their_options() -> None:
    commands = {name: command_of(name).params for name in registries.commands}
    options = {name: {option for each in found for option in each.opts} for name, found in commands.items()}
    reading = {name for name, given in options.items() if "--data" in given}
    assert reading >= VERBS.keys() and not [name for name in reading if not options[name] >= READ | RUN]
    assert options["layers"] >= RUN and options["doctor"] >= RUN


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hf_stitch.cli import app\n"
        f"for call in [[], *([name] for name in {list(VERBS)})]:\n"
        "    shown = CliRunner().invoke(app, [*call, '--help'])\n"
        "    assert not shown.exit_code, shown.output\n"
        "heavy = {'torch', 'transformers', 'timm', 'datasets', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
