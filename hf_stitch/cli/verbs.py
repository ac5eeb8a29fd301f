"""Commands from verbs: the signature and the docstring of a verb are the options and the help of its command."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import typer

from hf_stitch.built_ins import BASES
from hf_stitch.cli.options import NAMES, Shared
from hf_stitch.cli.output import Output, output_folder, save
from hf_stitch.cli.signatures import Parameter, first_sentence, read, without_markup
from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.results import Result

REQUIRED = inspect.Parameter.empty
METHODS = {base.rpartition(":")[2]: kind for kind, base in BASES.items()}
"""Base classes of methods -> their registries."""


@dataclass
class Job:
    """A verb, and what the command line gave to it and to the command."""

    verb: str  # module:function
    parameters: Mapping[str, Parameter]
    given: dict[str, Any]  # arguments of the verb, as far as they are given; methods are built
    shared: Shared

    def __post_init__(self) -> None:
        self.output = Output(self.shared.json)
        self.seed: int = self.given.get("seed", 0)
        for name, parameter in self.parameters.items():
            typed = self.given.get(name)
            if typed is None or typed == parameter.default or (kind := _registry(parameter)) is None:
                continue  # a default may be another word, such as auto
            with usage(parameter.option):
                self.given[name] = _each(registries[kind].build, typed)

    @contextmanager
    def folder(self, *, needed: bool = False) -> Iterator[None]:
        """Create the output folder, if there is to be one; it is removed again if the work fails."""
        if self.shared.plan or (self.shared.out is None and not needed):
            yield
        elif self.shared.out is None:
            raise typer.BadParameter("is required without --plan", param_hint="--out")
        else:
            with output_folder(self.shared.out):
                yield

    def run(self, **made: Any) -> Any:
        """Do the job, or plan it and end the command; ``made`` are arguments that the command made itself.

        Networks are loaded before data are read. Of several processes, only the first one goes on.
        """
        import hf_stitch.plots  # without matplotlib it fails here, before any work
        from hf_stitch.running import Processes

        module, _, name = self.verb.partition(":")
        job = getattr(import_module(module), name)
        with self.folder():
            typed = {name: value for name, value in self.given.items() if name not in made}
            load = cache(self.shared.load)
            networks = self._of("Adapter", typed).items()
            arguments = typed | {name: _each(load, value) for name, value in networks}
            arguments |= {name: self._read(name, place) for name, place in self._of("Data", typed).items()} | made
            if self.shared.plan:
                planned = hf_stitch.plan(job, **arguments)
                self.output.show(planned)
                self.output.record(planned.to_dict())
                raise typer.Exit
            found = job(**arguments)
        if Processes.of(None).rank:
            raise typer.Exit
        return found

    def finish(self, result: Result, name: str, figures: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
        """Save a result and its figures (file -> arguments of ``plot``), show it, and write the page and the record."""
        saved = {} if self.shared.out is None else save(result, self.shared.out, name, figures)
        self.output.show(result)
        self.tell(result, saved, {**result.to_dict(), **more})

    def tell(self, result: Result | None, saved: Mapping[str, Path], record: Mapping[str, Any]) -> None:
        """Show what was saved, and write the page and the record."""
        if saved:
            self.output.show("saved " + ", ".join(map(str, saved.values())))
        if result is not None:
            self.output.report(result, self.shared.report)
        self.output.record({**record, "saved": {name: str(path) for name, path in saved.items()}})

    def _of(self, kind: str, typed: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in typed.items() if kind in self.parameters[name].kind.names}

    def _read(self, name: str, place: Any) -> Any:
        if name == "data":
            return self.shared.read(self.shared.split, self.shared.max_samples, self.seed)
        if isinstance(place, tuple):
            return tuple(self.shared.read_other(each, None, self.seed) for each in place)
        return self.shared.read_other(place, self.shared.max_samples, self.seed)


def command(verb: str, *, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a verb, which is named ``module:function`` and imported when the command runs (decorator).

    The decorated function takes the :class:`Job`, and parameters for what is no option of the verb. ``without`` names
    parameters of the verb and shared options that the command does not have.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        summary, found = read(verb)
        own_options = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        left_out = {*without, *(each.name for each in own_options)}
        parameters = {each.name: each for each in found if each.name not in left_out}
        needed = [name for name, each in parameters.items() if each.default is REQUIRED]
        types = get_type_hints(Shared, include_extras=True)
        shared = [
            _option(each.name, types[each.name], REQUIRED if each.name in needed else each.default)
            for each in fields(Shared)
            if each.name not in left_out
        ]
        names = {name: each.option for name, each in parameters.items()}
        of_verb = {name: _option_of(each, names) for name, each in parameters.items() if name not in types}
        for name, each in parameters.items():
            if "Data" not in each.kind.names if name == "data" else name in needed and of_verb.get(name, each) is None:
                raise TypeError(
                    f"{verb} takes {name}, for which its annotation gives no option: annotate a network as str | "
                    "hf_stitch.Adapter, samples as hf_stitch.data.Data, or name it in without= and pass it to job.run"
                )

        def run(**typed: Any) -> None:
            more = {each.name: typed.pop(each.name) for each in own_options}
            for_all = Shared(**{each.name: typed.pop(each.name) for each in shared})
            given = {name: value for name, value in typed.items() if value not in (None, [])}
            if for_all.data is not None and "data" in parameters:
                given["data"] = for_all.data
            work(Job(verb, parameters, given, for_all), **more)

        own = [each.replace(kind=each.KEYWORD_ONLY) for each in own_options]
        options = [*filter(None, of_verb.values()), *own, *shared]
        options.sort(key=lambda each: each.default is not REQUIRED)
        changed: Any = run
        changed.__name__, changed.__module__ = work.__name__, work.__module__
        changed.__doc__ = without_markup(summary, names)
        changed.__signature__ = inspect.Signature(options)
        changed.__annotations__ = {each.name: each.annotation for each in options}
        return run

    return decorate


@contextmanager
def usage(option: str) -> Iterator[None]:
    """Tell an error in the value of an option as wrong usage."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def share_or_count(text: str) -> float | int:
    """Read a share of samples, or their number."""
    size = float(text)
    if size >= 1 and not size.is_integer():
        raise typer.BadParameter(f"must be a share below 1 or a whole number of samples, got {size}")
    return int(size) if size >= 1 else size


