"""Registries: from a name to the class or function behind it, imported when it is asked for.

What the package itself offers stands in one table, :data:`hf_stitch.built_ins.BUILT_INS`. Other distributions add to
it by entry points in the group ``hf_stitch.<registry>``, for example in their ``pyproject.toml``::

    [project.entry-points."hf_stitch.matchers"]
    diagonal = "hf_stitch_diagonal:Diagonal"
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from hf_stitch.built_ins import BASES, BUILT_INS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_stitch.adapters import Adapter, Override
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.matchers import Matcher
    from hf_stitch.metrics import Metric
    from hf_stitch.relative import Selection, Similarity
    from hf_stitch.stitches import Stitch

__all__ = ["PluginError", "Registries", "Registry", "UnknownNameError", "did_you_mean", "registries"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class UnknownNameError(ValueError, KeyError):
    """A registry has no such name; the message lists what it has."""

    # KeyError would show the message in quotes, as if it were a key.
    __str__ = Exception.__str__


class PluginError(ImportError):
    """A plugin is installed but what it announces cannot be imported; ``__cause__`` is the reason."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """The option that resembles a mistyped name most, or an empty string if none does.

    Args:
        name: What was asked for.
        options: What there is.

    Example:
        >>> did_you_mean("procustes", ["lstsq", "procrustes", "ridge"])
        'procrustes'
        >>> did_you_mean("transformer", ["lstsq", "procrustes", "ridge"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    closest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[closest[0]] if closest else ""


class Registry(Generic[T]):
    """The names of one kind of thing (matchers, metrics, …) and what stands behind each.

    Listing names imports nothing; :meth:`get` imports the one thing asked for. What the package offers itself cannot be
    replaced: a plugin of the same name is left out with a warning, a run-time registration is refused.

    Args:
        kind: The plural that names the registry; plugins announce themselves in the group ``hf_stitch.<kind>``.
        built_ins: From name to ``module:attribute``.
        base: The class that everything in it is a subclass of, as ``module:attribute``.

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

    def __repr__(self) -> str:
        """For example ``<registry of matchers: identity, low_rank, lstsq>``."""
        return f"<registry of {self.kind}: {', '.join(self.names())}>"

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name; imports nothing."""
        return name in self._built_ins or name in self._registered or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        return iter(self.names())

    @property
    def base(self) -> type[T]:
        """The class that everything in it is a subclass of."""
        found: type[T] = resolve_name(self._base)
        return found

    def names(self) -> tuple[str, ...]:
        """All names, sorted. Imports nothing, and lists plugins that will turn out to be broken."""
        return tuple(sorted({*self._built_ins, *self._plugins, *self._registered}))

    def check(self, name: str) -> None:
        """Make sure that there is such a name; imports nothing.

        Args:
            name: The name.

        Raises:
            UnknownNameError: If there is none; the message lists those there are.
        """
        if name not in self:
            hint = did_you_mean(name, self.names())
            raise UnknownNameError(
                f"no {name!r} among {self.kind}{f'; did you mean {hint!r}?' if hint else '.'} "
                f"There are: {', '.join(self.names()) or 'none'}"
            )

    def get(self, name: str) -> Any:
        """The class or function behind a name.

        Raises:
            UnknownNameError: If there is no such name.
            PluginError: If it belongs to a plugin that cannot be imported.
        """
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        if name in self._built_ins:
            return resolve_name(self._built_ins[name])
        entry = self._plugins[name]
        try:
            return entry.load()
        except Exception as error:
            raise PluginError(
                f"{name!r} among {self.kind} comes from the {_describe(entry)}, which cannot be imported "
                f"({entry.value}): {type(error).__name__}: {error}. Repair or uninstall that distribution."
            ) from error

    def build(self, spec: str | Mapping[str, Any] | T, **options: Any) -> T:
        """Build what stands behind a name, with its options.

        Args:
            spec: A name; or its record, a mapping of ``name`` and options, as ``to_dict`` gives it; or what is built
                already, which is returned as it is.
            **options: Of what a name stands for; those left out keep their defaults.

        Raises:
            UnknownNameError: If there is no such name.
            PluginError: If it belongs to a plugin that cannot be imported.
            TypeError: If an option is unknown or missing, options come with what is built already, or what stands
                behind the name is of another kind.
            ValueError: If an option is out of its range.

        Example:
            >>> registries.matchers.build("ridge", ridge=0.5)
            Ridge(ridge=0.5)
            >>> registries.matchers.build({"name": "ridge", "ridge": 0.5})
            Ridge(ridge=0.5)
        """
        base = self.base
        if isinstance(spec, base):
            if options:
                raise TypeError(
                    f"{spec!r} is built already, and options came beside it: {', '.join(options)}; give them with a "
                    "name"
                )
            return spec
        if isinstance(spec, Mapping):
            options = {**spec, **options}
            if "name" not in options:
                raise ValueError(f"a record of {self.kind} needs a 'name', one of: {', '.join(self.names())}")
            spec = options.pop("name")
        if not isinstance(spec, str):
            raise TypeError(
                f"{self.kind} are given by name, as a {base.__name__} or as its record, got {type(spec).__name__}"
            )
        factory = self.get(spec)
        if not (isinstance(factory, type) and issubclass(factory, base)):
            raise TypeError(f"{spec!r} among {self.kind} is {factory!r}, which is no subclass of {base.__name__}")
        self._check_options(spec, factory, options)
        return factory(**options)

    def _check_options(self, name: str, factory: type[T], options: Mapping[str, Any]) -> None:
        """Refuse options that there are not, or that are missing; constructors that take any check them themselves."""
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
        """Add a name for the life of this process; without ``factory``, a decorator.

        Args:
            name: The new name.
            factory: The class or function behind it; returned as it is.

        Raises:
            ValueError: If the name is taken.
        """
        if factory is None:
            return lambda decorated: self.register(name, decorated)
        if name in self:
            raise ValueError(
                f"{name!r} among {self.kind} is taken ({self.origin(name)}, {self._holder(name)}); choose another name"
            )
        self._registered[name] = factory
        return factory

    def origin(self, name: str) -> str:
        """Where a name comes from: ``built-in``, ``plugin <distribution> <version>`` or ``registered at run time``.

        Raises:
            UnknownNameError: If there is no such name.
        """
        self.check(name)
        if name in self._built_ins:
            return "built-in"
        return _describe(self._plugins[name]) if name in self._plugins else "registered at run time"

    def distribution(self, name: str) -> tuple[str, str] | None:
        """The distribution and version of the plugin that a name comes from.

        Args:
            name: The name.

        Returns:
            ``None`` for built-ins, and for what was registered at run time.

        Raises:
            UnknownNameError: If there is no such name.
        """
        self.check(name)
        entry = None if name in self._built_ins or name in self._registered else self._plugins[name]
        return (entry.dist.name, entry.dist.version) if entry is not None and entry.dist is not None else None

    def _holder(self, name: str) -> str:
        """The dotted name of what stands behind a name, without importing it."""
        if name in self._registered:
            return repr(self._registered[name])
        return self._built_ins[name] if name in self._built_ins else self._plugins[name].value

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        """What other distributions announce, read once; of a name announced twice the first distribution keeps it."""
        plugins: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=f"hf_stitch.{self.kind}"), key=_describe):
            if entry.name in self._built_ins or entry.name in plugins:
                holder = _describe(plugins[entry.name]) if entry.name in plugins else "a built-in"
                warnings.warn(
                    f"the {_describe(entry)} announces {entry.name!r} among {self.kind}, a name held by {holder}: "
                    f"it is left out. Its author should choose another name.",
                    stacklevel=2,
                )
            else:
                plugins[entry.name] = entry
        return plugins


