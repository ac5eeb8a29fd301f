"""Plugins: entry points of other distributions, with their contracts, and single files.

A distribution adds entries to a registry with entry points in the group ``hf_stitch.<registry>``, and states its
contract, for example in its ``pyproject.toml``::

    [project.entry-points."hf_stitch.matchers"]
    diagonal = "hf_stitch_diagonal:Diagonal"

    [project.entry-points."hf_stitch.contracts"]
    contract = "contract_1"

A file registers its entries when it runs (``registries.matchers.register``). It runs only if it is named, with
:func:`load_plugin` or ``hf-stitch --plugin file.py``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["CONTRACT", "Entry", "FilePlugin", "PluginError", "load_plugin"]

CONTRACT = "contract_1"
"""The current contract of all registries. Its number increases when entries of plugins must be adapted."""

VARIABLE = "HF_STITCH_PLUGINS"
"""Environment variable for plugin files in earlier versions; setting it gives a warning."""


class PluginError(ImportError):
    """Raised if an entry of a plugin cannot be used; ``__cause__`` is the original error, if any."""


def normalized(distribution: str) -> str:
    """Return the normalized name of a distribution, as in package indexes: hyphens and lower case."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True)
class FilePlugin:
    """File that has registered entries.

    Attributes:
        path: The file.
        sha256: Hash of its content, 64 hexadecimal digits.
        undo: Functions that undo its registrations.

    Example:
        >>> FilePlugin(Path("own.py"), "1f2e3d4c" * 8).origin
        'file own.py (sha256 1f2e3d4c)'
    """

    path: Path
    sha256: str
    undo: list[Callable[[], Any]] = field(default_factory=list, compare=False, repr=False)

    @property
    def origin(self) -> str:
        """Name and short hash, for example ``file own.py (sha256 1f2e3d4c)``."""
        return f"file {self.path.name} (sha256 {self.sha256[:8]})"

    def unload(self) -> None:
        """Undo all registrations."""
        _LOADED.pop(self.path, None)
        while self.undo:
            self.undo.pop()()


@dataclass(frozen=True)
class Entry:
    """Entry of a registry with its origin; creating an entry imports nothing.

    Attributes:
        name: Its name.
        source: The class or function, as ``module:attribute``.
        load: Function that imports and returns the class or function. It raises :class:`PluginError` for a broken
            plugin, and for a plugin with another contract.
        about: Function that returns the summary.
        origin: ``built-in``, ``plugin <distribution> <version>``, ``file <name> (sha256 <hash>)`` or ``registered at
            run time``.
        distribution: Name and version of the plugin's distribution; otherwise ``None``.
        file: The file that registered it; otherwise ``None``.
        problem: Reason why it is incompatible with this version of hf-stitch; otherwise empty.

    Example:
        >>> from hf_stitch import registries
        >>> entry = registries.matchers.entry("lstsq")
        >>> entry.origin, entry.source
        ('built-in', 'hf_stitch.matchers.regression:Lstsq')
        >>> entry.summary.partition(",")[0]
        'Least squares: the affine map with minimum squared error'
    """

    name: str
    source: str
    load: Callable[[], Any] = field(repr=False)
    about: Callable[[], str] = field(repr=False)
    origin: str = "built-in"
    distribution: tuple[str, str] | None = None
    file: FilePlugin | None = None
    problem: str = ""

    @classmethod
    def of(cls, name: str, factory: Callable[..., Any], file: FilePlugin | None = None) -> Entry:
        """Describe a class or function registered at run time or by a file."""
        named_object = factory if hasattr(factory, "__qualname__") else type(factory)
        return cls(
            name, f"{named_object.__module__}:{named_object.__qualname__}", lambda: factory,
            about=lambda: first_line(inspect.getdoc(factory)),
            origin="registered at run time" if file is None else file.origin, file=file,
        )  # fmt: skip

    @property
    def summary(self) -> str:
        """The first line of the docstring, or else the summary of the plugin's distribution."""
        return self.about()

    @property
    def provider(self) -> tuple[str, str] | None:
        """The plugin's distribution with its version, or file with its hash; otherwise ``None``."""
        return self.distribution if self.file is None else (self.file.path.name, f"sha256:{self.file.sha256}")


def first_line(docstring: str | None) -> str:
    """Return the first line of a docstring."""
    return (docstring or "").partition("\n")[0]


