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

_MODULES: dict[tuple[Path, str], ModuleType] = {}
"""Path and hash of files that have run -> module."""

_FOLDERS: dict[str, Path] = {}
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
    """Return the name that results show for a network: for files and folders, the shortest distinct path."""
    arguments = [re.sub(r"^--[\w-]+=", "", argument) for argument in GIVEN.get()]
    paths = [argument for argument in (*arguments, name) if is_function(argument) or Path(argument).is_absolute()]
    absolute_paths = {argument: os.path.abspath(Path(argument).expanduser()) for argument in paths}
    return short_names(absolute_paths.values())[absolute_paths[name]] if name in absolute_paths else name


def network_of(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run the function in a file, and return arguments of :func:`hf_stitch.load`: the network, and a processor."""
    if options:
        raise typer.BadParameter(
            f"does not apply to {shown(name)}; set it in the function",
            param_hint=", ".join("--random" if option == "pretrained" else f"--{option}" for option in options),
        )
    file, _, function_name = name.rpartition(":")
    path, name = Path(file).expanduser().resolve(), shown(name)
    if not path.is_file():
        raise FileNotFoundError(f"no file {file!r}; pass a Python file and a function in it, for example mine.py:small")
    with _importing_from(path.parent):
        module = _module(path)
        network = _call(vars(module), function_name, name, path)
    processor_option: dict[str, Any] = {}
    if isinstance(network, tuple) and len(network) == 2:
        network, processor_option = network[0], {"processor": network[1]}
    if network is None or isinstance(network, (tuple, str, os.PathLike)):
        description = f"a tuple of {len(network)}" if isinstance(network, tuple) else visible(repr(network))
        raise ValueError(f"{name} must return {RETURNS}, got {description}")
    return network, processor_option


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
    for name in [name for name, owner in _FOLDERS.items() if owner != folder]:
        sys.modules.pop(name, None)
        del _FOLDERS[name]
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in {*sys.modules} - before:
            module, module_path = sys.modules[name], folder.joinpath(*name.split("."))
            locations = {getattr(module, "__file__", None), *getattr(module, "__path__", ())}
            if locations & {f"{module_path}.py", str(module_path)}:
                _FOLDERS[name] = folder


def _module(path: Path) -> ModuleType:
    """Run a file, once for each version of its content."""
    code = path.read_bytes()
    key = path, hashlib.sha256(code).hexdigest()
    if key not in _MODULES:
        name = "hf_stitch_file_" + re.sub(r"\W", "_", path.stem)
        while name in sys.modules and sys.modules[name].__file__ != str(path):
            name += "_"
        try:
            _MODULES[key] = run_file(name, path, code)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{path.name} could not be run: {_error_text(error, path)}") from error
    return _MODULES[key]


def _call(namespace: dict[str, Any], function_name: str, name: str, path: Path) -> Any:
    function = namespace.get(function_name)
    if function_name not in namespace:
        functions = {key: member for key, member in namespace.items() if inspect.isfunction(member)}
        defined = [key for key, member in functions.items() if member.__globals__ is namespace]
        near = did_you_mean(function_name, defined)
        raise ValueError(
            f"{path.name} does not define a function {function_name!r}"
            + (f"; did you mean {near!r}?" if near else f"; it defines {', '.join(defined) or 'none'}.")
            + f" Define a function without arguments that returns {RETURNS}"
        )
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        raise ValueError(
            f"{name} must be a function, got an object of type {type(function).__name__}; define a function without "
            f"arguments that returns {RETURNS}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function without arguments, got {function_name}{inspect.signature(function)}; pass a "
            "function that calls it with its arguments"
        ) from error
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} raised an error: {_error_text(error, path)}") from error


def _error_text(error: BaseException, path: Path) -> str:
    """Return an error from a file as text, with the last line of the file in its traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    location = f" ({path.name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{location}. See the traceback with hf-stitch --debug"
