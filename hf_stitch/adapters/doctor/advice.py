"""What to do about a network that cannot be cut, by where that came to light, with code that does it."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_stitch.adapters.base import SMALL, Adapter
from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import NotACutError
from hf_stitch.adapters.discovery.survey import Survey
from hf_stitch.adapters.info import Explanation
from hf_stitch.adapters.loading import load
from hf_stitch.adapters.overrides.base import Override, full_name

CONTENTS = ("input_ids", "pixel_values")
"""What networks of transformers that take several things take."""

MOST_OTHERS = 12
"""Modules beside the candidates that are tried as cuts."""


@dataclass(frozen=True)
class Advice:
    """Sentences, and a snippet of Python that does what they say (or an empty text)."""

    sentences: tuple[str, ...] = ()
    snippet: str = ""


@dataclass(frozen=True)
class Asked:
    """What was to be loaded, and how."""

    model: Any
    options: Mapping[str, Any]

    def load(self, **more: str) -> str:
        """The call that loads it, as code, with more arguments (as code)."""
        first = _quoted(self.model) if isinstance(self.model, str) else "model"
        plain = {n: v for n, v in self.options.items() if isinstance(v, (str, bool, int, float))}
        arguments = [
            first,
            *(f"{name}={text}" for name, text in ({n: _quoted(v) for n, v in plain.items()} | more).items()),
        ]
        if not any("\n" in argument for argument in arguments):
            return f"hf_stitch.load({', '.join(arguments)})"
        return "hf_stitch.load(\n" + textwrap.indent("".join(f"{argument},\n" for argument in arguments), "    ") + ")"


def on_loading(error: Exception) -> Advice:
    """About files that cannot be loaded; most errors say it themselves."""
    if isinstance(error, ImportError):
        return Advice(("It needs a package that is not installed: install it, and ask again.",))
    if isinstance(error, OSError):
        return Advice(("Check its name, its revision and the connection.",))
    return Advice()


def on_inputs(asked: Asked, model: nn.Module) -> Advice:
    """About a network whose inputs cannot be made up, or were given and do not fit, which the error says."""
    if any(asked.options.get(name) is not None for name in ("example_inputs", "content")):
        return Advice()
    return Advice(
        (
            "Load it with a batch of its inputs, as below, or register an override that makes one "
            "(docs/adapters.md), so that it need not be said again.",
        ),
        _with_example(asked, model, {}),
    )


def on_forward(asked: Asked, adapter: Adapter, tried_by: str) -> Advice:
    """About a forward that fails."""
    if tried_by == "example_inputs":
        return Advice(("It says so of the example_inputs that were passed: model(**example_inputs) must run.",))
    if tried_by != "made up":
        return Advice((f"They were made {tried_by}: mend its example.",))
    if (body := _body(asked, adapter)) is not None:
        return body
    return Advice(
        (
            "They were made up, and it needs others: pass a batch that it runs with, with shapes as below or yours. Of "
            "several inputs, content says which one the cuts lie behind.",
        ),
        _with_example(asked, adapter.model, adapter.example),
    )


def on_survey(asked: Asked, adapter: Adapter, error: Exception) -> Advice:
    """About a forward that runs, and an output of which nothing can be told."""
    text, body = str(error), _body(asked, adapter)
    if "different outputs for the same input" in text:
        said = "Switch what is random off: by an argument of its forward (options of an override) or in its config."
    elif "no module turns" in text:
        said = "Pass its embeddings as the input, floating-point example_inputs, if its forward takes them."
    elif isinstance(error, ValueError):
        said = ""
    else:
        said = (
            "It ran on the inputs above, and fails on other numbers of samples or tokens, which cuts are verified "
            "with: its forward must take them."
        )
    return Advice((*([said] if said else []), *(body.sentences if body else ())), body.snippet if body else "")


def on_layers(asked: Asked, adapter: Adapter, layers: tuple[Explanation, ...]) -> Advice:
    """About candidates that are refused, or that there are none, or few."""
    verified = [e for e in layers if e.status == "verified"]
    refused = [e for e in layers if e.status == "refused"]
    sentences = list(_on_bypasses(refused))
    if adapter.interface.content == ("input_ids",) and "decoder_input_ids" in adapter.interface.given:
        sentences.append(
            "It reads two texts, and these cuts are in its encoder. Of its decoder: --content decoder_input_ids, in "
            'Python load(…, content="decoder_input_ids").'
        )
    if any(e.plan == "full" for e in verified):
        sentences.append(
            "Cuts of plan full are exact, but what precedes them runs too: the code between the modules needs it."
        )
    if len(verified) >= 2:
        return Advice(tuple(sentences))
    if adapter.interface.modality == "text" and any("another way than through it" in e.reason for e in refused):
        more = _on_ids(asked, adapter)
    else:
        more = _on_few(asked, adapter, layers, len(verified))
    return Advice((*sentences, *more.sentences), more.snippet)


def _on_bypasses(refused: list[Explanation]) -> Iterator[str]:
    if any("bypasses it" in e.reason for e in refused):
        yield (
            "What bypasses a refused layer cannot be overridden: a cut lies where the ways meet again, at the end of "
            "the block or stage that both are in."
        )


def _on_ids(asked: Asked, adapter: Adapter) -> Advice:
    """About code that looks at token ids after the cut."""
    ends = " and ".join(map(str, adapter.interface.special_ids)) or "none"
    told = (
        "What follows reads the token ids themselves, as heads do that look for the end of a text. Of these it is "
        f"shown {ends} alone (padding and end of text of a config): if it looks for others, "
    )
    if not isinstance(asked.model, str):
        return Advice((f"{told}name them in special_ids of an override (docs/adapters.md).",))
    config: Any = adapter.model.config
    end = getattr(adapter.processor, "eos_token_id", None) or config.get_text_config().vocab_size - 1
    return Advice(
        (f"{told}say so.",),
        _lines(
            "import hf_stitch",
            "",
            f"a = {asked.load(eos_token_id=f'{end}')}",
            "print(a.layers)",
        ),
    )


def _on_few(asked: Asked, adapter: Adapter, layers: tuple[Explanation, ...], verified: int) -> Advice:
    """About a network with less than two cuts: modules, outputs or parts of it that can be cut."""
    kind = type(adapter.model).__name__
    if next(adapter.model.children(), None) is None:
        return Advice(
            (f"{kind} has no modules inside, and cuts lie behind modules: cut the network that it is part of.",)
        )
    if not layers:
        told = (
            f"Everything flows through no single module of {kind}: two ways or more run side by side from its input to "
            "its output."
        )
        found = _one_output(asked, adapter) or _body(asked, adapter)
        return Advice((told, *found.sentences), found.snippet) if found else Advice((told,))
    if others := _others(adapter, layers):
        told = f"These are cuts too, though no blocks: {', '.join(others)}. Ask for them by name (explain, encode), or "
        if type(adapter.override) is not Override:
            return Advice((f"{told}name them among the blocks of the override {type(adapter.override).__name__}.",))
        return Advice((f"{told}have them listed by an override:",), _override_of_blocks(asked, adapter, layers, others))
    if body := (None if verified else _body(asked, adapter)):
        return body
    return Advice(("No other module that everything flows through is a cut either.",) if not verified else ())


def _others(adapter: Adapter, layers: tuple[Explanation, ...]) -> tuple[str, ...]:
    """Cuts beside the candidates: what everything flows through, made there and not yet the output."""
    if sum(p.numel() for p in adapter.model.parameters()) > SMALL:
        return ()
    candidates = {e.layer for e in layers}
    names = [
        name
        for name, call in adapter._survey().trace.calls.items()
        if name not in ("", *candidates)
        and len(call.outputs) == 1
        and any(s.dominates and not s.is_output and s.given is None for s in call.seen().values())
    ]
    return tuple(name for name in names[:MOST_OTHERS] if adapter.explain(name).status == "verified")


def _override_of_blocks(
    asked: Asked, adapter: Adapter, layers: tuple[Explanation, ...], others: tuple[str, ...]
) -> str:
    kind = type(adapter.model)
    calls = adapter._survey().trace.calls
    cuts = [e.layer for e in layers if e.status == "verified"]
    blocks = sorted((*cuts, *others), key=lambda name: calls[name].exited)
    return _lines(
        "import torch",
        "import hf_stitch",
        "from hf_stitch.adapters import Override",
        "",
        "",
        f'@hf_stitch.registries.overrides.register("{full_name(kind)}")',
        f"class For{kind.__name__}(Override):",
        "    def blocks(self, model):",
        f"        return ({', '.join(map(_quoted, blocks))},)",
        "",
        "",
        f"a = {_again(asked, adapter)}",
        "print(a.layers)",
    )


def _body(asked: Asked, adapter: Adapter) -> Advice | None:
    """A network of transformers without its head, where that has cuts."""

    model: Any = adapter.model
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or getattr(model, prefix, model) is model:
        return None
    try:
        layers = load(getattr(model, prefix)).layers
    except Exception:  # it is no better than the whole
        return None
    if not layers:
        return None
    return Advice(
        (f"Its body alone, model.{prefix}, can be cut: {len(layers)} cuts from {layers[0]} to {layers[-1]}.",),
        _lines(
            "import torch",
            "import hf_stitch",
            "",
            *_loaded(asked, adapter),
            f"a = hf_stitch.load(model.{prefix})",
            "print(a.layers)",
        ),
    )


def _one_output(asked: Asked, adapter: Adapter) -> Advice | None:
    """One of several outputs, where everything that this one is made of flows through blocks."""
    for path in tree.tensors(adapter.forward(adapter.example)):
        if not path:
            return None
        alone = Survey(adapter.model, _Output(adapter, path), adapter.interface, adapter.example)
        if cuts := list(_cuts_of(alone)):
            place = "".join(f"[{_quoted(key)}]" for key in path)
            return Advice(
                (f"One of its outputs alone, output{place}, can be cut at {', '.join(cuts)}: wrap it so.",),
                _wrapped(asked, adapter, place),
            )
    return None


def _cuts_of(survey: Survey) -> Iterator[str]:
    """The blocks that are verified; none where the output does not depend on the input."""
    with suppress(ValueError):
        for name in survey.blocks:
            with suppress(NotACutError):
                survey.plan(name)
                yield name


@dataclass(frozen=True)
class _Output:
    """Runs a network and gives one of its outputs."""

    adapter: Adapter
    path: tree.Path

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        return tree.tensors(self.adapter.forward(inputs))[self.path]


def _wrapped(asked: Asked, adapter: Adapter, place: str) -> str:
    names = list(adapter.example)
    given = {**{name: name for name in names}, **{n: repr(v) for n, v in adapter.interface.options.items()}}
    return _lines(
        "import torch",
        "import hf_stitch",
        "",
        "",
        "class OneOutput(torch.nn.Module):",
        "    def __init__(self, model):",
        "        super().__init__()",
        "        self.model = model",
        "",
        f"    def forward(self, {', '.join(names)}):",
        f"        return self.model({', '.join(f'{n}={text}' for n, text in given.items())}){place}",
        "",
        "",
        *_loaded(asked, adapter),
        f"a = hf_stitch.load(OneOutput(model), example_inputs={_example(adapter.model, adapter.example)})",
        "print(a.layers)",
    )


def _loaded(asked: Asked, adapter: Adapter) -> list[str]:
    """The line that gives ``model``, where only its name was given."""
    return [f"model = {_again(asked, adapter)}.model"] if isinstance(asked.model, str) else []


def _again(asked: Asked, adapter: Adapter) -> str:
    """The same call, with inputs of the same shapes where some were given."""
    given = asked.options.get("example_inputs") is not None
    return asked.load(**({"example_inputs": _example(adapter.model, adapter.example)} if given else {}))


def _with_example(asked: Asked, model: nn.Module, tried: Mapping[str, Any]) -> str:
    """Loading with a batch of inputs that is made in the open."""
    example = _example(model, tried)
    several = all(f'"{name}"' in example for name in CONTENTS) and asked.options.get("content") is None
    more = {"content": _quoted("pixel_values")} if several else {}
    return _lines(
        "import torch",
        "import hf_stitch",
        "",
        f"a = {asked.load(**more, example_inputs=example)}",
        "print(a.layers)",
    )


def _example(model: nn.Module, tried: Mapping[str, Any]) -> str:
    """A batch of inputs, as code: what was tried, what the forward cannot do without, and what it may lack."""
    parameters = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    main = [str(model.main_input_name)] if hasattr(model, "main_input_name") else []
    contents = [name for name in CONTENTS if name in parameters and hasattr(model, "config")]
    lines = [
        f"    {_entry(model, name, tried.get(name))}\n" for name in dict.fromkeys((*main, *tried, *needed, *contents))
    ]
    return "{\n" + "".join(lines) + "}"


def _entry(model: nn.Module, name: str, tried: Any) -> str:
    """One line of it, with the shape that the documentation of the forward gives."""
    documented = re.search(
        rf"^\s*{re.escape(name)} \(.*?of shape `?\((.+?)\)", inspect.getdoc(model.forward) or "", re.M
    )
    axes = documented[1].split(", ") if documented else []
    code, told = _code(model, name, tried), f"({', '.join(axes)})" if axes else ""
    if code is None:
        code, told = _guessed(model, axes), f"{told or 'samples first'}: the sizes are yours to say"
    return f'"{name}": {code},' + (f"  # {told}" if told else "")


def _code(model: nn.Module, name: str, tried: Any) -> str | None:
    """Code that makes an argument, where it is known how."""
    config: Any = getattr(model, "config", None)
    if isinstance(tried, Tensor):
        shape = ", ".join(map(str, tried.shape))
        if tried.is_floating_point() or tried.is_complex():
            return f"torch.randn({shape}, dtype={tried.dtype})" if tried.is_complex() else f"torch.randn({shape})"
        if not tried.numel():
            return f"torch.zeros({shape}, dtype={tried.dtype})"
        low, high = int(tried.min()), int(tried.max())
        ones = low == high == 1
        return f"torch.ones({shape}, dtype=torch.long)" if ones else f"torch.randint({low}, {high + 1}, ({shape}))"
    if tried is not None:
        return repr(tried)
    if config is not None and name == "input_ids":
        return f"torch.randint(3, {config.get_text_config().vocab_size}, (2, 6))"
    if config is not None and name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return f"torch.randn(2, {getattr(vision, 'num_channels', 3)}, {height}, {width})"
    return None


def _guessed(model: nn.Module, axes: list[str]) -> str:
    """Numbers of a shape that only its axes are known of: sizes that the config has under these names, else any."""
    sizes = [getattr(getattr(model, "config", None), axis, 16) for axis in axes[1:]] or [16]
    return f"torch.randn({', '.join(map(str, (2, *(size if isinstance(size, int) else 16 for size in sizes))))})"


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _lines(*lines: str) -> str:
    return "\n".join(lines)
