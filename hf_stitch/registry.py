"""Registries that map names to classes and functions, and import them on first use.

The built-in entries are listed in one table, :data:`hf_stitch.built_ins.BUILT_INS`. Other distributions and single
files add entries as :mod:`hf_stitch.plugins` describes.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from hf_stitch.built_ins import BASES, BUILT_INS
from hf_stitch.plugins import (
    FilePlugin,
    PluginEntry,
    PluginError,
    install_hint,
    installed,
    load_named,
    normalized,
    running,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_stitch.adapters import Adapter, Override
    from hf_stitch.adapters.rewriting import Rewrite
    from hf_stitch.data import DataSource
    from hf_stitch.detectors import Detector
    from hf_stitch.matchers import Matcher
    from hf_stitch.metrics import Metric
    from hf_stitch.relative import Selection, Similarity
    from hf_stitch.results import Result
    from hf_stitch.stitches import Stitch
    from hf_stitch.tasks.base import Task

__all__ = [
    "PluginError",
    "Registries",
    "Registry",
    "UnknownNameError",
    "check_choice",
    "check_name",
    "check_number",
    "did_you_mean",
    "label_of",
    "options_in",
    "registries",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class UnknownNameError(ValueError, KeyError):
    """Raised for a name that is not in the registry; the message lists the available names."""

    # KeyError prints its message with quotes around it, as if it were a key.
    __str__ = Exception.__str__


def label_of(config: Any) -> str:
    """Return the name of a matcher or detector with all options that differ from their defaults.

    Args:
        config: A frozen dataclass with a ``name``, whose fields are its options.

    Returns:
        For example ``ridge(ridge=0.5)``.

    Example:
        >>> label_of(registries.matchers.build("ridge", ridge=0.5)), label_of(registries.matchers.build("lstsq"))
        ('ridge(ridge=0.5)', 'lstsq')
    """
    changed = []
    for option in fields(config):
        value = getattr(config, option.name)
        shown = label_of(value) if hasattr(value, "name") else value
        if shown != (option.default if option.default_factory is MISSING else option.default_factory()):
            changed.append(f"{option.name}={shown}")
    return str(config.name) + (f"({', '.join(changed)})" if changed else "")


def most_special(kinds: Sequence[type[T]]) -> list[type[T]]:
    """Return the classes of a list that no other class of the list extends.

    Args:
        kinds: Classes.

    Returns:
        Those without a subclass among them, in the same order.

    Example:
        >>> most_special([object, int, bool])
        [<class 'bool'>]
    """
    return [kind for kind in kinds if not any(issubclass(other, kind) for other in kinds if other is not kind)]


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Find the valid name that is most similar to a mistyped one, ignoring case.

    Args:
        name: The mistyped name.
        options: The valid names.

    Returns:
        The most similar valid name, or an empty string if none is similar enough.

    Example:
        >>> did_you_mean("procustes", ["lstsq", "procrustes", "ridge"])
        'procrustes'
        >>> did_you_mean("transformer", ["lstsq", "procrustes", "ridge"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[closest[0]] if closest else ""


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check an option that has a fixed number of choices.

    Args:
        name: The name of the option.
        value: What was given.
        choices: What may be given.

    Raises:
        ValueError: If the value is not among the choices.

    Example:
        >>> check_choice("side", "left", ["left", "right"])
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def check_name(**names: object) -> None:
    """Check arguments that are names, for example of layers.

    Args:
        **names: What was given, by the name of the argument.

    Raises:
        TypeError: If one is no text.

    Example:
        >>> check_name(layer="layer1.0")
    """
    for argument, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a name, got {name!r}")


def check_number(least: int, **numbers: object) -> None:
    """Check arguments that are whole numbers.

    Args:
        least: The smallest valid number.
        **numbers: What was given, by the name of the argument.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is too small.

    Example:
        >>> check_number(1, batch_size=64)
    """
    for argument, number in numbers.items():
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(f"{argument} must be a whole number, got {number!r}")
        if number < least:
            raise ValueError(f"{argument} must be at least {least}, got {number}")


def options_in(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a name with its options, ``name:key=value,…``, as it is written on a command line.

    Args:
        spec: A name, or a name with options. Values are Python or JSON literals (``True`` and ``true``, ``0.5``);
            anything else is text.

    Returns:
        The name and the options.

    Raises:
        ValueError: If an option has no value.

    Example:
        >>> options_in("linear_cka:debiased=True")
        ('linear_cka', {'debiased': True})
        >>> options_in("mutual_knn:k=5,distance=euclidean")
        ('mutual_knn', {'k': 5, 'distance': 'euclidean'})
    """
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"options are written name:key=value,key=value, got {spec!r}")
        options[key] = _literal(value)
    return name, options


