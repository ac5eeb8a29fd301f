"""Cached activations are those of the network bit for bit, and every change of what decides them is noticed."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.adapters import CutInfo
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.pins import Pins
from hf_stitch.analysis import Activations, caching, extract_activations
from hf_stitch.analysis.caching import NetworkCache
from hf_stitch.cli import app
from hf_stitch.storage.cache import Cache

from tiny_networks import SIZE, WORDS, adapted, build, network, plain_tokenizer  # isort: skip
from processes import run_ranks  # isort: skip

ARGUMENTS: dict[str, Any] = {"batch_size": 8, "progress": False}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of every forward; all run through one method."""
    seen: list[int] = []
    run = Adapter._run

    def counting(self: Adapter, inputs: Any, **trial: bool) -> Any:
        seen.append(len(inputs[self.interface.content[0]]))
        return run(self, inputs, **trial)

    monkeypatch.setattr(Adapter, "_run", counting)
    return seen


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(20, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def sentences() -> list[str]:
    """Texts that are padded to another length in each batch."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, size=2 + place % 9)) for place in range(20)]


def small(seed: int = 0, act: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), act or nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def loaded(net: nn.Module, **options: Any) -> Adapter:
    return hf_stitch.load(net, example_inputs=torch.randn(2, 4), **options)


def rows(count: int = 20) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def assert_same(found: Activations, expected: Activations) -> None:
    assert found.fingerprint == expected.fingerprint  # ids, pooling, grids, names and bytes in their order
    assert found.layers == expected.layers and found.pooling == expected.pooling and found.grids == expected.grids
    for name, values in expected.values.items():
        assert found.values[name].dtype == values.dtype and torch.equal(found.values[name], values)
    assert (found.mask is None) == (expected.mask is None)
    assert found.mask is None or torch.equal(found.mask, expected.mask)


IMAGES, ENCODERS, DECODERS = ("vit", "cnn", "swin", "deit"), ("bert", "roberta", "t5"), ("gpt2", "llama")
POOLINGS: dict[str, tuple[str, ...]] = {"none": IMAGES + ENCODERS + DECODERS, "mean": IMAGES + ENCODERS + DECODERS}
POOLINGS |= {"cls": ("vit", "deit", "bert"), "last": DECODERS}


@pytest.mark.parametrize(("pooling", "family"), [(each, name) for each, names in POOLINGS.items() for name in names])
def test_cached_activations_are_those_of_the_network_bit_for_bit(
    family: str, pooling: Any, tmp_path: Path, pixels: Any, sentences: Any, forwards: list[int]
) -> None:
    adapter = network(family)
    data = sentences if adapter.interface.modality == "text" else pixels
    plain = extract_activations(adapter, data, pooling=pooling, **ARGUMENTS)
    first = extract_activations(adapter, data, pooling=pooling, cache=tmp_path, **ARGUMENTS)
    forwards.clear()
    again = extract_activations(
        adapted(family, copy.deepcopy(adapter.model)), data, pooling=pooling, cache=tmp_path, **ARGUMENTS
    )
    assert forwards == []  # not even to list the layers
    assert_same(first, plain)
    assert_same(again, plain)
    if pooling == "none":
        assert any(values.dim() == 3 for values in again.values.values())
        assert (again.mask is not None) == (adapter.interface.modality == "text")
        assert bool(again.grids) == (family in IMAGES)


def test_half_of_the_layers_take_one_pass_for_the_others_only(tmp_path: Path, forwards: list[int]) -> None:
    adapter, data = loaded(small()), rows()
    names = ["0", "1", "2", "3"]
    plain = extract_activations(adapter, data, layers=[*names, "0"], **ARGUMENTS)  # one that is named twice counts once
    extract_activations(adapter, data, layers=["2", "0"], cache=tmp_path, **ARGUMENTS)
    before = {entry.key: entry.path.stat().st_ino for entry in Cache(tmp_path).entries()}
    forwards.clear()
    found = extract_activations(adapter, data, layers=names, cache=tmp_path, **ARGUMENTS)
    assert forwards == [8, 8, 4]
    assert_same(found, plain)
    after = {entry.key: entry.path.stat().st_ino for entry in Cache(tmp_path).entries()}
    assert len(after) == 4 and all(after[key] == inode for key, inode in before.items())  # not written again
    forwards.clear()
    turned = extract_activations(adapter, data, layers=names[::-1], cache=tmp_path, **ARGUMENTS)
    assert forwards == []
    assert_same(turned, extract_activations(adapter, data, layers=names[::-1], **ARGUMENTS))


def of_a_user(x: Any) -> Any:
    return torch.as_tensor(x) * 1.0


def of_another_user(x: Any) -> Any:
    return torch.as_tensor(x) * 2.0


class Net(nn.Module):
    """A network of user code, with an option that neither weights nor state dict contain."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.slope = nn.Linear(4, 8), nn.Linear(8, 2), slope

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(input) * self.slope)


