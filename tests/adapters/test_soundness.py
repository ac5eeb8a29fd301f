"""Cuts that seem exact on the probes but are not: each must be refused, or be exact on all inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import transformers as hf
from families import BERT, Block, Code, images, make, texts
from torch import Tensor, nn

import hf_stitch
from benchmarks.exactness import agree, bits
from hf_stitch.adapters import Override
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.discovery.verify import unchanged
from hf_stitch.artefacts.cache import NAME
from hf_stitch.registry import Entry


class Net(nn.Module):
    """A stem, blocks and a head; ``after`` receives the network, its input, and the outputs of stem and blocks."""

    def __init__(self, after: Callable[..., Any] | None = None, before: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head, self.other = nn.Linear(8, 2), nn.Linear(8, 2)
        self.after, self.before = after, before
        self.eval()

    def forward(self, x: Tensor, **given: Any) -> Any:
        if self.before:
            x = self.before(self, x)
        stem = self.stem(x)
        y = self.blocks(stem)
        return self.after(self, x, stem, y, **given) if self.after else self.head(y)


BLOCKS = {"blocks.0", "blocks.1", "blocks.2"}
ONE: Any = partial(torch.randn, 2, 8)


def exact(adapter: hf_stitch.Adapter, inputs: Any, layers: tuple[str, ...] | None = None) -> bool:
    """Return whether cuts at all layers are exact for some inputs."""
    with torch.no_grad():
        expected = [t.clone() for t in bits(adapter.forward(inputs))]
        names = adapter.layers if layers is None else layers
        assert names
        return all(agree(bits(adapter.decode(adapter.encode(inputs, n)[n], n)), expected) for n in names)


# -- what is refused -------------------------------------------------------------------------------------------------
def add_in_foreach(net: Net, x: Tensor, stem: Tensor, y: Tensor) -> Tensor:
    extra = torch.zeros(len(x), 8)
    torch._foreach_add_([extra], [(stem > 50).float()])
    return net.head(y + extra)


def in_a_thread(net: Net, x: Tensor, stem: Tensor, y: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return net.head(y) * pool.submit(lambda: 1.0 + float(stem.max().item() > 50)).result()


def strict(net: Net, x: Tensor, stem: Tensor, y: Tensor) -> Tensor:
    if not torch.isfinite(y + x).all():
        raise ValueError("non-finite")
    return net.head(y)


BYPASS, HIDDEN, READ = "the output of 'stem' bypasses it", "through other paths", "it reads them by"
REFUSED: dict[str, tuple[Any, ...]] = {
    "a bypass": (BYPASS, lambda net, x, stem, y: net.head(y + stem)),
    "a bypass of weight 0": (BYPASS, lambda net, x, stem, y: net.head(y) + 0 * net.other(stem)),
    "a branch": ("", lambda net, x, stem, y: net.head(y) if x.max() > 50 else net.other(y)),
    "a branch on the stem": (READ, lambda net, x, stem, y: net.head(y) if stem.max().item() > 50 else net.other(y)),
    "a comparison": (HIDDEN, lambda net, x, stem, y: net.head(y) * (1 + (x.abs().amax(1, keepdim=True) > 50))),
    "a mask": ("", lambda net, x, stem, y: torch.where((stem > 50).any(1, keepdim=True), 0.0, net.head(y))),
    "a list": ("", lambda net, x, stem, y: net.head(y) * (1 if x.max(1).values.tolist()[0] < 50 else 2)),
    "NumPy": ("", lambda net, x, stem, y: net.head(y) * (1 if float(x.detach().numpy().max()) < 50 else 2)),
    "a number of positions": ("", lambda net, x, stem, y: net.head(y) * (1 + len((x > 50).nonzero()))),
    "a number among the outputs": ("", lambda net, x, stem, y: {"y": net.head(y), "mean": stem.mean().item()}),
    "written in place": ("", add_in_foreach),
    "a thread": ("", in_a_thread),
    "a mask of bytes": ("", lambda net, x, stem, y: net.head(y) * (1 + len(x[(x > 50).to(torch.uint8)]))),
    "DLPack": ("", lambda net, x, stem, y: net.head(y) * (1.0 + float(numpy.from_dlpack(x.detach()).max() > 50))),
    "a second run": ("runs 2 times", lambda net, x, stem, y: net.head(net.blocks(y))),
    "rows that are no samples": (
        "axis 0 of the output .* is not the batch",
        lambda net, x, stem, y: net.head(y).unflatten(0, (-1, 5)).mean(1),
        lambda net, x: x.repeat_interleave(5, 0),
    ),
    "an error on NaN": ("", strict),
    "an error on a single sample": ("too many indices", lambda net, x, stem, y: net.head(y).squeeze()[:, 0]),
}
"""Why no block is a cut -> what the message says, and what the network does after and before its blocks."""


@pytest.mark.filterwarnings("ignore:.*uint8")
@pytest.mark.parametrize("how", REFUSED)
def test_hidden_dependence_on_the_input_is_found(how: str) -> None:
    message, *does = REFUSED[how]
    adapter = hf_stitch.load(Net(*does), example_inputs=ONE())
    assert not BLOCKS & set(adapter.layers)
    with pytest.raises(hf_stitch.NotACutError, match=message or "cannot be cut at 'blocks.1'") as refusal:
        adapter.encode(ONE(), "blocks.1")
    assert "blocks.0" not in str(refusal.value)  # because it is refused as well


@dataclass
class Output:
    value: Tensor


NO_NETWORK: dict[str, tuple[Any, ...]] = {
    "no finite number": ("only NaN or infinite numbers", None, lambda net, x: torch.log(-x.abs())),
    "noise": ("different outputs for the same input", lambda net, x, stem, y: y + torch.randn_like(y)),
    "no tensor": ("must return a tensor, .* got str", lambda net, x, stem, y: f"{y.sum():.3f}"),
    "an unknown class": (
        r"returns a Output at output\[1\], which cannot be traversed",
        lambda net, x, stem, y: (net.head(y), Output(stem)),
    ),
    "no gradient": (
        r"gradients do not flow .* under torch.no_grad",
        None, lambda net, x: x.detach().round().long().float().detach(),
    ),
}  # fmt: skip
"""What a forward returns -> why the network is refused, and what it does after and before its blocks."""


@pytest.mark.parametrize("how", NO_NETWORK)
def test_a_network_is_refused_by_what_it_returns(how: str) -> None:
    message, *does = NO_NETWORK[how]
    with pytest.raises(ValueError, match=message):
        _ = hf_stitch.load(Net(*does).requires_grad_(how != "no gradient"), example_inputs=ONE()).layers


# -- what is supported -----------------------------------------------------------------------------------------------
class Aliased(Net):
    """Blocks that run under another name than their first one, and a dtype that is read of what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.ModuleList(self.blocks)

    def forward(self, x: Tensor, **given: Any) -> Any:
        x = self.stem(x.to(self.head.weight.dtype))
        for block in self.again:
            x = block(x)
        return self.head(x)


