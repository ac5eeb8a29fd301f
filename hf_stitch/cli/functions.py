"""Networks of user code on the command line: ``mine.py:small``, a function of a Python file that returns one.

Only names that somebody types are run. Names in records go to :func:`hf_stitch.load`, which refuses them.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from hf_stitch.cli.signatures import GIVEN
from hf_stitch.options import did_you_mean
from hf_stitch.plugins import run_file
from hf_stitch.printing import visible
from hf_stitch.reference import FUNCTION, short_names

if TYPE_CHECKING:
    from hf_stitch.adapters import Adapter

RETURNS = "the network (an nn.Module), (network, processor), or the result of hf_stitch.load(network, …)"

_RUN: dict[tuple[Path, str], ModuleType] = {}
"""Path and hash of the files that have run -> module."""

_BESIDE: dict[str, Path] = {}
"""Modules that files have imported from their folder -> the folder."""


def is_function(name: str) -> bool:
    """Return whether a name is that of a function of a file, as ``mine.py:small``."""
    return FUNCTION.fullmatch(name) is not None and not Path(name).is_dir()


def check_artefact(name: str, argument: str) -> None:
    """Check that a name is not that of a function of a file, where a stitched model or a stitcher is expected."""
    if is_function(name):
        raise typer.BadParameter(
            f"{shown(name)} is a network, and a stitched model or a stitcher is expected; hf-stitch layers and doctor "
            "describe networks",
            param_hint=argument,
        )


def shown(name: str) -> str:
    """Return the name of a network in results: that of a file or folder without its path, as far as it tells apart."""
    given = [re.sub(r"^--[\w-]+=", "", each) for each in GIVEN.get()]
    paths = [each for each in (*given, name) if is_function(each) or Path(each).is_absolute()]
    places = {each: os.path.abspath(Path(each).expanduser()) for each in paths}
    return short_names(places.values())[places[name]] if name in places else name


def network_of(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run the function of a file, and return what :func:`hf_stitch.load` takes: the network, and a processor."""
    if options:
        raise typer.BadParameter(
            f"{shown(name)} makes its network itself: do this in the function",
            param_hint=", ".join("--random" if option == "pretrained" else f"--{option}" for option in options),
        )
    file, _, function = name.rpartition(":")
    place, name = Path(file).expanduser().resolve(), shown(name)
    if not place.is_file():
        raise FileNotFoundError(f"no file {file!r}: name a Python file and a function in it, as mine.py:small")
    with _importing_from(place.parent):
        module = _module(place)
        made = _called(vars(module), function, name, place)
    processor: dict[str, Any] = {}
    if isinstance(made, tuple) and len(made) == 2:
        made, processor = made[0], {"processor": made[1]}
    if made is None or isinstance(made, (tuple, str, os.PathLike)):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else visible(repr(made))
        raise ValueError(f"{name} must return {RETURNS}; it returned {what}")
    return made, processor


def load(name: str, task: str | None, options: dict[str, Any]) -> Adapter:
    """Load the network that a function of a file returns, under the name of the function: see :func:`network_of`."""
    import hf_stitch

    made, processor = network_of(name, options)
    try:
        adapter = hf_stitch.load(made, task=task, **processor)
    except TypeError as error:
        raise ValueError(f"{shown(name)} must return {RETURNS}: {error}") from error
    except ValueError as error:
        raise ValueError(f"the network of {shown(name)} cannot be loaded: {error}") from error
    if adapter.reference.id is None:
        adapter.reference = replace(adapter.reference, summary=shown(name))
    return adapter


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let a file import what is beside it, before anything else of the same name as long as it runs, and after.

    What other files have imported from beside them is forgotten, because it may have the same names.
    """
    for name in [name for name, other in _BESIDE.items() if other != folder]:
        sys.modules.pop(name, None)
        del _BESIDE[name]
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in {*sys.modules} - before:
            module, place = sys.modules[name], folder.joinpath(*name.split("."))
            found = {getattr(module, "__file__", None), *getattr(module, "__path__", ())}
            if found & {f"{place}.py", str(place)}:
                _BESIDE[name] = folder


def _module(place: Path) -> ModuleType:
    """Run a file, once as long as it does not change."""
    code = place.read_bytes()
    key = place, hashlib.sha256(code).hexdigest()
    if key not in _RUN:
        name = "hf_stitch_file_" + re.sub(r"\W", "_", place.stem)
        while name in sys.modules and sys.modules[name].__file__ != str(place):
            name += "_"
        try:
            _RUN[key] = run_file(name, place, code)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{place.name} could not be run: {_described(error, place)}") from error
    return _RUN[key]


def _called(module: dict[str, Any], function: str, name: str, place: Path) -> Any:
    found = module.get(function)
    if function not in module:
        own = [key for key, each in module.items() if inspect.isfunction(each) and each.__globals__ is module]
        near = did_you_mean(function, own)
        raise ValueError(
            f"{place.name} has no function {function!r}"
            + (f"; did you mean {near!r}?" if near else f"; it has {', '.join(own) or 'none'}.")
            + f" Define one that takes no arguments and returns {RETURNS}"
        )
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        raise ValueError(
            f"{name} must be a function, got an object of type {type(found).__name__}: define one that takes no "
            f"arguments and returns {RETURNS}"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function without arguments, got {function}{inspect.signature(found)}: define one that "
            "calls it with its arguments, and name that"
        ) from error
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised an error: {_described(error, place)}") from error


def _described(error: BaseException, place: Path) -> str:
    """Return an error of a file, with the last line of the file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(place)]
    where = f" ({place.name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}. See the traceback with hf-stitch --debug"