def changed(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(net.parameters()).view(-1)[0].add_(1e-6)
    return net


def other_sample() -> torch.Tensor:
    data = rows()
    data[7, 2] += 1e-6
    return data


def hooked() -> nn.Module:
    net = small()
    net[1].register_forward_hook(lambda module, inputs, output: output * 2)
    return net


CHANGES: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "a weight": lambda: (loaded(changed(small())), rows(), {}),
    "a module without weights": lambda: (loaded(small(act=nn.GELU())), rows(), {}),
    "an option of a module": lambda: (loaded(small(act=nn.LeakyReLU(0.1))), rows(), {}),
    "a hook": lambda: (loaded(hooked()), rows(), {}),
    "dtype": lambda: (hf_stitch.load(small().double(), example_inputs=torch.randn(2, 4).double()), rows(), {}),
    "the order of the samples": lambda: (loaded(small()), hf_stitch.Samples.of(rows()).select(range(19, -1, -1)), {}),
    "one sample": lambda: (loaded(small()), other_sample(), {}),
    "fewer samples": lambda: (loaded(small()), rows()[:19], {}),
    "layer": lambda: (loaded(small()), rows(), {"layers": ["0"]}),
    "pooling": lambda: (loaded(small()), rows(), {"pooling": "none"}),
    "batch size": lambda: (loaded(small()), rows(), {"batch_size": 7}),
    "a processor": lambda: (loaded(small(), processor=of_a_user), rows(), {}),
    "another processor": lambda: (loaded(small(), processor=of_another_user), rows(), {}),
    "user code": lambda: (loaded(Net()), rows(), {"layers": ["first"]}),
    "an option of user code": lambda: (loaded(Net(2.0)), rows(), {"layers": ["first"]}),
}


def test_every_change_is_another_entry(tmp_path: Path) -> None:
    standard = {"layers": ["2"], **ARGUMENTS, "cache": tmp_path}
    extract_activations(loaded(small()), rows(), **standard)
    for number, (change, made) in enumerate(CHANGES.items(), 2):
        adapter, data, options = made()
        for _ in range(2):
            found = extract_activations(adapter, data, **{**standard, **options})
            assert len(Cache(tmp_path).entries()) == number, change
        plain = extract_activations(adapter, data, **{**standard, **options, "cache": False})
        assert_same(found, plain)
    extract_activations(loaded(small()), rows(), **standard)  # with other random values in its example
    assert len(Cache(tmp_path).entries()) == len(CHANGES) + 1


@pytest.mark.parametrize("changing", ["hf_stitch", "torch", "transformers", "timm", "pillow"])
def test_every_version_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changing: str) -> None:
    standard = {"layers": ["2"], **ARGUMENTS, "cache": tmp_path}
    extract_activations(loaded(small()), rows(), **standard)
    versions = caching.versions()
    if changing in versions:
        monkeypatch.setattr(caching, "versions", lambda: {**versions, changing: "99"})
    else:
        monkeypatch.setattr(caching, "version", lambda name: "99")
    extract_activations(loaded(small()), rows(), **standard)
    assert len(Cache(tmp_path).entries()) == 2