def shaped(net: Net, x: Tensor, stem: Tensor, y: Tensor) -> Tensor:
    return net.head(y) + torch.zeros_like(stem).sum() + x.new_ones(len(x), 1) * stem.shape[1]


def first_dtype(net: Net, x: Tensor) -> Tensor:
    return x.to(next(p.dtype for p in net.blocks.parameters() if p.is_floating_point()))


def trying(net: Net, x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        x = net.other(x[:, :3])
    return x


MIXING = torch.eye(8).to_sparse()
SUPPORTED: dict[str, Callable[[], Net]] = {
    "shapes before the cut": lambda: Net(shaped),
    "sparse constants": lambda: Net(lambda net, x, stem, y: net.head(torch.sparse.mm(MIXING, y.T).T)),
    "a search that stops an iteration": lambda: Net(before=first_dtype),
    "an error that is caught": lambda: Net(before=trying),
    "another name, and a module after the cut": Aliased,
}


@pytest.mark.parametrize("what", SUPPORTED)
def test_networks_may_use(what: str) -> None:
    adapter, x = hf_stitch.load(SUPPORTED[what](), example_inputs=ONE()), torch.randn(5, 8)
    assert set(adapter.layers) >= BLOCKS
    assert exact(adapter, x)
    with torch.no_grad():
        assert torch.equal(adapter.back("blocks.1")(adapter.front("blocks.1")(x=x.clone())), adapter.forward(x))


def test_inputs_overwritten_in_place_do_not_count_as_randomness() -> None:
    assert set(hf_stitch.load(Net(before=lambda net, x: x.sub_(0.5)), example_inputs=ONE()).layers) >= BLOCKS


def test_integers_and_booleans_in_addition_to_numbers_are_context() -> None:
    def steps(net: Net, x: Tensor, stem: Tensor, y: Tensor, step: Tensor, masked: Tensor) -> Tensor:
        return net.head(y * step[:, None]).masked_fill(masked[:, None], 0.0)

    example = {"x": ONE(), "step": torch.zeros(2, dtype=torch.long), "masked": torch.zeros(2).bool()}
    adapter = hf_stitch.load(Net(steps), example_inputs=example)
    inputs = {"x": torch.randn(3, 8), "step": torch.tensor([1, 2, 3]), "masked": torch.tensor([True, False, True])}
    assert adapter.interface.content == ("x",)
    assert exact(adapter, inputs)


def test_packed_sequences_are_supported() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(net.stem(x), lengths, batch_first=True)
        _, (hidden, _) = net.lstm(packed)
        return net.head(hidden[0])

    net = Code(run, stem=nn.Linear(8, 8), lstm=nn.LSTM(8, 8, batch_first=True), head=nn.Linear(8, 2))
    assert exact(hf_stitch.load(net, example_inputs=torch.randn(2, 5, 8)), torch.randn(3, 5, 8), ("stem",))


# -- special ids -----------------------------------------------------------------------------------------------------
class Words(nn.Module):
    """A text model; ``after`` receives the network, the ids, the outputs of embedding and blocks, and the mask."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(1000, 8), nn.Sequential(Block(), Block())
        self.register_buffer("kinds", torch.arange(1000) % 3)
        self.after = after
        self.eval()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        stem = self.words(ids)
        return self.after(self, ids, stem, self.blocks(stem), attention_mask)


class ForWords(Override):
    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        return (1, 600)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hf_stitch.registries.overrides._entries, "Words", Entry.of("Words", ForWords))


def pooled(net: Words, ids: Tensor, stem: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    real = (ids != 1)[..., None]
    return (y * real).sum(1) / real.sum(1)


def test_an_override_defines_ids_that_a_head_searches_for(request: pytest.FixtureRequest) -> None:
    ids = torch.randint(2, 50, (2, 6))
    assert not any("blocks" in layer for layer in hf_stitch.load(Words(pooled), example_inputs=ids).layers)
    request.getfixturevalue("known")
    adapter = hf_stitch.load(Words(pooled), example_inputs=ids)
    assert "blocks.1" in adapter.layers
    ids[1, 3:] = 1
    assert exact(adapter, ids)


@pytest.mark.parametrize(
    "after",
    [
        lambda net, ids, stem, y, mask: y * (net.kinds[ids] == 1)[..., None],
        lambda net, ids, stem, y, mask: y * (ids.to(torch.uint8) == 1)[..., None],
        lambda net, ids, stem, y, mask: y + ids.argmax(1)[:, None, None],
    ],
    ids=["a table of ids", "ids cut short", "the largest id of a text"],
)
def test_only_special_ids_are_visible_after_the_cut(after: Callable[..., Any], known: None) -> None:
    ids = torch.randint(2, 400, (2, 6))
    ids[:, -1] = 600
    assert not any("blocks" in layer for layer in hf_stitch.load(Words(after), example_inputs=ids).layers)


# -- inputs that are not those of the example ------------------------------------------------------------------------
def of_positive_numbers() -> Code:
    """Create a network that takes no negative numbers, as noise has them."""
    parts = {"stem": nn.Conv2d(1, 4, 3), "block": nn.Conv2d(4, 4, 1), "head": nn.Conv2d(4, 2, 1)}
    return Code(lambda net, x: net.head(net.block(stem := net.stem(x.log())) + stem), **parts)


IDS = torch.randint(50, (3, 9))
LATER: dict[str, tuple[Callable[[], nn.Module], Any, str, Any, Any]] = {
    "an argument": (
        lambda: Net(lambda net, x, stem, y, skip=False: net.head(y + stem if skip else y)), ONE(), "blocks.1",
        torch.randn(3, 8), {"x": torch.randn(3, 8), "skip": True},
    ),
    "a mask": (
        lambda: Words(lambda net, ids, stem, y, mask: y if mask is None else y + stem), IDS[:2, :6], "blocks.0",
        IDS, {"ids": IDS, "attention_mask": torch.ones_like(IDS)},
    ),
    "hidden states": (
        lambda: hf.BertModel(hf.BertConfig(**BERT)).eval(), None, "encoder.layer.1",
        texts(3, 6), {**texts(3, 6), "output_hidden_states": True},
    ),
    "another size": (of_positive_numbers, torch.rand(2, 1, 8, 8), "block", None, torch.rand(3, 1, 12, 12)),
}  # fmt: skip
"""What is new -> network, example, layer, inputs for which it is a cut, and such for which it is bypassed."""


@pytest.mark.parametrize("what", LATER)
def test_what_the_example_lacks_is_verified_again(what: str) -> None:
    make, example, layer, fine, bypassed = LATER[what]
    adapter = hf_stitch.load(make(), example_inputs=example)
    assert fine is None or exact(adapter, fine)
    with pytest.raises(hf_stitch.NotACutError, match=r"bypasses it"):
        adapter.encode(bypassed, layer)


def test_a_module_that_runs_again_after_the_cut_in_longer_texts_raises_an_error() -> None:
    def longer(limit: int) -> hf_stitch.Adapter:
        def run(net: Any, ids: Tensor) -> Tensor:
            y = net.blocks(net.norm(net.words(ids)))
            return y + net.norm(y) if ids.shape[1] > limit else y

        net = Code(run, words=nn.Embedding(50, 8), norm=nn.LayerNorm(8), blocks=nn.Sequential(Block(), Block()))
        return hf_stitch.load(net, example_inputs=torch.randint(50, (2, 6)))

    assert exact(longer(16), torch.randint(50, (3, 20)))
    adapter = longer(30)
    long = adapter.encode(torch.randint(50, (3, 40)), "blocks.0")["blocks.0"]
    with pytest.raises(RuntimeError, match="'norm' runs after the cut for these inputs"):
        adapter.decode(long, "blocks.0")


def test_state_that_a_module_keeps_of_one_text_is_not_used_for_another() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(50, 8), nn.Sequential(Block(), Block())

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            stem = self.words(ids)
            self.words.length = ids.shape[1]
            return self.blocks(stem).sum(1) / self.words.length

    adapter = hf_stitch.load(
        Noting(), example_inputs={"ids": torch.randint(50, (2, 6)), "attention_mask": torch.ones(2, 6)}
    )
    for layer in adapter.layers:
        short, long = ({"ids": torch.randint(50, (2, n)), "attention_mask": torch.ones(2, n)} for n in (9, 20))
        expected = adapter.forward(short)
        representation = adapter.encode(short, layer)[layer]
        adapter.forward(long)
        assert torch.equal(adapter.decode(representation, layer), expected)


def test_halves_refuse_images_of_another_size() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        stem = net.stem(x)
        return nn.functional.interpolate(net.blocks(stem), size=stem.shape[-2:])

    net = Code(run, stem=nn.Conv2d(3, 4, 3), blocks=nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)))
    adapter, larger = hf_stitch.load(net, example_inputs=torch.randn(2, 3, 16, 16)), torch.randn(2, 3, 24, 24)
    assert exact(adapter, larger)
    with pytest.raises(ValueError, match=r"cut at 'blocks.0' for x of the shape \(3, 16, 16\), got \(3, 24, 24\)"):
        adapter.front("blocks.0")(x=larger)
    with pytest.raises(ValueError, match="resize or pad them, or load the network with example_inputs"):
        adapter.back("blocks.0")(adapter.encode(larger, "blocks.0")["blocks.0"])


def test_the_search_for_cuts_does_not_change_the_mode_of_a_network() -> None:
    config = hf.BigBirdConfig(
        **{**BERT, "num_hidden_layers": 2}, block_size=4, num_random_blocks=1, attention_type="block_sparse"
    )
    model = hf.BigBirdModel(config).eval()
    inputs = texts(2, 64)
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        assert len(hf_stitch.load(model).layers) == 2
        assert model.attention_type == "block_sparse"
        assert torch.equal(model(**inputs).last_hidden_state, before)


def test_a_network_that_rescales_its_weights_for_inference_rescales_them_once() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = hf.RwkvModel(hf.RwkvConfig(**sizes, vocab_size=100, context_length=64, rescale_every=2)).eval()
    inputs = {"input_ids": texts(2, 8)["input_ids"]}
    with torch.no_grad():
        expected = copy.deepcopy(model)(**inputs).last_hidden_state
        adapter = hf_stitch.load(model)
        assert len(adapter.layers) == 4
        assert torch.equal(adapter.forward(inputs).last_hidden_state, expected)
    assert model.layers_are_rescaled


def test_text_models_with_few_positions_are_verified_on_short_texts() -> None:
    config = hf.BertConfig(**{**BERT, "max_position_embeddings": 8})
    assert len(hf_stitch.load(hf.BertModel(config).eval()).layers) == config.num_hidden_layers


def test_a_cache_that_is_passed_is_not_written_into() -> None:
    config = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**config, num_attention_heads=4)).eval()
    adapter = hf_stitch.load(model)
    with torch.no_grad():
        cache = model(**texts(2, 5), use_cache=True)[NAME]
        with pytest.raises(ValueError, match="DynamicCache"):
            adapter.encode({**texts(2, 1), NAME: cache, "use_cache": True}, adapter.layers[0])
    assert cache.get_seq_length() == 5


def test_labels_of_one_sample_and_positions_of_all() -> None:
    bert = hf_stitch.load(hf.BertForSequenceClassification(hf.BertConfig(**BERT)).eval())
    assert exact(bert, {**texts(1, 7), "labels": torch.tensor([1])}, bert.layers[:1])
    assert exact(bert, {**texts(3, 7), "position_ids": torch.arange(7)[None]}, bert.layers[:1])


def test_state_of_the_first_input_is_not_that_of_the_survey() -> None:
    def noted(net: Any, x: Tensor) -> Tensor:
        net.scale = x.abs().max() if net.scale is None else net.scale
        net.log.append(len(x))
        return x

    model: Any = Net(before=noted)
    model.scale, model.log = None, []
    assert set(hf_stitch.load(model, example_inputs=ONE()).layers) >= BLOCKS
    assert model.scale is None and model.log == []


def test_what_a_forward_changes_is_put_back() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.log, self.known = Block(), [1], {"a": 1}
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("kept", torch.zeros(2))

        def change(self) -> None:
            self.seen += 1
            self.kept, self.inner, self.added = torch.ones(2), nn.Identity(), True
            self.log.append(2)
            self.known["b"], self.flag = 2, True

    def state() -> tuple[Any, ...]:
        own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
        return {**own, "log": [*model.log], "known": {**model.known}}, dict(model._modules), dict(model._buffers)

    model = Changing()
    before = state()
    with unchanged(model):
        model.change()
    assert state() == before and not model.seen.any()


def test_each_flag_of_each_module_is_restored_also_after_an_error() -> None:
    model = nn.ModuleList([nn.Module() for _ in range(4)]).train()
    for place, module in enumerate(model):
        module.training, module.grad_checkpointing = bool(place & 1), bool(place & 2)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyError), evaluating(model):
        assert not any(vars(module)[flag] for module in model for flag in ("training", "grad_checkpointing"))
        raise KeyError
    assert [dict(vars(module)) for module in model.modules()] == before


def test_the_module_that_bypasses_is_named_also_if_the_residual_is_added_in_place() -> None:
    adapter = hf_stitch.load(make("timm-resnet"), example_inputs=images(2))
    found = adapter.verify_cut("layer2.0.bn2")
    assert found.status == "refused" and "'layer1' bypasses it" in found.reason
    assert adapter.cut_info("layer2.0.bn2") == found


class Mixer(nn.Module):
    """A block that mixes positions, whose output has the strides of a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.channels = nn.Linear(49, 49), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.positions((x + torch.tanh(self.channels(x))).transpose(1, 2)).transpose(1, 2)


def test_a_cut_keeps_the_strides_of_the_network() -> None:
    """Kernels that multiply a contiguous copy may round otherwise, and an exact cut would be refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24), *(Mixer() for _ in range(3)), nn.Linear(24, 5)).eval()
    adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 49, 8))
    assert {"1", "2", "3"} <= set(adapter.layers)
    strides: list[Any] = []
    handle = net[2].register_forward_pre_hook(lambda module, inputs: strides.append(inputs[0].stride()))
    x = torch.randn(3, 49, 8)
    whole, cut = net(x), adapter.decode(adapter.encode(x, "1")["1"], "1")
    handle.remove()
    assert torch.equal(whole, cut) and strides[0] == strides[-1] != torch.empty(3, 49, 24).stride()
