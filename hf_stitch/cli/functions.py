"""Networks of user code on the command line: ``mine.py:small`` is a function in a Python file that returns a network.

Only names on the command line are run. Names in records are passed to :func:`hf_stitch.load`, which rejects them.
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
"""Path and hash of files that have run -> module."""

_BESIDE: dict[str, Path] = {}
"""Modules that files have imported from their own folder -> the folder."""


def is_function(name: str) -> bool:
    """Return whether a name refers to a function in a file, for example ``mine.py:small``."""
    return FUNCTION.fullmatch(name) is not None and not Path(name).is_dir()


def check_artefact(name: str, argument: str) -> None:
    """Raise an error if a name refers to a function in a file instead of a stitched model or a stitcher."""
    if is_function(name):
        raise typer.BadParameter(
            f"must be a stitched model or a stitcher, got the network {shown(name)}; use hf-stitch layers or doctor "
            "for networks",
            param_hint=argument,
        )


def shown(name: str) -> str:
    """Return the name of a network in results; files and folders have the shortest distinct path."""
    arguments = [re.sub(r"^--[\w-]+=", "", argument) for argument in GIVEN.get()]
    paths = [argument for argument in (*arguments, name) if is_function(argument) or Path(argument).is_absolute()]
    places = {argument: os.path.abspath(Path(argument).expanduser()) for argument in paths}
    return short_names(places.values())[places[name]] if name in places else name


def network_of(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run the function in a file, and return arguments of :func:`hf_stitch.load`: the network, and a processor."""
    if options:
        raise typer.BadParameter(
            f"does not apply to {shown(name)}; set it in the function",
            param_hint=", ".join("--random" if option == "pretrained" else f"--{option}" for option in options),
        )
    file, _, function = name.rpartition(":")
    place, name = Path(file).expanduser().resolve(), shown(name)
    if not place.is_file():
        raise FileNotFoundError(f"no file {file!r}; pass a Python file and a function in it, for example mine.py:small")
    with _importing_from(place.parent):
        module = _module(place)
        network = _call(vars(module), function, name, place)
    processor: dict[str, Any] = {}
    if isinstance(network, tuple) and len(network) == 2:
        network, processor = network[0], {"processor": network[1]}
    if network is None or isinstance(network, (tuple, str, os.PathLike)):
        description = f"a tuple of {len(network)}" if isinstance(network, tuple) else visible(repr(network))
        raise ValueError(f"{name} must return {RETURNS}, got {description}")
    return network, processor


def load(name: str, task: str | None, options: dict[str, Any]) -> Adapter:
    """Load the network that a function in a file returns, under the name of the function (:func:`network_of`)."""
    import hf_stitch

    network, processor = network_of(name, options)
    try:
        adapter = hf_stitch.load(network, task=task, **processor)
    except TypeError as error:
        raise ValueError(f"{shown(name)} must return {RETURNS}: {error}") from error
    except ValueError as error:
        raise ValueError(f"the network of {shown(name)} cannot be loaded: {error}") from error
    if adapter.reference.id is None:
        adapter.reference = replace(adapter.reference, summary=shown(name))
    return adapter


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let a file import modules from its folder, with priority over other modules while it runs.

    Modules that other files have imported from their folders are dropped, because names may collide.
    """
    for name in [name for name, owner in _BESIDE.items() if owner != folder]:
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
            locations = {getattr(module, "__file__", None), *getattr(module, "__path__", ())}
            if locations & {f"{place}.py", str(place)}:
                _BESIDE[name] = folder


def _module(place: Path) -> ModuleType:
    """Run a file, once for each version of its content."""
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


def _call(module: dict[str, Any], function: str, name: str, place: Path) -> Any:
    target = module.get(function)
    if function not in module:
        defined = [key for key, member in module.items() if inspect.isfunction(member) and member.__globals__ is module]
        near = did_you_mean(function, defined)
        raise ValueError(
            f"{place.name} does not define a function {function!r}"
            + (f"; did you mean {near!r}?" if near else f"; it defines {', '.join(defined) or 'none'}.")
            + f" Define a function without arguments that returns {RETURNS}"
        )
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        raise ValueError(
            f"{name} must be a function, got an object of type {type(target).__name__}; define a function without "
            f"arguments that returns {RETURNS}"
        )
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function without arguments, got {function}{inspect.signature(target)}; pass a function "
            "that calls it with its arguments"
        ) from error
    try:
        return target()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised an error: {_described(error, place)}") from error


def _described(error: BaseException, place: Path) -> str:
    """Return an error from a file as text, with the last line of the file in its traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(place)]
    where = f" ({place.name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}. See the traceback with hf-stitch --debug"
