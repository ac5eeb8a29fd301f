"""Registries that map names to classes and functions, and import them on first use.

The table :data:`hf_stitch.built_ins.BUILT_INS` lists the built-in entries. Other distributions and single files add
entries as described in :mod:`hf_stitch.plugins`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pkgutil import resolve_name
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from hf_stitch.built_ins import BASES, BUILT_INS
from hf_stitch.options import check, check_names, did_you_mean, options_in
from hf_stitch.plugins import RUNNING, VARIABLE, Entry, PluginError, docstring_in, hint_for, installed
from hf_stitch.printing import warn

if TYPE_CHECKING:
    from hf_stitch.built_ins import (
        DataSource,
        Detector,
        Library,
        Matcher,
        Metric,
        Override,
        Result,
        Rewrite,
        Selection,
        Similarity,
        Stitch,
        Task,
    )

__all__ = ["Entry", "PluginError", "Registries", "Registry", "UnknownNameError", "registries"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class UnknownNameError(ValueError, KeyError):
    """Raised for a name that is not in the registry; the message lists the available names."""

    # KeyError would print its message in quotes, like a key.
    __str__ = Exception.__str__


def most_special(kinds: Sequence[type[T]]) -> list[type[T]]:
    """Return the classes of a list without subclasses in the list."""
    return [kind for kind in kinds if not any(issubclass(sub, kind) for sub in kinds if sub is not kind)]


class Registry(Generic[T]):
    """Mapping from names to classes or functions of one kind, for example matchers or metrics.

    Listing names imports nothing; :meth:`get` imports only the requested entry. If the name of a plugin's entry is
    already taken, the entry is skipped with a warning. A registration at run time under a taken name raises an error.

    Args:
        kind: Plural name of the registry, for example ``"matchers"``. Plugins use the entry point group
            ``hf_stitch.<kind>``.
        built_ins: Name -> ``module:attribute``.
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
        >>> shapes.entry("plain").origin
        'registered at run time'
        >>> shapes.build("plain", width=3)
        {'width': 3}
    """

    def __init__(self, kind: str, built_ins: Mapping[str, str], base: str) -> None:
        self.kind = kind
        self._base = base
        self._entries = {
            name: Entry(name, source, partial(resolve_name, source), partial(docstring_in, source))
            for name, source in built_ins.items()
        }

    def __repr__(self) -> str:
        return f"<registry of {self.kind}: {', '.join(self.names())}>"

    def __contains__(self, name: object) -> bool:
        """Return whether the registry contains a name; imports nothing."""
        return name in self._entries or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    @property
    def base(self) -> type[T]:
        """The base class of all entries."""
        base: type[T] = resolve_name(self._base)
        return base

    def names(self) -> tuple[str, ...]:
        """Return all names in sorted order, including broken plugins; imports nothing."""
        return tuple(sorted({*self._entries, *self._plugins}))

    def check(self, name: str) -> None:
        """Raise an error if a name is not in the registry; imports nothing."""
        if name not in self:
            plugin, similar = hint_for(self.kind, name), did_you_mean(name, self.names())
            hint = f"; {plugin}." if plugin else f"; did you mean {similar!r}?" if similar else "."
            raise UnknownNameError(
                f"no {name!r} among {self.kind}{hint} Available: {', '.join(self.names()) or 'none'}"
            )

    def get(self, name: str) -> Any:
        """Import and return the class or function of a name.

        Args:
            name: The name.

        Raises:
            UnknownNameError: If the name is not in the registry.
            PluginError: If the name comes from a plugin that cannot be imported.

        Example:
            >>> registries.matchers.get("ridge").__name__
            'Ridge'
        """
        return self.entry(name).load()

    def entry(self, name: str) -> Entry:
        """Return the entry of a name; imports nothing.

        Example:
            >>> registries.matchers.entry("lstsq").origin
            'built-in'
        """
        self.check(name)
        return self._entries.get(name) or self._plugins[name]

    def usable(self, without: Collection[str] = ()) -> Iterator[Any]:
        """Import all entries; entries of broken plugins are skipped with a warning.

        Args:
            without: Names of entries to skip.

        Example:
            >>> {"timm", "transformers"} <= {library.name for library in registries.adapters.usable()}
            True
        """
        for name in (name for name in self if name not in without):
            try:
                yield self.get(name)
            except PluginError as error:
                warn(f"{error} It is skipped.")

    def build(self, spec: str | Mapping[str, Any] | T, **options: Any) -> T:
        """Build an instance from a name and options.

        Args:
            spec: A name, or a name with options (``"ridge:ridge=0.5"``, :func:`hf_stitch.options.options_in`); a
                record (a mapping with ``name`` and options, as returned by ``to_dict``); or an instance, which is
                returned unchanged.
            **options: Options of the class. Missing options have their defaults.

        Raises:
            UnknownNameError: If the name is not in the registry.
            PluginError: If the name comes from a plugin that cannot be imported.

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
                    f"{spec!r} is an instance and does not accept options ({', '.join(options)}); pass the name with "
                    "the options"
                )
            return spec
        if isinstance(spec, Mapping):
            options = {**spec, **options}
            if "name" not in options:
                raise ValueError(f"a record of {self.kind} requires the key 'name', one of: {', '.join(self.names())}")
            spec = options.pop("name")
        elif isinstance(spec, str):
            spec, named_options = options_in(spec)
            if repeated := named_options.keys() & options.keys():
                raise TypeError(f"option {min(repeated)!r} of {spec!r} is given twice, in the name and as an argument")
            options = {**named_options, **options}
        if not isinstance(spec, str):
            raise TypeError(
                f"{self.kind} must be a name, a {base.__name__} or a record of one, got {type(spec).__name__}"
            )
        factory = self.get(spec)
        self.check_kind(spec, factory)
        self._check_options(spec, factory, options)
        return factory(**options)

    def build_all(
        self, specs: Iterable[str | Mapping[str, Any] | T], argument: str | None = None, *, needed: bool = False
    ) -> dict[str, T]:
        """Build several instances.

        Args:
            specs: Arguments of :meth:`build`.
            argument: Name of the argument in errors. Default: :attr:`kind`.
            needed: Whether an empty list raises an error.

        Returns:
            Label -> instance, in the given order.

        Example:
            >>> list(registries.matchers.build_all(["lstsq", "ridge:ridge=0.5"]))
            ['lstsq', 'ridge(ridge=0.5)']
        """
        argument = argument or self.kind
        check(Iterable[str | Mapping[str, Any] | self.base], **{argument: specs})  # type: ignore[name-defined]
        built: list[Any] = [self.build(spec) for spec in specs]
        if needed and not built:
            raise ValueError(f"{argument} must contain at least one {self.base.__name__.lower()}, got none")
        by_label = {one.label: one for one in built}
        if len(by_label) < len(built):
            raise ValueError(f"{argument} must name each method once, got {', '.join(one.label for one in built)}")
        return by_label

    def check_kind(self, name: str, factory: Any) -> None:
        """Raise an error unless an entry is a subclass of :attr:`base`, or, for commands, a function or typer app."""
        if self.base is FunctionType:
            from typer import Typer

            if not isinstance(factory, FunctionType | Typer):
                raise TypeError(f"{name!r} among {self.kind} must be a function or a typer app, got {factory!r}")
        elif not (isinstance(factory, type) and issubclass(factory, self.base)):
            raise TypeError(f"{name!r} among {self.kind} must be a subclass of {self.base.__name__}, got {factory!r}")

    def _check_options(self, name: str, factory: type[T], options: Mapping[str, Any]) -> None:
        """Raise an error for unknown or missing options; constructors with ``**kwargs`` check options themselves."""
        parameters = inspect.signature(factory).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        valid = {p.name: p for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}
        check_names(f"{name!r} among {self.kind}", options, valid)
        for parameter in valid.values():
            if parameter.default is parameter.empty and parameter.name not in options:
                raise TypeError(
                    f"{name!r} among {self.kind} requires the option {parameter.name!r}, as in "
                    f"{name}({parameter.name}=…)"
                )

    @overload
    def register(self, name: str, factory: F) -> F: ...
    @overload
    def register(self, name: str, factory: None = None) -> Callable[[F], F]: ...
    def register(self, name: str, factory: F | None = None) -> F | Callable[[F], F]:
        """Add an entry for the lifetime of the process; without ``factory``, return a decorator.

        Args:
            name: The new name.
            factory: The class or function to register.

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
            entry = self.entry(name)
            raise ValueError(
                f"{name!r} among {self.kind} is taken ({entry.origin}, {entry.source}); choose another name"
            )
        file = RUNNING.get()
        self._entries[name] = Entry.of(name, factory, file)
        if file is not None:
            file.undo.append(partial(self._entries.pop, name))
        return factory

    @cached_property
    def _plugins(self) -> dict[str, Entry]:
        """Entries of installed distributions, read once; entries with taken names are skipped with a warning."""
        if os.environ.get(VARIABLE):
            warn(f"{VARIABLE} is ignored: name each file in hf-stitch --plugin or hf_stitch.load_plugin")
        entries: dict[str, Entry] = {}
        for entry in installed(self.kind):
            if (holder := self._entries.get(entry.name) or entries.get(entry.name)) is not None:
                warn(
                    f"{entry.name!r} among {self.kind} of the {entry.origin} is skipped, because this name is taken "
                    f"({holder.origin}): uninstall one of them, or rename its entry"
                )
            else:
                entries[entry.name] = entry
        return entries


@dataclass(frozen=True)
class Registries:
    """All registries of the package, accessible by attribute or by name.

    Iterating yields the names of the registries. The instance of the package is :data:`hf_stitch.registries`.

    Attributes:
        adapters: Libraries of networks, for example ``transformers`` and ``timm``.
        overrides: Overrides for single architectures.
        rewrites: Changes of the modules of a network.
        stitches: Maps between representations.
        matchers: Methods that fit a map.
        metrics: Similarity metrics.
        detectors: Detectors of out-of-distribution activations.
        similarities: Similarity functions of relative representations.
        anchors: Methods that select anchors.
        tasks: Tasks for scoring and training stitched models.
        data: Sources of datasets.
        results: Classes of results, for restoring them from pages.
        commands: Commands of ``hf-stitch``.

    Example:
        >>> "lstsq" in registries.matchers
        True
        >>> registries["stitches"] is registries.stitches
        True
        >>> list(registries)
        ['adapters', 'overrides', 'rewrites', 'stitches', 'matchers', 'metrics', 'detectors', 'similarities', 'anchors',
         'tasks', 'data', 'results', 'commands']
    """

    adapters: Registry[Library]
    overrides: Registry[Override]
    rewrites: Registry[Rewrite]
    stitches: Registry[Stitch]
    matchers: Registry[Matcher]
    metrics: Registry[Metric]
    detectors: Registry[Detector]
    similarities: Registry[Similarity]
    anchors: Registry[Selection]
    tasks: Registry[Task]
    data: Registry[DataSource]
    results: Registry[Result]
    commands: Registry[FunctionType]

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __getitem__(self, kind: str) -> Registry[Any]:
        if kind not in tuple(self):
            advice = f"; {hint}" if (hint := hint_for("registries", kind)) else ""
            raise UnknownNameError(f"no registry {kind!r}{advice}. Available: {', '.join(self)}")
        registry: Registry[Any] = getattr(self, kind)
        return registry


registries = Registries(**{kind: Registry(kind, names, BASES[kind]) for kind, names in BUILT_INS.items()})