def _literal(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


class Registry(Generic[T]):
    """A mapping from names to classes or functions of one kind, for example matchers or metrics.

    Listing names imports nothing; :meth:`get` imports only the requested entry. Built-in entries cannot be replaced. An
    entry of a plugin has the full name ``distribution/name``. If its short name is taken by a built-in entry or by
    another plugin, it is listed, chosen and recorded by its full name. A registration at run time under a name that is
    taken raises an error.

    Args:
        kind: Plural name of the registry, for example ``"matchers"``. Plugins use the entry point group
            ``hf_stitch.<kind>``.
        built_ins: From name to ``module:attribute``.
        base: The base class of all entries, as ``module:attribute``.

    Example:
        >>> shapes = Registry("shapes", {"ordered": "collections:OrderedDict"}, "builtins:dict")
        >>> shapes.get("ordered")
        <class 'collections.OrderedDict'>
        >>> @shapes.register("plain")
        ... class Plain(dict):
        ...     def __init__(self, width=1):
        ...         super().__init__(width=width)
        >>> shapes.names()
        ('ordered', 'plain')
        >>> shapes.origin("plain")
        'registered at run time'
        >>> shapes.build("plain", width=3)
        {'width': 3}
    """

    def __init__(self, kind: str, built_ins: Mapping[str, str], base: str) -> None:
        self.kind = kind
        self._base = base
        self._built_ins = dict(built_ins)
        self._registered: dict[str, Callable[..., Any]] = {}
        self._files: dict[str, FilePlugin] = {}

    def __repr__(self) -> str:
        """Return for example ``<registry of matchers: identity, low_rank, lstsq>``."""
        return f"<registry of {self.kind}: {', '.join(self.names())}>"

    def __contains__(self, name: object) -> bool:
        """Whether the registry contains a name; imports nothing."""
        return name in self._built_ins or (
            isinstance(name, str) and bool(self._named(name) or name in self._registered)
        )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in sorted order."""
        return iter(self.names())

    @property
    def base(self) -> type[T]:
        """The base class of all entries."""
        found: type[T] = resolve_name(self._base)
        return found

    def names(self) -> tuple[str, ...]:
        """Return all names in sorted order; imports no entry, so that broken plugins are listed too."""
        of_plugins = {self._name_of(entry) for entry in self._plugins}
        return tuple(sorted({*self._built_ins, *of_plugins, *self._registered}))

    def check(self, name: str) -> None:
        """Raise an error if a name is not in the registry; imports nothing.

        Args:
            name: The name.

        Raises:
            UnknownNameError: If the registry has no such name; the message lists the available names, or the
                distribution of this project to install.
        """
        if name not in self:
            plugin, similar = install_hint(self.kind, name), did_you_mean(name, self.names())
            hint = f"; {plugin}." if plugin else f"; did you mean {similar!r}?" if similar else "."
            raise UnknownNameError(
                f"no {name!r} among {self.kind}{hint} Available: {', '.join(self.names()) or 'none'}"
            )

    def get(self, name: str) -> Any:
        """Import and return the class or function behind a name.

        Args:
            name: The name.

        Returns:
            The class or function, not an instance of it.

        Raises:
            UnknownNameError: If the registry has no such name.
            PluginError: If the name comes from a plugin that cannot be imported.

        Example:
            >>> registries.matchers.get("ridge").__name__
            'Ridge'
        """
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        if name in self._built_ins:
            return resolve_name(self._built_ins[name])
        entry = self._entry(name)
        found = entry.load()
        if (recorded := self._name_of(entry)) != entry.point.name and hasattr(found, "name"):
            found.name = recorded  # records must tell it from the other entry with its name
        return found

    def usable(self) -> Iterator[Any]:
        """Import all entries, for a choice among all of them; those of broken plugins are left out with a warning.

        Yields:
            The classes or functions, in the order of their names.

        Example:
            >>> {"timm", "transformers"} <= {adapter.library for adapter in registries.adapters.usable()}
            True
        """
        for name in self:
            try:
                yield self.get(name)
            except PluginError as error:
                warnings.warn(f"{error} It is left out.", stacklevel=3)

    def problem(self, name: str) -> str:
        """Return why the entry of a plugin cannot be used with this version of hf-stitch; imports nothing.

        Args:
            name: The name.

        Returns:
            The reason; empty if nothing is known against the entry.

        Raises:
            UnknownNameError: If the registry has no such name.

        Example:
            >>> registries.matchers.problem("lstsq")
            ''
        """
        self.check(name)
        return "" if name in self._built_ins or name in self._registered else self._entry(name).problem

    def build(self, spec: str | Mapping[str, Any] | T, **options: Any) -> T:
        """Build an instance from a name and options.

        Args:
            spec: A name, or a name with options (``"ridge:ridge=0.5"``, :func:`options_in`); a record, that is, a
                mapping with ``name`` and options, as returned by ``to_dict``; or an instance, which is returned
                unchanged.
            **options: Options of the class behind the name. Options that are left out keep their defaults.

        Returns:
            An instance of :attr:`base`.

        Raises:
            UnknownNameError: If the registry has no such name.
            PluginError: If the name comes from a plugin that cannot be imported.
            TypeError: If ``spec`` is none of these three, an option is unknown, missing or given twice, options are
                given together with an instance, or the entry is not a subclass of :attr:`base`.
            ValueError: If a record has no ``name``, or an option has no value or is out of its range.

        Example:
            >>> registries.matchers.build("ridge", ridge=0.5)
            Ridge(ridge=0.5)
            >>> registries.matchers.build("ridge:ridge=0.5")
            Ridge(ridge=0.5)
            >>> registries.matchers.build({"name": "ridge", "ridge": 0.5})
            Ridge(ridge=0.5)
        """
        base = self.base
        if isinstance(spec, base):
            if options:
                raise TypeError(
                    f"{spec!r} is an instance and cannot take further options ({', '.join(options)}); pass the name "
                    "together with the options"
                )
            return spec
        if isinstance(spec, Mapping):
            options = {**spec, **options}
            if "name" not in options:
                raise ValueError(f"a record of {self.kind} needs the key 'name', one of: {', '.join(self.names())}")
            spec = options.pop("name")
        elif isinstance(spec, str):
            spec, written = options_in(spec)
            if twice := written.keys() & options.keys():
                raise TypeError(f"option {min(twice)!r} of {spec!r} is given twice, in the name and as an argument")
            options = {**written, **options}
        if not isinstance(spec, str):
            raise TypeError(
                f"{self.kind} must be given as a name, a {base.__name__} or a record of one, got {type(spec).__name__}"
            )
        factory = self.get(spec)
        self.check_kind(spec, factory)
        self._check_options(spec, factory, options)
        return factory(**options)

    def check_kind(self, name: str, found: Any) -> None:
        """Check that an entry is what the registry contains: a subclass of :attr:`base`, or a function or typer app.

        Args:
            name: The name.
            found: The class or function behind it, as :meth:`get` returns it.

        Raises:
            TypeError: If it is something else.
        """
        if self.base is FunctionType:
            from typer import Typer

            if not isinstance(found, FunctionType | Typer):
                raise TypeError(f"{name!r} among {self.kind} is {found!r}, which is neither a function nor a typer app")
        elif not (isinstance(found, type) and issubclass(found, self.base)):
            raise TypeError(f"{name!r} among {self.kind} is {found!r}, which is not a subclass of {self.base.__name__}")

    def _check_options(self, name: str, factory: type[T], options: Mapping[str, Any]) -> None:
        """Raise an error for unknown or missing options; constructors with ``**kwargs`` check their own."""
        parameters = inspect.signature(factory).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = {p.name: p for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}
        for option in options.keys() - known.keys():
            hint = did_you_mean(option, known)
            raise TypeError(
                f"{name!r} among {self.kind} has no option {option!r}{f'; did you mean {hint!r}?' if hint else '.'} "
                f"Its options: {', '.join(known) or 'none'}"
            )
        for parameter in known.values():
            if parameter.default is parameter.empty and parameter.name not in options:
                raise TypeError(
                    f"{name!r} among {self.kind} needs the option {parameter.name!r}, as in {name}({parameter.name}=…)"
                )

    @overload
    def register(self, name: str, factory: F) -> F: ...
    @overload
    def register(self, name: str, factory: None = None) -> Callable[[F], F]: ...
    def register(self, name: str, factory: F | None = None) -> F | Callable[[F], F]:
        """Add an entry that lasts until the process ends; without ``factory``, return a decorator.

        Args:
            name: The new name.
            factory: The class or function to register.

        Returns:
            ``factory`` unchanged, or a decorator that registers and returns the class or function it decorates.

        Raises:
            ValueError: If the name is taken.

        Example:
            >>> shapes = Registry("shapes", {}, "builtins:dict")
            >>> shapes.register("plain", dict)
            <class 'dict'>
            >>> "plain" in shapes
            True
        """
        if factory is None:
            return lambda decorated: self.register(name, decorated)
        if name in self:
            raise ValueError(
                f"{name!r} among {self.kind} is taken ({self.origin(name)}, {self.source(name)}); choose another name"
            )
        self._registered[name] = factory
        if (file := running()) is not None:
            self._files[name] = file
            file.undo.extend([partial(self._registered.pop, name), partial(self._files.pop, name)])
        return factory

    def origin(self, name: str) -> str:
        """Return where an entry comes from.

        Args:
            name: The name.

        Returns:
            ``built-in``, ``plugin <distribution> <version>``, ``file <name> (sha256 <hash>)`` or ``registered at run
            time``.

        Raises:
            UnknownNameError: If the registry has no such name.

        Example:
            >>> registries.matchers.origin("lstsq")
            'built-in'
        """
        self.check(name)
        if name in self._built_ins:
            return "built-in"
        if name in self._registered:
            return self._files[name].origin if name in self._files else "registered at run time"
        return self._entry(name).origin

    def distribution(self, name: str) -> tuple[str, str] | None:
        """Return the distribution and version of the plugin that an entry comes from.

        Args:
            name: The name.

        Returns:
            Name and version of the distribution; ``None`` for built-in entries and entries registered at run time.

        Raises:
            UnknownNameError: If the registry has no such name.
        """
        self.check(name)
        if name in self._built_ins or name in self._registered:
            return None
        dist = self._entry(name).point.dist
        return (dist.name, dist.version) if dist is not None else None

    def file(self, name: str) -> FilePlugin | None:
        """Return the file that registered an entry.

        Args:
            name: The name.

        Returns:
            The file and its hash; ``None`` for entries from elsewhere.

        Raises:
            UnknownNameError: If the registry has no such name.
        """
        self.check(name)
        return self._files.get(name)

    def source(self, name: str) -> str:
        """Return where the class or function behind a name is defined; imports nothing.

        Args:
            name: The name.

        Returns:
            ``module:attribute``.

        Raises:
            UnknownNameError: If the registry has no such name.

        Example:
            >>> registries.matchers.source("lstsq")
            'hf_stitch.matchers.lstsq:Lstsq'
        """
        self.check(name)
        if name in self._registered:
            factory = self._registered[name]
            return f"{factory.__module__}:{factory.__qualname__}"
        return self._built_ins[name] if name in self._built_ins else self._entry(name).point.value

    def summary(self, name: str) -> str:
        """Describe an entry in one line; imports nothing.

        Args:
            name: The name.

        Returns:
            The first line of the docstring; for an entry of a plugin, the summary of its distribution.

        Raises:
            UnknownNameError: If the registry has no such name.

        Example:
            >>> registries.matchers.summary("lstsq").partition(",")[0]
            'Least squares: the affine map with minimum squared error'
        """
        self.check(name)
        if name in self._registered:
            return _first_line(inspect.getdoc(self._registered[name]))
        if name in self._built_ins:
            return _docstring(self._built_ins[name])
        return self._entry(name).summary

    @cached_property
    def _plugins(self) -> list[PluginEntry]:
        """Entries of installed distributions, read once, after the files that the environment names were loaded."""
        load_named()
        return installed(self.kind)

    def _named(self, name: str) -> list[PluginEntry]:
        """Entries of plugins with this name, or with this full name."""
        distribution, _, plain = name.rpartition("/")
        return [
            entry
            for entry in self._plugins
            if entry.point.name == name
            or (entry.point.name == plain and entry.distribution == normalized(distribution))
        ]

    def _name_of(self, entry: PluginEntry) -> str:
        """The name of an entry, in full if its short name is taken."""
        short = entry.point.name
        alone = len(self._named(short)) == 1 and short not in self._built_ins
        return short if alone else entry.full_name

    def _entry(self, name: str) -> PluginEntry:
        """The entry of a plugin by a name that exists."""
        found = self._named(name)
        if len(found) > 1:
            raise UnknownNameError(
                f"{len(found)} plugins have an entry {name!r} among {self.kind}: choose one in full, "
                f"{' or '.join(repr(entry.full_name) for entry in found)}, or uninstall the others"
            )
        return found[0]


@dataclass(frozen=True)
class Registries:
    """All registries of the package, accessible by attribute or by name.

    Iterating yields the names of the registries. The instance of the package is :data:`hf_stitch.registries`.

    Attributes:
        adapters: Adapters of libraries, for example ``transformers`` and ``timm``.
        overrides: Overrides for single architectures.
        rewrites: Changes of the modules of a network.
        stitches: Maps between representations.
        matchers: Methods that fit a map.
        metrics: Similarity metrics.
        detectors: Detectors of out-of-distribution activations.
        similarities: Similarity functions of relative representations.
        anchors: Methods that select anchors.
        tasks: Tasks by which stitched models are scored and trained.
        networks: Networks defined by this package.
        data: Sources of data sets.
        results: Classes of results, which pages restore.
        commands: Commands of ``hf-stitch``.

    Example:
        >>> "lstsq" in registries.matchers
        True
        >>> registries["stitches"] is registries.stitches
        True
        >>> list(registries)
        ['adapters', 'overrides', 'rewrites', 'stitches', 'matchers', 'metrics', 'detectors', 'similarities', 'anchors',
         'tasks', 'networks', 'data', 'results', 'commands']
    """

    adapters: Registry[Adapter]
    overrides: Registry[Override]
    rewrites: Registry[Rewrite]
    stitches: Registry[Stitch]
    matchers: Registry[Matcher]
    metrics: Registry[Metric]
    detectors: Registry[Detector]
    similarities: Registry[Similarity]
    anchors: Registry[Selection]
    tasks: Registry[Task]
    networks: Registry[PreTrainedModel]
    data: Registry[DataSource]
    results: Registry[Result]
    commands: Registry[FunctionType]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the registries."""
        return (field.name for field in fields(self))

    def __getitem__(self, kind: str) -> Registry[Any]:
        """Return the registry with a name."""
        if kind not in tuple(self):
            raise UnknownNameError(f"there is no registry {kind!r}. Available: {', '.join(self)}")
        registry: Registry[Any] = getattr(self, kind)
        return registry


registries = Registries(**{kind: Registry(kind, names, BASES[kind]) for kind, names in BUILT_INS.items()})


def _first_line(docstring: str | None) -> str:
    return (docstring or "").partition("\n")[0]


def _docstring(source: str) -> str:
    """Read the first line of the docstring of a built-in class, or of its module, without importing it."""
    module, _, name = source.partition(":")
    root = Path(__file__).parent.joinpath(*module.split(".")[1:])
    path = root / "__init__.py" if root.is_dir() else root.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _first_line(ast.get_docstring(node))
    return _first_line(ast.get_docstring(tree))  # of a typer app, which has none
