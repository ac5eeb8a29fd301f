"""What a verb takes, read from its source (parameters, types, defaults, descriptions), and messages in these words.

Nothing is imported, because verbs import torch: ``hf-stitch stitch --help`` takes a part of a second.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from hf_stitch.plugins import tree_of

LEAVES = ("Data", "Adapter", "StitchedModel")
"""Types with a meaning of their own on the command line, whose definitions are not looked up."""

GIVEN: ContextVar[Sequence[str]] = ContextVar("given", default=())
"""The arguments of the command that runs."""

CALL = re.compile(r"([\w.]+\([^()]*\))")
"""Calls of Python, which keep their arguments."""

COLUMN = "text_pair"
"""An option that is also the name of a column, which stays as it is."""


@dataclass(frozen=True)
class Kind:
    """What an annotation takes."""

    names: frozenset[str] = frozenset()  # types, with aliases resolved
    choices: tuple[str, ...] = ()  # of a Literal
    low: float | None = None
    high: float | None = None
    is_list: bool = False
    count: int = 1  # length of a tuple

    def __or__(self, other: Kind) -> Kind:
        """Return what a union takes."""
        main = other if other.names or other.choices else self
        choices = self.choices + other.choices
        return replace(main, names=self.names | other.names, choices=choices, is_list=self.is_list or other.is_list)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a verb."""

    name: str
    kind: Kind
    default: Any  # inspect.Parameter.empty: required; None: no default, or one that only Python can tell
    about: str  # description in the docstring
    is_positional: bool = False

    @property
    def option(self) -> str:
        """Its argument or option, which is in the singular if it can be repeated. Data are an option everywhere."""
        if self.is_positional and self.name != "data":
            return self.name.upper()
        words = self.name.split("_")
        return "--" + "-".join(word.removesuffix("s") if self.kind.is_list else word for word in words)


def read(verb: str) -> tuple[str, list[Parameter]]:
    """Return the summary of a verb, ``module:function``, and its parameters, with those of the options of its run."""
    module, _, name = verb.partition(":")
    functions = {each.name: each for each in tree_of(module).body if isinstance(each, ast.FunctionDef)}
    if (function := functions.get(name)) is None:
        raise ValueError(f"{module} defines no function {name!r}: name the verb of a command as module:function")
    summary, about = _described(function)
    arguments = function.args
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    parts = [
        *zip(arguments.args, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = [
        Parameter(
            each.arg, kind_of(each.annotation, module), _default(default, module), about.get(each.arg, ""),
            each in arguments.args,
        )
        for each, default in parts
    ]  # fmt: skip
    return summary, [*found, *_of_the_run(about.get("options", ""))]


def kind_of(annotation: ast.expr | None, module: str) -> Kind:
    """Return what an annotation in a module takes."""
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return kind_of(left, module) | kind_of(right, module)
        case ast.Subscript(ast.Name("Literal"), values):
            choices = ast.literal_eval(values)
            return Kind(choices=choices if isinstance(choices, tuple) else (choices,))
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([inner, *constraints])):
            ends = [ast.literal_eval(end) for each in constraints if isinstance(each, ast.Call) for end in each.args]
            return replace(kind_of(inner, module), **dict(zip(("low", "high"), ends, strict=False)))
        case ast.Subscript(ast.Name("Iterable" | "Sequence"), inner):
            return replace(kind_of(inner, module), is_list=True)
        case ast.Subscript(ast.Name("tuple"), ast.Tuple(parts)):
            return replace(kind_of(parts[0], module), count=len(parts))
        case ast.Name(name) if name not in LEAVES and (found := _definition(name, module)):
            return kind_of(*found)
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Subscript(ast.Name(name)):
            return Kind(frozenset([name]))
    return Kind()


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    return re.split(r"(?<=[.?])\s+(?=[A-Z`(])", " ".join(text.split()))[0]


def without_markup(text: str, names: Mapping[str, str]) -> str:
    """Return reStructuredText as plain text, in which parameters have the names of their options."""
    text = re.sub(r" \(:\w+:`[^`]+`\)|[;,] (?:see|as in) :\w+:`[^`]+`|:\w+(?=:`)", "", text)  # what explains Python
    text = re.sub(r":?`+~?([^`]+)`+", r"``\1``", text)

    def written(found: re.Match[str]) -> str:
        name, equals, value = found[1].replace('"', "").partition("=")
        return f"{names[name]} {value}".rstrip() if name in names else name + equals + value

    return re.sub(r"``(.+?)``", written, text).replace("[", r"\[")  # else rich takes what is in brackets for a style


def in_options(message: str, command: Any) -> str:
    """Replace arguments of Python by the options of a command: ``task='image'`` by ``--task image``."""
    options = {str(each.name): each.opts[0] for each in command.params if each.opts[0].startswith("--")}
    for side, layer in (("a", "source_layer"), ("b", "target_layer")):  # of a comparison inside of the verb
        if layer in options:
            options[f"layers_{side}"] = options[layer]
    if not options:
        return message
    long = sorted((name for name in options if "_" in name and name != COLUMN), reverse=True)
    given = rf"(?<![\w/.'\"-])({'|'.join(sorted(options, reverse=True))})=('[^']*'|[^\s,;)]*)"
    bare = rf"(?<![\w/.'\"-])({'|'.join(long)})(?![\w/.'\"=-])" if long else r"(?!)"

    def option_of(found: re.Match[str]) -> str:
        value = (found[2] or "").strip("'") if found.re.groups > 1 else ""
        return options[found[1]] + (f" {value}" if value else "")

    parts = CALL.split(message)
    parts[::2] = [re.sub(bare, option_of, re.sub(given, option_of, part)) for part in parts[::2]]
    return "".join(parts)


def _definition(name: str, module: str) -> tuple[ast.expr, str] | None:
    """Return what a name in a module stands for, and the module that says so; nothing for a class."""
    for each in tree_of(module).body:
        match each:
            case ast.Assign([ast.Name(found)], value) if found == name:
                return value, module
            case ast.ImportFrom(str(other), names) if other.startswith("hf_stitch"):
                if any(name == (alias.asname or alias.name) for alias in names):
                    return _definition(name, other)
    return None


def _default(node: ast.expr | None, module: str) -> Any:
    if node is None:
        return inspect.Parameter.empty
    if isinstance(node, ast.Name) and (found := _definition(node.id, module)):
        node = found[0]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _described(node: ast.FunctionDef | ast.ClassDef) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring, and its descriptions of parameters or attributes."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    section = re.search(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", f"{text}\n", re.MULTILINE)
    entries = re.findall(r"^    \**(\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
    return text.partition("\n\n")[0], dict(entries)


def _of_the_run(options: str) -> Iterator[Parameter]:
    """Return the options of a run that a verb uses, which the description of its ``**options`` names."""
    module = "hf_stitch.running"
    classes = {each.name: each for each in tree_of(module).body if isinstance(each, ast.ClassDef)}
    about = _described(classes["RunOptions"])[1]
    for each in classes["Run"].body:
        match each:
            case ast.AnnAssign(ast.Name(name), annotation, value) if name in about and f"``{name}``" in options:
                yield Parameter(name, kind_of(annotation, module), _default(value, module), about[name])
