"""Self-test of an installation: what hf-stitch does, on tiny networks with random weights, without downloads."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import timm
import torch
import transformers
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import hf_stitch
from hf_stitch.adapters import Adapter
from hf_stitch.artefacts.cache import NAME
from hf_stitch.artefacts.joining import joined_to_itself
from hf_stitch.resources import one_thread
from hf_stitch.results import Result
from hf_stitch.stitches.layer import paired_rows

if TYPE_CHECKING:
    import pandas

__all__ = ["Outcome", "SelfTest", "self_test"]

WORDS, NEW_TOKENS, RIDGE = 60, 8, 1.0
BODY: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
LANGUAGE: dict[str, Any] = dict(  # with weights as large as these, all earlier tokens matter for the next one
    vocab_size=WORDS + 2, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=1
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came out of a part of the self-test.

    Attributes:
        name: What it checks.
        seconds: How long it took.
        error: Class and message of the error, and the line of code that raised it; empty if the part passed.

    Example:
        >>> Outcome("compare", 0.1).error
        ''
    """

    name: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class SelfTest(Result):
    """The result of :func:`self_test`.

    Attributes:
        parts: All parts, in order.

    Example:
        >>> found = SelfTest((Outcome("compare", 0.1), Outcome("generate with a cache", 0.2, "KeyError: 'cache'")))
        >>> found.failed, found.passed
        (('generate with a cache',), False)
    """

    derived: ClassVar[tuple[str, ...]] = ("passed",)

    parts: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the parts that failed."""
        return tuple(part.name for part in self.parts if part.error)

    @property
    def passed(self) -> bool:
        """Whether all parts passed."""
        return not self.failed

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each part, with the columns ``name``, ``seconds`` and ``error``."""
        import pandas

        return pandas.DataFrame(map(asdict, self.parts), columns=["name", "seconds", "error"])

    def __rich__(self) -> Table:
        """Return a table of the parts."""
        table = Table("self-test", "seconds", "result")
        for part in self.parts:
            shown = Text(f"failed: {part.error}", "red") if part.error else Text("passed")
            table.add_row(part.name, f"{part.seconds:.1f}", shown)
        return table


def self_test(started: Callable[[str], object] = lambda name: None) -> SelfTest:
    """Check that hf-stitch works with the installed libraries, in a few seconds and without a connection.

    A part that fails does not stop the others. The parts:

    - ``cut a vision transformer``, ``cut a decoder``: at every cut, the identity stitch changes no bit of the outputs.
    - ``stitch two decoders``, ``stitch a CNN into a ViT``: the ridge regression of networks of different widths
      satisfies the normal equations, and the outputs of the stitched model are finite.
    - ``compare a network with itself``: the linear CKA of each layer with itself is 1.
    - ``generate with a cache``: a stitched decoder fills a cache, and generates the same tokens as without one.
    - ``continue a padded batch``: it continues texts that are padded on the left as it continues each of them alone.
    - ``save and load``: the outputs of a stitched model that was saved and loaded are the same, bit for bit.

    Args:
        started: Called with the name of each part before it runs.

    Returns:
        The outcome of each part. An error names what differs, or comes from a library.

    Example:
        >>> self_test().failed
        ()
    """
    found = []
    for name, part in PARTS.items():
        started(name)
        start, error = time.perf_counter(), ""
        try:
            with one_thread():
                part()
        except Exception as raised:  # a library can raise anything
            error = _line(raised)
        found.append(Outcome(name, time.perf_counter() - start, error))
    return SelfTest(tuple(found))


def _line(error: BaseException) -> str:
    """Describe an error in one line, with the line of code that raised it unless it is a failed check."""
    line, frames = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, AssertionError):
        line += f" ({'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno})"
    return " ".join(line.split())


# -- networks and samples ----------------------------------------------------------------------------------------------


def _load(build: Callable[[], Any], **options: Any) -> Adapter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf_stitch.load(build().eval(), **options)


@cache
def _vit() -> Adapter:
    config = transformers.ViTConfig(**BODY, image_size=32, patch_size=8)
    return _load(lambda: transformers.ViTForImageClassification(config))


@cache
def _cnn() -> Adapter:
    images = torch.stack(_images()[:2])
    return _load(lambda: timm.create_model("resnet10t", channels=(16, 24, 32, 48)), example_inputs=images)


@cache
def _llama() -> Adapter:
    config = transformers.LlamaConfig(**BODY, **LANGUAGE)
    return _load(lambda: transformers.LlamaForCausalLM(config), processor=_tokenizer())


@cache
def _gpt2() -> Adapter:
    config = transformers.GPT2Config(n_embd=24, n_layer=3, n_head=4, n_positions=64, **LANGUAGE)
    return _load(lambda: transformers.GPT2LMHeadModel(config), processor=_tokenizer())


