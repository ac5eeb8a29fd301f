"""Writing the files of an artefact, and reading them strictly.

Files may be untrusted. Sizes in a config are not used before they match the headers of the weights, nothing is
unpickled, and names of files to open are never taken from a file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch.offloading import State
from hf_stitch.printing import visible, warn
from hf_stitch.records import AGAIN

STITCHER, STITCH = "stitcher.json", "stitch.safetensors"
CONFIG = "config.json"
BOTH = {
    STITCHER: "a stitcher; load it with hf_stitch.Stitcher.from_pretrained",
    CONFIG: "a whole model; if this is a stitched model, load it with hf_stitch.StitchedModel.from_pretrained",
}
"""The records, and what a folder with them contains."""

WEIGHTS, SHARDS, INDEX = "model.safetensors", "model*.safetensors", "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"
"""Tokenizer of the source, for two decoders with different tokenizers. The processor is then that of the target."""
MODULE = "modeling_hf_stitch.py"
"""Module for programs that cannot import hf_stitch, which ``auto_map`` in the config names. It is never run here."""
ANCHORS = ("anchors.json", "anchors.safetensors")
"""Files of the anchors, for artefacts that have some."""

MODEL_FILES = [CONFIG, SHARDS, INDEX, MODULE, *ANCHORS, "*.json", "*.txt", "*.model", "*.spm", "*.jinja"]
"""Name patterns of the files of a stitched model; the last ones are for processors and the generation config."""

PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model", "*.spm",
)  # fmt: skip
"""Name patterns of files that processors consist of."""

BESIDE = (*PROCESSORS, "generation_config.json", SOURCE_TOKENIZER)
"""Name patterns of files that processors and generation configs consist of."""

STITCHES = "stitch*.safetensors"
"""Name pattern of the weights of a stitcher and of those inside it."""

STITCHER_FILES = [STITCHER, STITCHES, CONFIG, *ANCHORS]
"""Name patterns of the files of a stitcher; a config identifies a folder that contains a whole model instead."""


def kind_of(folder: Path) -> str:
    """Return the name of the record in a folder: that of a stitcher, or the config of a whole model."""
    for name in (STITCHER, CONFIG):
        if (folder / name).is_file():
            return name
    below = [str(each) for each in sorted(folder.glob("*/")) if any((each / name).is_file() for name in BOTH)]
    raise FileNotFoundError(
        f"{folder} has neither {STITCHER} nor {CONFIG}: it contains no stitcher and no stitched model"
        + (f"; name one of its subfolders: {', '.join(below)}" if below else "")
    )


def record_in(folder: Path, name: str) -> Path:
    """Return the path of the record in a folder, if it is of this kind."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder} has no {name}: it contains {BOTH[kind_of(folder)]}")
    return folder / name


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of weights that are another one, with the same memory, and the first name of that one."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in (weights.entries if isinstance(weights, State) else weights).items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if first.setdefault(memory, name) != name:
                found[name] = first[memory]
    return found


def share(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Let weights of a model be others of it, by their names, as :func:`ties` returns them."""
    for name, kept in tied.items():
        (place, _, key), (other, _, its) = name.rpartition("."), kept.rpartition(".")
        setattr(model.get_submodule(place), key, getattr(model.get_submodule(other), its))


def save_weights(
    weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int, tied: Mapping[str, str]
) -> None:
    """Write weights as safetensors, split into several files if they are large; one file is in memory at a time."""
    written = {name: tensor for name, tensor in described(weights).items() if name not in tied}
    plan = split_torch_state_dict_into_shards(written, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = _untied({name: weights[name].detach().cpu().contiguous() for name in names})
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def described(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without values, on the meta device."""
    if isinstance(weights, State):
        return weights.described
    return {name: tensor.to("meta") for name, tensor in weights.items()}


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy weights that share memory, because a file cannot hold them."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() and key in seen:
            weights[name] = tensor.clone()
        seen.add(key)
    return weights


def save_beside(saves: Iterable[Any], folder: Path) -> None:
    """Save objects other than the weights (processor, generation config), without subfolders."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        for each in saves:
            each.save_pretrained(fresh)
        for path in Path(fresh).iterdir():
            if path.is_file():
                path.rename(folder / path.name)


@contextmanager
def named_files(folder: Path, names: Container[str]) -> Iterator[Path]:
    """Provide a folder with only those files that a record names, for libraries that read whatever they find.

    A warning names the files that are left out.
    """
    here = sorted(path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file())
    unread = [path.name for path in here if path.name not in names]
    if not unread:
        yield folder
        return
    warn(
        f"{folder} also contains {visible(', '.join(unread))}, which was not saved with the artefact and is not read; "
        "delete it, or pass allow_modified=True to read it"
    )
    with tempfile.TemporaryDirectory() as view:
        for path in here:
            if path.name in names:
                shutil.copyfile(path, Path(view) / path.name)
        yield Path(view)


def load_strictly(model: nn.Module, files: list[Path], tied: Mapping[str, str] | None = None) -> None:
    """Load safetensors into a model without weights. Names and shapes must match exactly; dtypes are as saved.

    Headers are compared before any weight is read.
    """
    state: dict[str, Tensor] = {}
    for file, names in check_headers(model, files, tied or {}).items():
        state |= read_weights(file, names, tied or {})
    model.load_state_dict(state, strict=True, assign=True)
    share(model, tied or {})


def check_headers(model: nn.Module, files: list[Path], tied: Mapping[str, str]) -> dict[Path, list[str]]:
    """Compare the headers of safetensors with a model; no weight is read."""
    expected = model.state_dict()
    place: dict[str, Path] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for name, kept in tied.items():
        others[kept].append(name)
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for kept in weights.keys():  # noqa: SIM118 - not a mapping
                    for name in (kept, *others[kept]):
                        if name in place:
                            raise ValueError(f"{file} and {place[name].name} both contain {name!r}; {AGAIN}")
                        place[name] = file
                        _check_header(file, name, expected.get(name), weights.get_slice(kept))
        except ValueError:
            raise
        except Exception as error:
            raise _unreadable(file, error) from error
    missing = sorted(expected.keys() - place.keys())
    if missing:
        raise ValueError(
            f"{files[0].parent} lacks {len(missing)} weights of the model in its config: {', '.join(missing[:5])}"
        )
    if lost := sorted(others.keys() - place.keys()):
        raise ValueError(
            f"{files[0].parent} has no weight {lost[0]!r}, which tied_weights in its config names; {AGAIN}"
        )
    return {file: [name for name in place if place[name] == file] for file in files}


def read_weights(file: Path, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Read weights of a file into memory."""
    try:
        with safe_open(file, framework="pt") as weights:
            # Copied: the alignment of memory-mapped weights varies, and the rounding of convolutions with it.
            wanted = {name: tied.get(name, name) for name in names}
            read = {kept: weights.get_tensor(kept).clone() for kept in set(wanted.values())}
            return {name: read[kept] for name, kept in wanted.items()}
    except Exception as error:
        raise _unreadable(file, error) from error


def _check_header(file: Path, name: str, expected: Tensor | None, header: Any) -> None:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if expected is None or tuple(expected.shape) != shape:
        want = "no such weight" if expected is None else f"shape {tuple(expected.shape)}"
        raise ValueError(f"{file} and its config disagree about {name!r}: expected {want}, found shape {shape}")
    if expected.is_floating_point() != dtype.startswith(("F", "BF")):
        raise ValueError(
            f"{file} and its config disagree about {name!r}: expected {expected.dtype}, found {dtype}; {AGAIN}"
        )


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({error}); the file is damaged or incomplete: {AGAIN}")