@cache
def tree_of(module: str) -> ast.Module:
    """Parse the file of a module without importing it."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}: a command must refer to its function as module:function")
    path = Path(spec.origin).parent.joinpath(*inner) if inner else Path(spec.origin)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes())


def docstring_in(source: str) -> str:
    """Read the first line of the docstring of an entry, ``module:attribute``, without importing it.

    A command shares the docstring of its function; a typer app has a help text instead. Empty without a docstring.
    """
    module, _, name = source.partition(":")
    for node in reversed(tree_of(module).body):  # a function follows its overloads
        match node:
            case ast.Assign([ast.Name(target)], ast.Call(keywords=options)) if target == name:
                texts = (option.value for option in options if option.arg == "help")
                return next((str(text.value) for text in texts if isinstance(text, ast.Constant)), "")
            case ast.ClassDef(target) | ast.FunctionDef(target) if target == name:
                for decorator in node.decorator_list:
                    match decorator:
                        case ast.Call(args=[ast.Constant(str(verb))]) if ":" in verb:
                            return docstring_in(verb)
                return first_line(ast.get_docstring(node))
    return ""


def entry_of(kind: str, point: EntryPoint) -> Entry:
    """Describe the registry entry of an entry point."""
    dist = point.dist
    origin = f"plugin {point.value}" if dist is None else f"plugin {dist.name} {dist.version}"
    contracts = () if dist is None else dist.entry_points.select(group="hf_stitch.contracts")
    contract = next((contract_point.value for contract_point in contracts if contract_point.value != CONTRACT), "")
    problem = contract and (
        f"it was built for {contract}, but this hf-stitch has {CONTRACT}; install compatible versions of both"
    )

    def load() -> Any:
        subject = f"{point.name!r} among {kind} comes from the {origin}"
        if problem:
            raise PluginError(f"{subject}, which cannot be used: {problem}")
        try:
            return point.load()
        except Exception as error:
            raise PluginError(
                f"{subject}, which cannot be imported ({point.value}): {type(error).__name__}: {error}. Repair or "
                "uninstall that distribution."
            ) from error

    def about() -> str:
        try:
            summary = docstring_in(point.value)
        except (ImportError, OSError, SyntaxError, ValueError):  # importing the entry reports it
            summary = ""
        return summary or ("" if dist is None else str(dist.metadata.json.get("summary", "")))

    return Entry(
        point.name, point.value, load, about=about,
        origin=origin, distribution=None if dist is None else (dist.name, dist.version), problem=problem,
    )  # fmt: skip


GONE = {
    "commands": {
        "cache": "keep activations with extract_activations(…).save(path), and read them with Activations.load",
        "info": "hf-stitch layers ID_OR_FOLDER shows the parents, recipe and scores",
    },
    "registries": {"networks": "an hf_stitch.adapters.Library builds the networks of a plugin"},
    "results": {"SelfTest": "hf_stitch.selftest.self_test() returns the error of each part"},
}
"""Registry -> removed name -> replacement, for messages."""


def hint_for(kind: str, name: str) -> str:
    """Return a hint for messages about a missing name: its plugin or its replacement."""
    if replacement := GONE.get(kind, {}).get(name):
        return replacement
    plugin = distribution_of(kind, name)
    return f"it comes with {plugin}: pip install {plugin}" if plugin else ""


def distribution_of(kind: str, name: str) -> str:
    """Return the plugin of this project with a name, or for the networks of a package; otherwise empty.

    The plugins are listed in ``distributions.json``; a test keeps it up to date.
    """
    table = json.loads(Path(__file__).with_name("distributions.json").read_text(encoding="utf-8"))
    return next((plugin for plugin, names in table.get(kind, {}).items() if name in names.split()), "")


def plugin_of(*modules: object) -> str:
    """Return a hint on the plugins for networks of the modules' packages; empty without such plugins."""
    packages = {type(module).__module__.partition(".")[0] for module in modules}
    plugins = {package: plugin for package in sorted(packages) if (plugin := distribution_of("packages", package))}
    return "; ".join(f"networks of {package}: pip install {plugins[package]}, see its README" for package in plugins)


def installed(kind: str) -> list[Entry]:
    """Return the registry entries of installed distributions, sorted by name; imports nothing."""
    entries = (entry_of(kind, point) for point in entry_points(group=f"hf_stitch.{kind}"))
    return sorted(entries, key=lambda entry: (entry.name, entry.origin))


RUNNING: ContextVar[FilePlugin | None] = ContextVar("running", default=None)
"""The file that is running and registers its entries; ``None`` outside :func:`load_plugin`."""

_LOADED: dict[Path, FilePlugin] = {}


def load_plugin(path: str | Path) -> FilePlugin:
    """Run a file that registers entries, for example metrics, with ``hf_stitch.registries.metrics.register``.

    Only files that you name run. Results and artefacts record their name and hash. A loaded file runs again only if it
    has changed; its new entries then replace the old entries.

    Args:
        path: A Python file. It can execute any code: load only files that you trust.

    Raises:
        FileNotFoundError: If the file does not exist.
        PluginError: If the file raises an error or registers nothing. Its registrations are then undone.

    Example:
        >>> import tempfile
        >>> from hf_stitch import registries
        >>> code = '''
        ... from hf_stitch import registries
        ... from hf_stitch.relative.selection import Random
        ... registries.anchors.register("own", type("Own", (Random,), {"name": "own"}))
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "own.py").write_text(code)
        ...     plugin = load_plugin(Path(folder, "own.py"))
        >>> registries.anchors.entry("own").origin.partition(" (")[0]
        'file own.py'
        >>> plugin.unload()
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"the plugin {path} is not a file; name a Python file that registers its entries")
    code = file.read_bytes()
    plugin = FilePlugin(file, hashlib.sha256(code).hexdigest())
    if (loaded := _LOADED.get(file)) is not None:
        if loaded == plugin:
            return loaded
        loaded.unload()
    name = f"hf_stitch_plugin_{re.sub(r'[^0-9A-Za-z]', '_', file.stem)}_{plugin.sha256[:8]}"
    if file.suffix != ".py":
        raise PluginError(f"the plugin {file} is not a Python file; its name must end in .py")
    token = RUNNING.set(plugin)
    try:
        run_file(name, file, code)
        if not plugin.undo:
            raise PluginError("it registers nothing; decorate a class with hf_stitch.registries.metrics.register('…')")
    except Exception as error:
        sys.modules.pop(name, None)
        plugin.unload()
        reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"the plugin {file} could not be loaded: {reason}") from error
    finally:
        RUNNING.reset(token)
    _LOADED[file] = plugin
    return plugin


def run_file(name: str, path: Path, code: bytes) -> ModuleType:
    """Run the code of a file as a module of this name, so that dataclasses and pickle find its classes."""
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))  # without the __future__ of this file
    except BaseException:
        del sys.modules[name]
        raise
    return module