@dataclass(frozen=True)
class Registries:
    """All registries, by attribute or by name; iterating gives the names.

    Example:
        >>> "lstsq" in registries.matchers
        True
        >>> registries["stitches"] is registries.stitches
        True
        >>> list(registries)
        ['adapters', 'overrides', 'stitches', 'matchers', 'metrics', 'similarities', 'anchors', 'heads', 'networks']
    """

    adapters: Registry[Adapter]
    overrides: Registry[Override]
    stitches: Registry[Stitch]
    matchers: Registry[Matcher]
    metrics: Registry[Metric]
    similarities: Registry[Similarity]
    anchors: Registry[Selection]
    heads: Registry[StitchedModel]
    networks: Registry[PreTrainedModel]

    def __iter__(self) -> Iterator[str]:
        """The names of the registries."""
        return (field.name for field in fields(self))

    def __getitem__(self, kind: str) -> Registry[Any]:
        """The registry of this name.

        Raises:
            UnknownNameError: If there is none.
        """
        if kind not in tuple(self):
            raise UnknownNameError(f"no registry {kind!r}; there are: {', '.join(self)}")
        registry: Registry[Any] = getattr(self, kind)
        return registry


registries = Registries(**{kind: Registry(kind, names, BASES[kind]) for kind, names in BUILT_INS.items()})


def _describe(entry: EntryPoint) -> str:
    """The distribution that an entry point comes from, for example ``plugin hf-stitch-diagonal 0.1.0``."""
    return f"plugin {entry.dist.name} {entry.dist.version}" if entry.dist else f"plugin {entry.value}"
