"""Commands built from verbs, the functions of the Python API: signature and docstring become options and help."""

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
    """A verb with the arguments from the command line."""

    verb: str  # module:function
    parameters: Mapping[str, Parameter]
    given: dict[str, Any]  # passed arguments of the verb; methods are built
    shared: Shared

    def __post_init__(self) -> None:
        self.output = Output(self.shared.json)
        self.seed: int = self.given.get("seed", 0)
        for name, parameter in self.parameters.items():
            argument = self.given.get(name)
            if argument is None or argument == parameter.default or (kind := _registry(parameter)) is None:
                continue  # a default may be a special value, such as auto
            with usage(parameter.option):
                self.given[name] = _build(registries[kind].build, argument)

    @contextmanager
    def folder(self, *, required: bool = False) -> Iterator[None]:
        """Create the output folder, if any; it is removed again if the work fails."""
        if self.shared.plan or (self.shared.out is None and not required):
            yield
        elif self.shared.out is None:
            raise typer.BadParameter("is required without --plan", param_hint="--out")
        else:
            with output_folder(self.shared.out):
                yield

    def run(self, **more: Any) -> Any:
        """Do the job, or plan it and end the command; ``more`` are additional arguments of the verb.

        Networks are loaded before data. With several processes, only the first process continues.
        """
        import hf_stitch.plots  # fails here without matplotlib, before any work
        from hf_stitch.running import Processes

        module, _, name = self.verb.partition(":")
        verb = getattr(import_module(module), name)
        with self.folder():
            passed = {name: value for name, value in self.given.items() if name not in more}
            load = cache(self.shared.load)
            networks = self._of_type("Adapter", passed).items()
            arguments = passed | {name: _build(load, value) for name, value in networks}
            arguments |= {name: self._read(name, text) for name, text in self._of_type("Data", passed).items()} | more
            if self.shared.plan:
                plan = hf_stitch.plan(verb, **arguments)
                self.output.show(plan)
                self.output.record(plan.to_dict())
                raise typer.Exit
            result = verb(**arguments)
        if Processes.of(None).rank:
            raise typer.Exit
        return result

    def finish(self, result: Result, name: str, figures: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
        """Save a result and its figures (file -> arguments of ``plot``), show it, and write the page and the record."""
        saved = {} if self.shared.out is None else save(result, self.shared.out, name, figures)
        self.output.show(result)
        self.report(result, saved, {**result.to_dict(), **more})

    def report(self, result: Result | None, saved: Mapping[str, Path], record: Mapping[str, Any]) -> None:
        """Show the saved files, and write the page and the record."""
        if saved:
            self.output.show("saved " + ", ".join(map(str, saved.values())))
        if result is not None:
            self.output.report(result, self.shared.report)
        self.output.record({**record, "saved": {name: str(path) for name, path in saved.items()}})

    def _of_type(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if kind in self.parameters[name].kind.names}

    def _read(self, name: str, location: Any) -> Any:
        if name == "data":
            return self.shared.read(self.shared.split, self.shared.max_samples, self.seed)
        if isinstance(location, tuple):
            return tuple(self.shared.read_other(dataset, None, self.seed) for dataset in location)
        return self.shared.read_other(location, self.shared.max_samples, self.seed)


def command(verb: str, *, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Create a command from a verb ``module:function``, which is imported when the command runs (decorator).

    The decorated function accepts the :class:`Job`, and parameters for additional options. ``without`` names parameters
    of the verb and shared options that the command does not have.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        summary, verb_parameters = read(verb)
        own_options = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        left_out = {*without, *(p.name for p in own_options)}
        parameters = {p.name: p for p in verb_parameters if p.name not in left_out}
        required = [name for name, p in parameters.items() if p.default is REQUIRED]
        types = get_type_hints(Shared, include_extras=True)
        shared = [
            _option(p.name, types[p.name], REQUIRED if p.name in required else p.default)
            for p in fields(Shared)
            if p.name not in left_out
        ]
        names = {name: p.option for name, p in parameters.items()}
        verb_options = {name: _option_of(p, names) for name, p in parameters.items() if name not in types}
        for name, p in parameters.items():
            if "Data" not in p.kind.names if name == "data" else name in required and verb_options.get(name, p) is None:
                raise TypeError(
                    f"the annotation of {name} in {verb} does not define an option: annotate a network as str | "
                    "hf_stitch.Adapter, samples as hf_stitch.data.Data, or add it to without= and pass it to job.run"
                )

        def run(**values: Any) -> None:
            more = {p.name: values.pop(p.name) for p in own_options}
            shared_options = Shared(**{p.name: values.pop(p.name) for p in shared})
            arguments = {name: value for name, value in values.items() if value not in (None, [])}
            if shared_options.data is not None and "data" in parameters:
                arguments["data"] = shared_options.data
            function(Job(verb, parameters, arguments, shared_options), **more)

        own_parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own_options]
        options = [*filter(None, verb_options.values()), *own_parameters, *shared]
        options.sort(key=lambda p: p.default is not REQUIRED)
        command_function: Any = run
        command_function.__name__, command_function.__module__ = function.__name__, function.__module__
        command_function.__doc__ = without_markup(summary, names)
        command_function.__signature__ = inspect.Signature(options)
        command_function.__annotations__ = {p.name: p.annotation for p in options}
        return run

    return decorate


@contextmanager
def usage(option: str) -> Iterator[None]:
    """Convert an error in the value of an option to a usage error."""
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


def _build(build: Callable[[str], Any], argument: str | list[str]) -> Any:
    return [build(text) for text in argument] if isinstance(argument, list) else build(argument)


def _registry(parameter: Parameter) -> str | None:
    return next((METHODS[name] for name in parameter.kind.names if name in METHODS), None)


def _option_of(parameter: Parameter, names: Mapping[str, str]) -> inspect.Parameter | None:
    """Return the argument or option of a parameter, or ``None`` if the command line cannot set it."""
    kind, type_names = parameter.kind, parameter.kind.names - {"Mapping"}
    about, extra = first_sentence(parameter.about), dict[str, Any]()
    subject, option_type = re.split(r" ?[:(]|[,.]", about)[0], cast("Any", str)
    if type_names == {"StitchedModel"}:
        about = "A saved stitched model, or its Hub id, or a saved stitcher."
    elif "Adapter" in type_names:
        about = f"{subject}: {NAMES}."
    elif registry := _registry(parameter):
        about = f"{subject}: a name, or name:option=value,…; see hf-stitch list {registry}."
    elif type_names == {"Data"}:
        option_type = str if kind.count == 1 else tuple[(str,) * kind.count]  # type: ignore[misc]
        about = f"{about} As NAME or NAME:SPLIT."
    elif kind.choices:
        option_type = Literal[kind.choices]
    elif type_names == {"float", "int"}:
        option_type, extra = float, {"parser": share_or_count}
    elif type_names in ({"int"}, {"float"}):
        option_type, extra = (int if "int" in type_names else float), {"min": kind.low, "max": kind.high}
    elif type_names == {"bool"}:
        option_type = bool
    elif "Path" in type_names:
        option_type = Path
    elif type_names != {"str"}:
        return None
    if kind.is_list and type_names != {"StitchedModel"}:
        option_type = list[option_type]  # type: ignore[valid-type]
        about += "" if parameter.is_positional else " Repeatable."
    about = without_markup(about, names)
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    flags = f"{parameter.option}/--no-{parameter.option[2:]}" if default is True else parameter.option
    option: Any = typer.Argument(help=about) if parameter.is_positional else typer.Option(flags, help=about, **extra)
    annotation: Any = option_type | None if default is None else option_type
    return _option(parameter.name, Annotated[annotation, option], default)


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