def _each(make: Callable[[str], Any], typed: str | list[str]) -> Any:
    return [make(each) for each in typed] if isinstance(typed, list) else make(typed)


def _registry(parameter: Parameter) -> str | None:
    return next((METHODS[name] for name in parameter.kind.names if name in METHODS), None)


def _option_of(each: Parameter, names: Mapping[str, str]) -> inspect.Parameter | None:
    """Return the argument or option of a parameter, if a command line can give its value."""
    kind, taken = each.kind, each.kind.names - {"Mapping"}
    about, more = first_sentence(each.about), dict[str, Any]()
    head, typed = re.split(r" ?[:(]|[,.]", about)[0], cast("Any", str)
    if taken == {"StitchedModel"}:
        about = "A saved stitched model, or its Hub id, or a saved stitcher."
    elif "Adapter" in taken:
        about = f"{head}: {NAMES}."
    elif registry := _registry(each):
        about = f"{head}: a name, or name:option=value,…; see hf-stitch list {registry}."
    elif taken == {"Data"}:
        typed = str if kind.count == 1 else tuple[(str,) * kind.count]  # type: ignore[misc]
        about = f"{about} As NAME or NAME:SPLIT."
    elif kind.choices:
        typed = Literal[kind.choices]
    elif taken == {"float", "int"}:
        typed, more = float, {"parser": share_or_count}
    elif taken in ({"int"}, {"float"}):
        typed, more = (int if "int" in taken else float), {"min": kind.low, "max": kind.high}
    elif taken == {"bool"}:
        typed = bool
    elif "Path" in taken:
        typed = Path
    elif taken != {"str"}:
        return None
    if kind.is_list and taken != {"StitchedModel"}:
        typed = list[typed]  # type: ignore[valid-type]
        about += "" if each.is_positional else " Repeatable."
    about = without_markup(about, names)
    default = list(each.default) if isinstance(each.default, tuple) else each.default
    flags = f"{each.option}/--no-{each.option[2:]}" if default is True else each.option
    written: Any = typer.Argument(help=about) if each.is_positional else typer.Option(flags, help=about, **more)
    whole: Any = typed | None if default is None else typed
    return _option(each.name, Annotated[whole, written], default)


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
