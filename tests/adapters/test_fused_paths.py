"""PyTorch's fused path: networks that have one are run on the plain path, which no mode changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from families import Code
from torch import Tensor, nn
from torch.backends import mha

import hf_stitch
from hf_stitch.adapters.cutting.forwards import evaluating, plain
from hf_stitch.adapters.doctor import diagnose

WIDTH = 16
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "without gradients": torch.no_grad,
    "with gradients": torch.enable_grad,
    "inference": torch.inference_mode,
}


class Encoder(nn.Module):
    """A text network with ``nn.TransformerEncoder``."""

    def __init__(
        self, *, masked: bool = True, nested: bool = True, norm_first: bool = False, batch_first: bool = True
    ) -> None:
        super().__init__()
        self.masked, self.batch_first = masked, batch_first
        self.words = nn.Embedding(50, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = self.encoder(
            x if self.batch_first else x.transpose(0, 1),
            src_key_padding_mask=attention_mask == 0 if self.masked else None,
        )
        return self.head(x[:, 0] if self.batch_first else x[0])


LAYERS = ("encoder.layers.0", "encoder.layers.1")
VARIANTS: dict[str, dict[str, bool]] = {
    "nested": {},
    "without a mask": {"masked": False},
    "tokens first": {"batch_first": False},
    "norm and tokens first, padded, without a mask": {
        "masked": False, "nested": False, "norm_first": True, "batch_first": False,
    },
}  # fmt: skip


def texts(batch: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (batch, 7), generator=torch.Generator().manual_seed(batch))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5], [2], [6]][:batch])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def encoder(seed: int = 0, **options: bool) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(**options).eval()


def loaded(seed: int = 0, processor: Any = None, **options: bool) -> hf_stitch.Adapter:
    return hf_stitch.load(encoder(seed, **options), example_inputs=texts(2), processor=processor)


WORDS = [" ".join("abcdefghijklm"[i : 3 + 2 * i]) for i in range(8)]
"""Texts of different lengths."""


pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")


@pytest.fixture(autouse=True)
def _path_is_restored() -> Iterator[None]:
    """Every test leaves the fused path enabled, as PyTorch sets it."""
    assert mha.get_fastpath_enabled()
    yield
    assert mha.get_fastpath_enabled()


@pytest.mark.parametrize("variant", VARIANTS)
def test_encoders_are_cut_exactly_in_every_mode(variant: str) -> None:
    adapter, inputs = loaded(**VARIANTS[variant]), texts()
    assert adapter.layers == LAYERS
    outputs = []
    for mode in MODES.values():
        with mode():
            outputs.append(adapter.forward(inputs).detach().clone())
            for name, found in adapter.encode(inputs, LAYERS).items():
                assert not found.values.is_nested
                assert torch.equal(adapter.decode(found, name), outputs[-1])
            assert torch.equal(adapter.back(name)(adapter.front(name)(**inputs)), outputs[-1])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


class Around(nn.Module):
    """A network of one kind of module with two linear layers around it."""

    def __init__(self, inner: nn.Module, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.run = nn.Linear(4, WIDTH), inner, nn.Linear(WIDTH, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.inner, torch.tanh(self.first(x))))


KINDS: dict[str, Callable[[], Around]] = {
    "attention": lambda: Around(nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "decoder": lambda: Around(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True), 2), lambda m, x: m(x, 2 * x)
    ),
    "transformer": lambda: Around(nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True), lambda m, x: m(x, 2 * x)),
    "silu": lambda: Around(
        nn.TransformerEncoderLayer(WIDTH, 2, 32, activation=nn.functional.silu, batch_first=True), lambda m, x: m(x)
    ),
    "gru": lambda: Around(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, x: m(x)[0]),
    "lstm": lambda: Around(nn.LSTM(WIDTH, WIDTH), lambda m, x: m(x)[0]),
    "frozen lstm": lambda: Around(nn.LSTM(WIDTH, WIDTH).requires_grad_(False), lambda m, x: m(x)[0]),
    "bias": lambda: Around(
        nn.ParameterList([torch.randn(2, 5, 5)]),
        lambda m, x: nn.functional.scaled_dot_product_attention(
            *(x.unflatten(2, (2, -1)).transpose(1, 2),) * 3, attn_mask=m[0]
        ).transpose(1, 2).flatten(2),
    ),
    "noncontiguous": lambda: Around(nn.ParameterList([torch.randn(5)]), lambda m, x: x + (x.mT @ m[0])[:, None]),
}  # fmt: skip
"""What PyTorch computes in one way or another by the mode, or by what requires a gradient."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_with_several_kernels_are_cut_exactly_in_each_mode(kind: str, mode: str) -> None:
    torch.manual_seed(0)
    net = KINDS[kind]().eval()
    x = torch.randn(3, 5, 4)
    with MODES[mode]():
        adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 5, 4))
        assert "first" in adapter.layers
        expected = adapter.forward(x)
        for name, found in adapter.encode(x, adapter.layers).items():
            assert torch.equal(adapter.decode(found, name), expected)
            assert torch.equal(adapter.back(name)(adapter.front(name)(x=x)), expected)