def test_a_kept_list_of_cuts_is_that_of_the_network_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    def cuts(adapter: Adapter) -> list[CutInfo]:
        forwards.clear()
        return NetworkCache(Cache(tmp_path), adapter).cuts()

    adapter = loaded(small())
    plain = [adapter.cut_info(layer) for layer in adapter.layers]
    assert cuts(adapter) == plain and {each.status for each in plain} == {"verified"}
    assert cuts(loaded(small())) == plain and not forwards
    of_networks = [
        name for name in CHANGES if not set(name.split()) & {"sample", "samples", "layer", "pooling", "batch"}
    ]
    assert len(of_networks) == 9
    for number, name in enumerate(of_networks, 2):
        other = CHANGES[name]()[0]
        assert cuts(other) == list(map(other.cut_info, other.layers)) and len(Cache(tmp_path).entries()) == number, name
    monkeypatch.setattr(caching, "versions", lambda: {"torch": "99"})
    assert cuts(loaded(small())) == plain and forwards


def test_settings_of_torch_that_change_numbers(tmp_path: Path) -> None:
    standard = {"layers": ["2"], **ARGUMENTS, "cache": tmp_path}
    plain = extract_activations(loaded(small()), rows(), **standard)
    with torch.autocast("cpu", torch.bfloat16):
        cast = extract_activations(loaded(small()), rows(), **standard)
    assert cast.values["2"].dtype == torch.bfloat16
    assert_same(extract_activations(loaded(small()), rows(), **standard), plain)
    assert len(Cache(tmp_path).entries()) == 2


PROGRAM = """
import sys, torch, hf_stitch
from hf_stitch.analysis import extract_activations
from hf_stitch.storage.cache import Cache
from pathlib import Path
class Net(torch.nn.Module):  # of no file
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    def forward(self, input):
        return self.second(self.first(input) * FACTOR)
FACTOR = 2
adapter = hf_stitch.load(Net(), example_inputs=torch.randn(2, 4))
for change in sys.argv[2:]:
    exec(change)
    extract_activations(adapter, torch.ones(3, 4), layers=["first"], cache=sys.argv[1], progress=False)
    print(len(Cache(Path(sys.argv[1])).entries()))
"""


@pytest.mark.slow
def test_programs_of_no_file_and_the_precision_of_torch(tmp_path: Path) -> None:
    changes = ["pass", "FACTOR = 3", "torch.set_float32_matmul_precision('medium')"]
    if hasattr(torch.backends.cudnn, "conv"):
        changes.append("torch.backends.cudnn.conv.fp32_precision = 'ieee'")
    for counted in (range(1, len(changes) + 1), [len(changes)] * len(changes)):
        output = subprocess.check_output([sys.executable, "-c", PROGRAM, str(tmp_path), *changes])
        assert [int(line) for line in output.split()] == list(counted)


def test_the_number_of_threads_changes_the_last_bits(tmp_path: Path, one_thread: None) -> None:
    for number, threads in enumerate((1, 2, 1), 1):
        torch.set_num_threads(threads)
        extract_activations(loaded(small()), rows(), layers=["2"], cache=tmp_path, **ARGUMENTS)
        assert len(Cache(tmp_path).entries()) == min(number, 2)


def test_processors_of_texts_and_images(tmp_path: Path, sentences: Any) -> None:
    """The vocabulary of a tokenizer, the attention of transformers, and the transform of timm."""

    def texts(model: nn.Module, tokenizer: Any) -> int:
        adapter = hf_stitch.load(model, processor=tokenizer)
        extract_activations(adapter, sentences, cache=tmp_path, layers=["bert.encoder.layer.1"], **ARGUMENTS)
        return len(Cache(tmp_path).entries())

    model, left, more = build("bert", 0), plain_tokenizer(), plain_tokenizer()
    assert texts(model, plain_tokenizer()) == texts(build("bert", 0), plain_tokenizer()) == 1
    left.padding_side = "left"
    more.add_tokens(["w1 w2"])
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert (texts(model, left), texts(model, more), texts(eager, plain_tokenizer())) == (2, 3, 4)
    draw = np.random.default_rng(0)
    pictures = [Image.fromarray(draw.integers(0, 255, (40, 48, 3), dtype=np.uint8)) for _ in range(9)]
    for crop, entries in ((1.0, 5), (0.9, 6), (1.0, 6)):
        torch.manual_seed(0)
        cfg = {"input_size": (3, SIZE, SIZE), "crop_pct": crop}
        net = timm.create_model("resnet10t", channels=(16, 24, 32, 48), pretrained_cfg_overlay=cfg)
        extract_activations(net, pictures, layers=["layer2.0"], cache=tmp_path, **ARGUMENTS)
        assert len(Cache(tmp_path).entries()) == entries


