"""Sweep of :func:`hf_stitch_shorten.shorten` over model families: which families can be rebuilt with fewer blocks.

``python -m benchmarks.shorten_zoo`` updates ``docs/shorten_zoo.json``, with a row per family of :mod:`benchmarks.zoo`.
A second run resumes where the first run stopped. Each family runs in a separate process with a time limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from hf_stitch_shorten import shorten
from hf_stitch_shorten.maps import Change, matrix_of
from hf_stitch_shorten.plain import CannotBeRebuiltError
from hf_stitch_shorten.workflow import _Job, _State
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

import hf_stitch
from benchmarks import tiny, zoo, zoo_records
from hf_stitch import Adapter, Samples
from hf_stitch.running import WITHOUT_STATE, Run
from hf_stitch.tasks.base import logits_of

FILE = zoo_records.FILE.with_name("shorten_zoo.json")
SECONDS, SAMPLES, WORDS, NEW = 120, 44, 40, 8
SIZES = (64, 96, 128)
"""Sizes of images to try instead of the native size of timm."""

END = "</s>"
EXACT = 1e-5
"""Maximum difference between the rebuilt and the mapped network, over the largest output."""

CLOSE = 1e-4
"""The same for a saved and loaded network, with weights elsewhere in memory."""

MOST = 6
"""Maximum number of blocks to remove one by one."""

OUTCOMES = ("folds exactly", "drops exactly", "refused", "fails", "not examined")


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcome for one family.

    Attributes:
        suite: One of :data:`benchmarks.zoo.SUITES`.
        family: Module of ``timm.models``, or model type of transformers.
        model: Name of the timm model, or of the transformers class.
        outcome: One of :data:`OUTCOMES`.
        blocks: Number of blocks in stacks.
        joints: Number of blocks with a joint.
        tried: Number of blocks removed one by one, with a random change of the projection before them.
        exact: Number of tried blocks for which the rebuilt and the mapped network agree.
        error: Difference between the rebuilt network of :func:`shorten` and the mapped network, over the largest
            output.
        generation: Whether the saved and loaded network generates the same with and without a cache.
        reason: Message of a refusal or an error.
        seconds: Duration of the examination.
        versions: Versions of the libraries.
    """

    suite: str
    family: str
    model: str = ""
    outcome: str = "not examined"
    blocks: int = 0
    joints: int = 0
    tried: int = 0
    exact: int = 0
    error: float | None = None
    generation: str = ""
    reason: str = ""
    seconds: float = 0.0
    versions: str = zoo.VERSIONS


# -- samples ----------------------------------------------------------------------------------------------------------
def tokenizer(network: Adapter) -> Any:
    """Return a word tokenizer with the special ids of a network."""
    config = network.model.config.get_text_config()  # type: ignore[operator, union-attr]
    pad, mask = network.interface.pad_id or 0, getattr(config, "mask_token_id", None)
    most = getattr(config, "vocab_size", 200)
    free = [i for i in range(most) if i not in (*network.interface.special_ids, pad, mask)]
    mask = mask if isinstance(mask, int) and mask < most else free.pop()
    end = getattr(config, "eos_token_id", None)
    named = {"[PAD]": pad, "[MASK]": mask, "[UNK]": free[0], END: end if isinstance(end, int) else free[1]}
    vocabulary = {**named, **{f"w{place}": i for place, i in enumerate(free[2 : WORDS + 2])}}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


def of_small_images(network: Adapter) -> Adapter:
    """Return a network with small example images, if it accepts them, because forward passes take most of the time."""
    for size in SIZES:
        try:
            small = hf_stitch.load(network.model, example_inputs=torch.randn(2, 3, size, size))
            if small.layers:
                return small
        except Exception:  # networks can raise anything for a different size
            continue
    return network