def test_stitched_encoders_return_the_same_bits_with_gradients(tokenizer: Any) -> None:
    a, b = loaded(0, tokenizer), loaded(1, tokenizer, norm_first=True)
    first, inputs = LAYERS[0], texts()
    model = hf_stitch.stitch(a, b, WORDS, source_layer=first, target_layer=first, task=None, progress=False)
    with torch.no_grad():
        expected = model(**inputs)
        assert torch.equal(b.decode(model.stitch(a.encode(inputs, first)[first]), first), expected)
    assert torch.equal(model(**inputs), expected)
    trained = model.freeze_networks().train()
    assert not any(p.requires_grad for name, p in trained.named_parameters() if not name.startswith("stitch"))
    with torch.no_grad():
        frozen = model.eval()(**inputs)
    assert torch.equal(model.train()(**inputs), frozen)


def test_the_path_is_restored_after_an_exception_and_stays_off() -> None:
    with pytest.raises(ZeroDivisionError), evaluating(encoder()):
        assert not mha.get_fastpath_enabled()
        raise ZeroDivisionError
    assert mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with plain(), plain():
            assert not mha.get_fastpath_enabled()
        assert not mha.get_fastpath_enabled()
    finally:
        mha.set_fastpath_enabled(True)


def test_two_threads_restore_the_path_together() -> None:
    entered, left = threading.Barrier(2), threading.Event()

    def first() -> bool:
        with plain():
            entered.wait()
        left.set()
        return True

    def second() -> list[bool]:
        with plain():
            entered.wait()
            assert left.wait(10)  # the first one has left
            return [mha.get_fastpath_enabled()]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        assert one.result()
        assert two.result() == [False]
    assert mha.get_fastpath_enabled()


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_doctor_tells_how_far_the_fused_path_is(batch_first: bool) -> None:
    net, inputs = encoder(batch_first=batch_first), texts(2)
    notes = " ".join(diagnose(net, example_inputs=inputs).notes)
    with torch.no_grad():
        fused = net(**inputs)
        with plain():
            expected = net(**inputs)
    gap = float((fused.double() - expected).abs().max() / expected.double().abs().max())
    assert (f"changes outputs by up to {gap:.1g}" in notes) == (gap > 0)
    assert batch_first or not gap
    assert "prototype" not in notes


def test_the_doctor_does_not_take_noise_for_a_fused_path() -> None:
    noise = Code(lambda net, x: x + torch.randn_like(x))
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    noisy = Around(nn.ModuleList([noise, attention]), lambda m, x: m[1](*[m[0](x)] * 3)[0])
    for net in (Around(noise, lambda m, x: m(x)), noisy):
        assert not any("fused" in note for note in diagnose(net.eval(), example_inputs=torch.randn(2, 5, 4)).notes)


def test_the_doctor_goes_on_where_the_fused_path_fails() -> None:
    net = encoder()
    net.encoder.layers[1].register_forward_pre_hook(lambda module, args: args[0].size(1) and None)
    found = diagnose(net, example_inputs=texts(2))
    assert not found.failed and found.cuts
    assert any("fails on this network (RuntimeError: Given dimension 1" in note for note in found.notes)
    attention = KINDS["attention"]().eval()
    with torch.no_grad():
        attention.last.bias[0] = float("nan")  # outputs are compared where they are finite
    assert not diagnose(attention, example_inputs=torch.randn(2, 5, 4)).failed


class Nested(nn.Module):
    """User code that passes texts of several lengths as a nested tensor between two of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.first(self.words(input_ids))
        nested = self.inner(torch._nested_tensor_from_mask(x, attention_mask.bool(), mask_check=False))
        return self.last(nested.to_padded_tensor(0.0, x.shape))[:, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_user_code_are_refused_by_name() -> None:
    adapter = hf_stitch.load(Nested().eval(), example_inputs=texts(2))
    assert adapter.layers == ("words", "first", "last")
    assert "returns a nested tensor" in str(adapter.verify_cut("inner").reason)