def _tokenizer() -> Any:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number + 2 for number in range(WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _texts(seed: int = 1) -> list[str]:
    """Texts of 2 to 9 words."""
    words = torch.randint(WORDS, (40, 9), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{word}" for word in row[: 2 + number % 8]) for number, row in enumerate(words)]


def _images(seed: int = 1) -> list[Tensor]:
    return list(torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(seed)))


def _stitch(source: Adapter, target: Adapter, samples: Callable[[int], list[Any]]) -> Any:
    """Stitch the middle layers by ridge regression, which random weights make no better than a baseline."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is no better than ")
        return hf_stitch.stitch(
            source, target, samples(1), source_layer=source.layers[1], target_layer=target.layers[1], matcher="ridge",
            ridge=RIDGE, test_data=samples(2), progress=False,
        )  # fmt: skip


@cache
def _stitched_decoders() -> Any:
    return _stitch(_llama(), _gpt2(), _texts)


# -- parts -------------------------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition is true, under ``python -O`` too."""
    if not condition:
        raise AssertionError(message)


@torch.no_grad()
def _check_cuts(network: Adapter, samples: list[Any]) -> None:
    _require(len(network.layers) == 3, f"the network has 3 blocks, but these cuts: {', '.join(network.layers)}")
    inputs = network.preprocess(samples)
    expected = network.model(**inputs).logits
    for layer in network.layers:
        stitched: Any = joined_to_itself(network, layer, network.task)
        _require(stitched(**inputs).logits.equal(expected), f"the identity stitch at {layer} changes the outputs")


@torch.no_grad()
def _check_ridge(model: Any, source: Adapter, target: Adapter, samples: list[Any]) -> None:
    """Compare the map with the solution of the normal equations, and require finite outputs."""
    sides = ((source, source.layers[1]), (target, target.layers[1]))
    first, second = (network.encode(network.preprocess(samples), [at])[at] for network, at in sides)
    x, y = (rows.double() for rows in paired_rows(first, second, "none")["body"])
    centred = x - x.mean(0)
    weight = torch.linalg.solve(centred.T @ centred + RIDGE * torch.eye(x.shape[1]), centred.T @ (y - y.mean(0)))
    expected, got = centred @ weight + y.mean(0), model.stitch.body(x.float())
    gap = ((got - expected).norm() / expected.norm()).item()
    _require(gap < 1e-4, f"the map differs from ridge regression by {gap:.1g} of its outputs")
    logits = model(**source.preprocess(samples)).logits
    _require(bool(logits.isfinite().all()), "the stitched model outputs numbers that are not finite")


def _check_comparison(network: Adapter, samples: list[Any]) -> None:
    atlas = hf_stitch.compare(network, network, samples, metrics=["linear_cka"], progress=False)
    for layer, value in zip(network.layers, next(iter(atlas.values.values())).diagonal(), strict=True):
        _require(abs(value - 1) < 1e-6, f"the linear CKA of {layer} with itself must be 1, got {value}")


def _generate(model: Any, texts: list[str], **options: Any) -> Any:
    fixed = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(**model.preprocess(texts), **fixed, **options)


def _check_cache(model: Any, texts: list[str]) -> None:
    found, without = _generate(model, texts), _generate(model, texts, use_cache=False)
    _require(found.sequences.equal(without.sequences), "the tokens with a cache differ from those without one")
    filled: Any = found.get(NAME)
    _require(filled is not None, "the model uses no cache: the output of generate contains none")
    expected, length = found.sequences.shape[1] - 1, filled.get_seq_length()
    _require(length == expected, f"the cache must contain {expected} tokens, got {length}")


def _check_padding(model: Any, texts: list[str]) -> None:
    together = _generate(model, texts).sequences[:, -NEW_TOKENS:]
    for text, tokens in zip(texts, together.tolist(), strict=True):
        alone = _generate(model, [text]).sequences[0, -NEW_TOKENS:].tolist()
        _require(tokens == alone, f"{text!r} continues in a padded batch by {tokens}, alone by {alone}")


@torch.no_grad()
def _check_round_trip(model: Any, texts: list[str]) -> None:
    inputs = model.preprocess(texts)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps files that are mapped
        model.save_pretrained(folder)
        again: Any = hf_stitch.StitchedModelForCausalLM.from_pretrained(folder)
        same = again(**inputs).logits.equal(model(**inputs).logits)
    _require(same, "the outputs of the loaded model differ from those of the saved one")


PARTS: dict[str, Callable[[], object]] = {
    "cut a vision transformer": lambda: _check_cuts(_vit(), _images()),
    "cut a decoder": lambda: _check_cuts(_llama(), _texts()),
    "stitch two decoders": lambda: _check_ridge(_stitched_decoders(), _llama(), _gpt2(), _texts()),
    "stitch a CNN into a ViT": lambda: _check_ridge(_stitch(_cnn(), _vit(), _images), _cnn(), _vit(), _images()),
    "compare a network with itself": lambda: _check_comparison(_vit(), _images()),
    "generate with a cache": lambda: _check_cache(_stitched_decoders(), _texts()[-3:]),
    "continue a padded batch": lambda: _check_padding(_stitched_decoders(), _texts()[-3:]),
    "save and load": lambda: _check_round_trip(_stitched_decoders(), _texts()),
}
"""Name -> what raises an error if this part of the installation does not work."""