def test_a_saved_network_has_the_entries_of_the_live_one(tmp_path: Path, pixels: Any, forwards: list[int]) -> None:
    live = network("vit")
    live.model.save_pretrained(tmp_path / "vit")
    first = extract_activations(live, pixels, layers=["vit.layers.1"], cache=tmp_path / "cache", **ARGUMENTS)
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "vit")
    again = adapted("vit", model)
    forwards.clear()
    assert_same(
        extract_activations(again, pixels, layers=["vit.layers.1"], cache=tmp_path / "cache", **ARGUMENTS), first
    )
    assert forwards == []


def test_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwards: list[int]) -> None:
    monkeypatch.setenv("HF_STITCH_CACHE", str(tmp_path / "mine"))
    adapter = loaded(small())
    extract_activations(adapter, rows(), layers=["0"], **ARGUMENTS)
    assert not (tmp_path / "mine").exists()
    first = extract_activations(adapter, rows(), layers=["0"], cache=True, **ARGUMENTS)
    forwards.clear()
    assert_same(extract_activations(adapter, rows(), layers=["0"], cache=str(tmp_path / "mine"), **ARGUMENTS), first)
    assert forwards == []
    (entry,) = Cache(tmp_path / "mine").entries()
    assert {name: entry.about[name] for name in ("layer", "samples", "pooling", "dtype", "device")} == {
        "layer": "0", "samples": 20, "pooling": "mean", "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    pinned = adapter.pinned
    assert entry.about["network"] == f"Sequential {pinned.weights_hash[7:15]}"
    assert entry.about["weights"] == pinned.weights_hash
    assert entry.about["data"] == hf_stitch.Samples.of(rows()).fingerprint and entry.about["modality"] == "tensor"


def test_a_broken_entry_is_recorded_again(tmp_path: Path) -> None:
    adapter = loaded(small())
    first = extract_activations(adapter, rows(), layers=["0"], cache=tmp_path, **ARGUMENTS)
    (entry,) = Cache(tmp_path).entries()
    content = bytearray(entry.path.read_bytes())
    content[-5] ^= 4
    entry.path.write_bytes(content)
    with pytest.warns(UserWarning, match="broken"):
        assert_same(extract_activations(adapter, rows(), layers=["0"], cache=tmp_path, **ARGUMENTS), first)
    assert_same(extract_activations(adapter, rows(), layers=["0"], cache=tmp_path, **ARGUMENTS), first)


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    adapter = loaded(small())
    with pytest.warns(UserWarning, match="not cached"):
        found = extract_activations(adapter, rows(), layers=["0"], cache=tmp_path / "file" / "cache", **ARGUMENTS)
    assert_same(found, extract_activations(adapter, rows(), layers=["0"], **ARGUMENTS))


def test_a_file_or_an_empty_name_is_no_cache(tmp_path: Path, forwards: list[int]) -> None:
    (tmp_path / "saved.npz").write_text("activations")
    with pytest.raises(ValueError, match="must be a folder"):
        extract_activations(loaded(small()), rows(), cache=tmp_path / "saved.npz", **ARGUMENTS)
    with pytest.raises(ValueError, match="cache must be True, False or a folder"):
        extract_activations(loaded(small()), rows(), cache="", **ARGUMENTS)
    assert forwards == []


def test_what_fails_is_not_cached(tmp_path: Path) -> None:
    adapter = loaded(small())
    with pytest.raises(hf_stitch.NotACutError):
        extract_activations(adapter, rows(), layers=["0", "none"], cache=tmp_path, **ARGUMENTS)
    assert Cache(tmp_path).entries() == []


def test_activations_that_were_read_are_compared_and_may_be_changed(tmp_path: Path) -> None:
    adapter = loaded(small())
    first = extract_activations(adapter, rows(), cache=tmp_path, **ARGUMENTS)
    second = extract_activations(adapter, rows(), cache=tmp_path, **ARGUMENTS)
    scores = hf_stitch.compare(second, second, metrics=["linear_cka"], progress=False)
    assert scores["linear_cka"].diagonal().tolist() == pytest.approx([1.0] * len(first.layers))
    shutil.rmtree(tmp_path)
    assert_same(second, first)
    for values in second.values.values():
        values.zero_()


def as_one_of_several(rank: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate sets the number of threads, which is part of the key
    adapter = loaded(small())
    counted = []
    run = Adapter._run

    def counting(self: Adapter, inputs: Any, **trial: bool) -> Any:
        counted.append(1)
        return run(self, inputs, **trial)

    data = rows(21)
    for place in ("first", "second"):
        Adapter._run = counting
        found = extract_activations(adapter, data, cache=folder / f"cache {rank}", **ARGUMENTS)
        Adapter._run = run
        np.savez(folder / f"{place}-{rank}.npz", **{name: values.numpy() for name, values in found.values.items()})
        (folder / f"{place}-{rank}.txt").write_text(str(len(counted)))
        counted.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_of_several_processes_one_writes_and_all_have_the_same(tmp_path: Path, one_thread: None) -> None:
    count = 3
    run_ranks(count, as_one_of_several, tmp_path)
    plain = extract_activations(loaded(small()), rows(21), **ARGUMENTS)
    assert sorted(path.name for path in tmp_path.glob("cache*")) == ["cache 0"]  # each was given a folder of its own
    for rank in range(count):
        for place in ("first", "second"):
            values = np.load(tmp_path / f"{place}-{rank}.npz")
            assert list(values) == list(plain.values)
            assert all(np.array_equal(values[name], plain.values[name].numpy()) for name in values), (place, rank)
        assert int((tmp_path / f"first-{rank}.txt").read_text()) > 0
        assert (tmp_path / f"second-{rank}.txt").read_text() == "0"
    entries = Cache(tmp_path / "cache 0").entries()
    assert len(entries) == len(plain.layers) + 1
    assert_same(extract_activations(loaded(small()), rows(21), cache=tmp_path / "cache 0", **ARGUMENTS), plain)
    assert len(Cache(tmp_path / "cache 0").entries()) == len(entries)  # one process reads what several have written


def test_a_cache_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert Cache(Path("~/own")).folder == tmp_path / "home" / "own"
    extract_activations(network("cnn"), torch.rand(4, 3, 32, 32), cache="~/own", progress=False)
    assert [place.name for place in tmp_path.iterdir()] == ["home"]


def doubled(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.Linear.forward(self, x)


def pins_of(folder: Path, *, offloaded: bool, patched: bool) -> tuple[str, dict[str, str]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    if patched:
        model[2].forward = MethodType(doubled, model[2])
    if offloaded:
        accelerate.dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=folder)
        assert model[2].weight.is_meta
    pins = Pins(without_weights=model)
    return pins.hash(model), pins.versions()


def test_an_offloaded_network_has_the_pins_of_the_one_in_memory(tmp_path: Path) -> None:
    plain, patched = (pins_of(tmp_path, offloaded=False, patched=each) for each in (False, True))
    assert plain != patched
    assert pins_of(tmp_path, offloaded=True, patched=False) == plain
    assert pins_of(tmp_path, offloaded=True, patched=True) == patched


def test_a_key_of_no_digits_is_that_of_no_entry(tmp_path: Path) -> None:
    Cache(tmp_path).write("ab" * 32, {"values": torch.ones(2)}, {})
    ended = CliRunner().invoke(app, ["cache", "rm", "", "--yes", "--folder", str(tmp_path)])
    assert ended.exit_code and len(Cache(tmp_path).entries()) == 1
