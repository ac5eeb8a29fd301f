"""Signatures of verbs, read from their source (parameters, types, defaults, descriptions), and messages with options.

Verbs are not imported, because they import torch: ``hf-stitch stitch --help`` takes a fraction of a second.
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
"""Types with a special meaning on the command line; their definitions are not looked up."""

GIVEN: ContextVar[Sequence[str]] = ContextVar("given", default=())
"""Arguments of the running command."""

CALL = re.compile(r"([\w.]+\([^()]*\))")
"""Calls of Python functions; their arguments are not replaced."""

COLUMN = "text_pair"
"""An option that is also the name of a column, which is not replaced."""


@dataclass(frozen=True)
class Kind:
    """Values that an annotation allows."""

    names: frozenset[str] = frozenset()  # types, with aliases resolved
    choices: tuple[str, ...] = ()  # of a Literal
    low: float | None = None
    high: float | None = None
    is_list: bool = False
    count: int = 1  # length of a tuple

    def __or__(self, second: Kind) -> Kind:
        """Return the union of the allowed values."""
        base = second if second.names or second.choices else self
        choices = self.choices + second.choices
        return replace(base, names=self.names | second.names, choices=choices, is_list=self.is_list or second.is_list)


@dataclass(frozen=True)
class Parameter:
    """Parameter of a verb."""

    name: str
    kind: Kind
    default: Any  # inspect.Parameter.empty: required; None: without a default or a literal default
    about: str  # description in the docstring
    is_positional: bool = False

    @property
    def option(self) -> str:
        """Name of its argument or option, in the singular if repeatable. Data are always an option."""
        if self.is_positional and self.name != "data":
            return self.name.upper()
        words = self.name.split("_")
        return "--" + "-".join(word.removesuffix("s") if self.kind.is_list else word for word in words)


def read(verb: str) -> tuple[str, list[Parameter]]:
    """Return the summary of a verb, ``module:function``, and its parameters, including the options of its run."""
    module, _, name = verb.partition(":")
    functions = {node.name: node for node in tree_of(module).body if isinstance(node, ast.FunctionDef)}
    if (function := functions.get(name)) is None:
        raise ValueError(
            f"{module} does not define a function {name!r}; a command must refer to its verb as module:function"
        )
    summary, descriptions = _summary_and_descriptions(function)
    arguments = function.args
    no_defaults = [None] * (len(arguments.args) - len(arguments.defaults))
    nodes = [
        *zip(arguments.args, [*no_defaults, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    parameters = [
        Parameter(
            node.arg, kind_of(node.annotation, module), _default(default, module), descriptions.get(node.arg, ""),
            node in arguments.args
        )
        for node, default in nodes
    ]  # fmt: skip
    return summary, [*parameters, *_of_the_run(descriptions.get("options", ""))]


def kind_of(annotation: ast.expr | None, module: str) -> Kind:
    """Return the values that an annotation in a module allows."""
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return kind_of(left, module) | kind_of(right, module)
        case ast.Subscript(ast.Name("Literal"), values):
            choices = ast.literal_eval(values)
            return Kind(choices=choices if isinstance(choices, tuple) else (choices,))
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([inner, *constraints])):
            ends = [ast.literal_eval(end) for call in constraints if isinstance(call, ast.Call) for end in call.args]
            return replace(kind_of(inner, module), **dict(zip(("low", "high"), ends, strict=False)))
        case ast.Subscript(ast.Name("Iterable" | "Sequence"), inner):
            return replace(kind_of(inner, module), is_list=True)
        case ast.Subscript(ast.Name("tuple"), ast.Tuple(parts)):
            return replace(kind_of(parts[0], module), count=len(parts))
        case ast.Name(name) if name not in LEAVES and (definition := _definition(name, module)):
            return kind_of(*definition)
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Subscript(ast.Name(name)):
            return Kind(frozenset([name]))
    return Kind()


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    return re.split(r"(?<=[.?])\s+(?=[A-Z`(])", " ".join(text.split()))[0]


def without_markup(text: str, names: Mapping[str, str]) -> str:
    """Return reStructuredText as plain text, with parameters replaced by their options."""
    text = re.sub(r" \(:\w+:`[^`]+`\)|[;,] (?:see|as in) :\w+:`[^`]+`|:\w+(?=:`)", "", text)  # Python objects
    text = re.sub(r":?`+~?([^`]+)`+", r"``\1``", text)

    def written(match: re.Match[str]) -> str:
        name, equals, value = match[1].replace('"', "").partition("=")
        return f"{names[name]} {value}".rstrip() if name in names else name + equals + value

    return re.sub(r"``(.+?)``", written, text).replace("[", r"\[")  # rich would interpret brackets as a style


def in_options(message: str, command: Any) -> str:
    """Replace Python arguments by the options of a command: ``task='image'`` by ``--task image``."""
    options = {str(p.name): p.opts[0] for p in command.params if p.opts[0].startswith("--")}
    for side, layer in (("a", "source_layer"), ("b", "target_layer")):  # of a comparison inside the verb
        if layer in options:
            options[f"layers_{side}"] = options[layer]
    if not options:
        return message
    long_names = sorted((name for name in options if "_" in name and name != COLUMN), reverse=True)
    assignment = rf"(?<![\w/.'\"-])({'|'.join(sorted(options, reverse=True))})=('[^']*'|[^\s,;)]*)"
    bare_name = rf"(?<![\w/.'\"-])({'|'.join(long_names)})(?![\w/.'\"=-])" if long_names else r"(?!)"

    def option_of(match: re.Match[str]) -> str:
        value = (match[2] or "").strip("'") if match.re.groups > 1 else ""
        return options[match[1]] + (f" {value}" if value else "")

    parts = CALL.split(message)
    parts[::2] = [re.sub(bare_name, option_of, re.sub(assignment, option_of, part)) for part in parts[::2]]
    return "".join(parts)


def _definition(name: str, module: str) -> tuple[ast.expr, str] | None:
    """Return the value of a name in a module, and the module that defines it; ``None`` for a class."""
    for node in tree_of(module).body:
        match node:
            case ast.Assign([ast.Name(assigned_name)], value) if assigned_name == name:
                return value, module
            case ast.ImportFrom(str(source), names) if source.startswith("hf_stitch"):
                if any(name == (alias.asname or alias.name) for alias in names):
                    return _definition(name, source)
    return None


def _default(node: ast.expr | None, module: str) -> Any:
    if node is None:
        return inspect.Parameter.empty
    if isinstance(node, ast.Name) and (definition := _definition(node.id, module)):
        node = definition[0]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _summary_and_descriptions(node: ast.FunctionDef | ast.ClassDef) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring, and its descriptions of parameters or attributes."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    section = re.search(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", f"{text}\n", re.MULTILINE)
    entries = re.findall(r"^    \**(\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
    return text.partition("\n\n")[0], dict(entries)


def _of_the_run(options: str) -> Iterator[Parameter]:
    """Yield the options of a run that the description of ``**options`` of a verb names."""
    module = "hf_stitch.running"
    classes = {node.name: node for node in tree_of(module).body if isinstance(node, ast.ClassDef)}
    descriptions = _summary_and_descriptions(classes["RunOptions"])[1]
    for node in classes["Run"].body:
        match node:
            case ast.AnnAssign(ast.Name(name), annotation, value) if name in descriptions and f"``{name}``" in options:
                yield Parameter(name, kind_of(annotation, module), _default(value, module), descriptions[name])