def with_data(network: Adapter) -> tuple[Adapter, Any]:
    """Return a network that accepts raw samples, and the samples."""
    if network.library == "timm":
        network = of_small_images(network)
    draw = torch.Generator().manual_seed(0)
    if network.interface.modality != "text":
        example = network.example[network.interface.content[0]]
        return network, torch.randn(SAMPLES, *example.shape[1:], generator=draw)
    words = tokenizer(network)
    content = network.interface.content[0]
    tokens = network.example[content].shape[1]
    if content not in ("input_ids", "decoder_input_ids"):
        return network, torch.randint(3, len(words), (SAMPLES, tokens), generator=draw)
    ids = torch.randint(sum(word.startswith("w") for word in words.get_vocab()), (SAMPLES, tokens - 1), generator=draw)
    texts = [" ".join([*(f"w{i}" for i in row), END]) for row in ids.tolist()]
    return hf_stitch.load(network.model, example_inputs=network.example, processor=words), texts


# -- checks -----------------------------------------------------------------------------------------------------------
def one_by_one(network: Adapter, data: Any) -> dict[str, int]:
    """Remove single blocks, with a random change of the projection before them; compare rebuilt and mapped networks."""
    samples = Samples.of(data)
    with Run.of(shorten, {"progress": False}, takes=WITHOUT_STATE) as run:
        job = _Job(network, samples, samples, (), "refit", None, None, run)
        search = job._search(network)
        start = _State(network, {block: block for stack in search.stacks for block in stack.blocks})
        spans = search.intervals(1)
        spans = spans if len(spans) <= MOST else [spans[i * (len(spans) - 1) // (MOST - 1)] for i in range(MOST)]
        exact = 0
        for interval in spans:
            weight, bias = matrix_of(network.model.get_submodule(search.joints[interval.before].projection))
            noise = [0.3 * torch.randn_like(tensor) * tensor.std() for tensor in (weight, bias) if tensor is not None]
            change = Change(noise[0], noise[1] if bias is not None else None)
            with suppress(CannotBeRebuiltError):  # a refusal counts as tried, not as exact
                exact += job._without(start, search, interval, change).error <= EXACT
    return {"blocks": len(start.names), "joints": len(search.joints), "tried": len(spans), "exact": exact}


def loaded_again(suite: str, model: Any, folder: str) -> Any:
    """Load the network in a folder as users do, or by its class if the Auto class lacks a head for its config."""
    if suite == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    auto = getattr(transformers, tiny.SUITES[suite][1])
    return (auto if type(model.config) in auto._model_mapping else type(model)).from_pretrained(folder).eval()


def saved(suite: str, network: Adapter, save: Callable[[str], Any]) -> Any:
    """Save a network in a folder, load it, and return the loaded network or an error message."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(folder + "/saved")
            again = loaded_again(suite, network.model, folder + "/saved")
        inputs = {**network.interface.options, **network.example}
        return again if same(again, network.model, inputs) else "the folder contains a different network"
    except Exception as error:
        return one_line(error)


@torch.no_grad()
def same(model: Any, second: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether two networks have the same outputs up to rounding."""
    outputs, expected = logits_of(model(**inputs)), logits_of(second(**inputs))
    return float((outputs - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def generated(model: Any, ids: Tensor) -> tuple[list[int], ...]:
    """Return the tokens that a model generates with and without a cache."""
    options: Any = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return tuple(model.generate(ids, use_cache=cache, **options)[0].tolist() for cache in (True, False))


def generation(whole: Any, short: Any, again: Any, ids: Tensor) -> str:
    """Return whether a short network generates the same with and without a cache, if the whole network does."""
    try:
        whole_tokens = generated(whole, ids)
    except Exception as error:
        return f"not by the whole network: {type(error).__name__}: {error}"[:100]
    tokens = generated(again, ids)
    if tokens != generated(short, ids):
        return "DIFFERENT after loading"
    if tokens[0] != tokens[1]:
        return (
            "DIFFERENT with a cache"
            if whole_tokens[0] == whole_tokens[1]
            else "different with a cache, as in the whole network"
        )
    return "equal"


def examine(suite: str, family: str, name: str | None) -> Row:
    """Shorten the network of a family; errors are stored in the row."""
    start, row = time.perf_counter(), Row(suite, family)
    try:
        network, data = with_data(zoo.adapter_of(suite, family, name))
        row = dataclasses.replace(row, model=name or type(network.model).__name__)
    except Exception as error:
        return dataclasses.replace(row, reason=one_line(error))
    try:
        row = dataclasses.replace(row, **one_by_one(network, data))
        row = examined(row, network, data)
    except Exception as error:
        row = dataclasses.replace(row, outcome="refused" if clear(error) else "fails", reason=one_line(error))
    return dataclasses.replace(row, seconds=round(time.perf_counter() - start, 1))


def examined(row: Row, network: Adapter, data: Any) -> Row:
    """Shorten a network, with a refit or, if this fails, without a map, and check the result."""
    options: Any = {"remove": 1, "progress": False}
    try:
        shortened, outcome = shorten(network, data, **options), "folds exactly"
    except ValueError as error:
        if isinstance(error, CannotBeRebuiltError) or not clear(error):
            raise
        shortened, outcome = shorten(network, data, matcher="drop", **options), "drops exactly"
        row = dataclasses.replace(row, reason=one_line(error))
    assert shortened.model is not None
    row = dataclasses.replace(row, outcome=outcome if shortened.error <= EXACT else "fails", error=shortened.error)
    again = saved(row.suite, shortened.model, shortened.save_pretrained)
    if isinstance(again, str):
        whole: Any = network.model
        save = partial(timm.models.save_for_hf, whole, safe_serialization=True)
        of_whole = isinstance(saved(row.suite, network, save if row.suite == "timm" else whole.save_pretrained), str)
        outcome = row.outcome if of_whole else "fails"
        return dataclasses.replace(row, outcome=outcome, generation="as the whole network: " * of_whole + again[:100])
    inputs = {**network.interface.options, **network.example}
    if row.suite == "causal":
        ids = inputs[network.interface.content[0]][:1]
        verdict = generation(network.model, shortened.model.model, again, ids)
        row = dataclasses.replace(row, generation=verdict, outcome="fails" if "DIFFERENT" in verdict else row.outcome)
    return row


def clear(error: Exception) -> bool:
    """Return whether an error is a refusal of this project, not an internal error."""
    return isinstance(error, ValueError) and "hf_stitch" in traceback.extract_tb(error.__traceback__)[-1].filename


def one_line(error: Exception) -> str:
    """Return an error as one line."""
    message = zoo.told(error)
    return message.partition(": ")[2] if clear(error) else message


# -- the sweep --------------------------------------------------------------------------------------------------------
def main() -> None:
    """Update the rows, and print the number of families per outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=zoo.SUITES, action="append", help="suite, repeatable; default: all")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="families that match, e.g. 'resnet*'")
    parser.add_argument("--again", choices=OUTCOMES, action="append", default=[], help="examine these outcomes again")
    parser.add_argument("--rows", type=Path, default=FILE, help="file of the rows [default: docs/shorten_zoo.json]")
    options = parser.parse_args()
    zoo.quiet()
    done = {(row.suite, row.family): row for row in zoo_records.rows_of(Row, options.rows)}
    families = [
        (suite, family)
        for suite in options.suite or zoo.SUITES
        for family in zoo.families(suite)
        if fnmatch.fnmatch(family, options.only)
        and ((suite, family) not in done or done[suite, family].outcome in options.again)
    ]
    records = zoo_records.read()
    names = {key: record.model for key, record in records.items() if key[0] == "timm"}
    families.sort(key=lambda key: (records[key].seconds if key in records else None) or 0.0)  # quick families first
    zoo.adapter_of("text", "llama")  # import shared modules before forking
    for suite, family in tqdm(families, "families", file=sys.stderr):
        fields = zoo.apart(partial(examine, suite, family, names.get((suite, family))), SECONDS)
        row = done[suite, family] = Row(**{"suite": suite, "family": family, **fields})
        zoo_records.write_rows((done_row for _, done_row in sorted(done.items())), options.rows)
        print(*(value for value in dataclasses.astuple(row)[:-1] if value != ""), flush=True)
    for suite in zoo.SUITES:
        print(suite, dict(Counter(row.outcome for row in done.values() if row.suite == suite)))


if __name__ == "__main__":
    main()
