"""All cuts verified together: the same cuts and plans as one by one, for the work of a few forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_networks import adapted, build
from torch import Tensor, nn

import hf_stitch


class Block(nn.Module):
    """A residual block; ``before`` changes what enters it."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(8, 8), before

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) if self.before else x
        return x + torch.tanh(self.linear(x))


class Row(nn.Module):
    """A stem, five blocks and a head; ``glue`` changes what passes from one block to the next."""

    kept: list[Tensor]

    def __init__(self, glue: Callable[[Row, int, list[Tensor]], Tensor] | None = None, depth: int = 5) -> None:
        super().__init__()
        self.stem, self.head, self.glue = nn.Linear(8, 8), nn.Linear(8, 2), glue
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        passed = [self.stem(x)]
        for place, block in enumerate(self.blocks):
            passed.append(block(self.glue(self, place, passed) if self.glue else passed[-1]))
        return self.head(self.glue(self, len(self.blocks), passed) if self.glue else passed[-1])


_seen: dict[str, Tensor] = {}


def smuggled(row: Row, place: int, passed: list[Tensor]) -> Tensor:
    """The second block's output reaches the fourth by a global name."""
    if place == 2:
        _seen["it"] = passed[-1]
    return passed[-1] + _seen["it"].mean(0) if place == 4 else passed[-1]


def kept(row: Row, place: int, passed: list[Tensor]) -> Tensor:
    """The second block's output stays on the network, and reaches the fourth."""
    if place == 2:
        row.kept = [passed[-1].mean(0)]
    return passed[-1] + row.kept[0] if place == 4 else passed[-1]


GLUE: dict[str, tuple[Callable[[Row, int, list[Tensor]], Tensor] | None, set[int]]] = {
    "plain": (None, {0, 1, 2, 3, 4}),
    "a skip over two blocks": (lambda row, i, p: p[-1] + p[2] if i == 4 else p[-1], {0, 1, 4}),
    "a skip with weight 0": (lambda row, i, p: p[-1] + 0 * p[2] if i == 4 else p[-1], {0, 1, 4}),
    "a comparison": (
        lambda row, i, p: p[-1] * (1 + (p[1].amax(1, keepdim=True) > 1e9)) if i == 3 else p[-1], {0, 3, 4},
    ),
    "the stem reaches the head": (lambda row, i, p: p[-1] + p[0] if i == 5 else p[-1], set()),
    "a global name": (smuggled, {0, 1, 4}),
    "state of the network": (kept, {0, 1, 4}),
    "state of the network, one sample": (kept, {0, 1, 4}),
    "the first reads the last": (
        lambda row, i, p: p[-1].to(row.blocks[4].linear.weight.dtype) if i == 0 else p[-1], {0, 1, 2, 3, 4},
    ),
    "the last reads the first": (
        lambda row, i, p: p[-1].to(row.blocks[0].linear.weight.dtype) if i == 5 else p[-1], {0, 1, 2, 3, 4},
    ),
    "each reads its neighbours": (
        lambda row, i, p: p[-1] * len(row.blocks[(i + 1) % 5].linear.weight) / len(row.blocks[i - 2].linear.weight),
        {0, 1, 2, 3, 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", GLUE)
def test_cuts_in_a_row(how: str) -> None:
    glue, cuts = GLUE[how]
    samples = 1 if how.endswith("one sample") else 2
    joint, alone = (hf_stitch.load(Row(glue), example_inputs=torch.randn(samples, 8)) for _ in range(2))
    names = [f"blocks.{place}" for place in range(5)]
    found = {name for name in names if alone.verify_cut(name).status == "verified"}
    assert found == {f"blocks.{place}" for place in cuts}
    assert {name for name in joint.layers if name in names} == found
    x = torch.randn(7, 8)
    for name in found:
        torch.testing.assert_close(joint.decode(joint.encode(x, name)[name], name), joint.forward(x), rtol=0, atol=0)


@pytest.mark.parametrize("how", [how for how in GLUE if len(GLUE[how][1]) < 5])
def test_a_refusal_proposes_cuts_alone(how: str) -> None:
    glue, cuts = GLUE[how]
    adapter = hf_stitch.load(Row(glue), example_inputs=torch.randn(2, 8))
    refused = next(place for place in range(5) if place not in cuts)
    proposed = adapter.verify_cut(f"blocks.{refused}").reason.partition("Cut instead at: ")[2].split(", ")
    assert {name for name in proposed if name.startswith("blocks")} == {f"blocks.{place}" for place in cuts}
    assert adapter.layers == tuple(filter(None, proposed))


def test_a_name_that_does_not_exist_is_answered_without_a_verification() -> None:
    adapter = hf_stitch.load(Row(GLUE["a comparison"][0]), example_inputs=torch.randn(2, 8))
    with pytest.raises(hf_stitch.NotACutError, match=r"Candidates, not verified yet: blocks\.0, blocks\.1, "):
        adapter.spec("blocks.5")
    assert adapter.layers == ("blocks.0", "blocks.3", "blocks.4")
    with pytest.raises(hf_stitch.NotACutError, match=r"(?m)Cuts: blocks\.0, blocks\.3, blocks\.4$"):
        adapter.spec("blocks.6")


@pytest.mark.parametrize("name", ["cnn", "deit", "swin", "bert", "gpt2", "t5"])
def test_plans_are_those_of_cuts_verified_alone(name: str) -> None:
    together, alone = (adapted(name, build(name, 0)) for _ in range(2))
    layers = together.layers
    assert layers == tuple(each for each in alone.candidates if alone.verify_cut(each).status == "verified")
    for layer in layers:
        assert together.cut(layer)[1].to_dict() == alone.cut(layer)[1].to_dict()


@pytest.mark.parametrize("depth", [4, 16])
def test_each_block_runs_as_often_in_deep_networks_as_in_shallow_ones(depth: int) -> None:
    row, runs = Row(depth=depth), Counter[str]()
    adapter = hf_stitch.load(row, example_inputs=torch.randn(2, 8))
    for name, block in row.blocks.named_children():
        block.register_forward_hook(lambda *_, name=name: runs.update([name]))
    assert len([layer for layer in adapter.layers if layer.startswith("blocks")]) == depth
    # twice on the example, in two sizes of traces, on two probes as a whole, and on them in three parts
    assert max(runs.values()) == 2 + 2 + 2 + 3


def test_a_cut_that_fails_together_is_verified_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> dict[str, Any]:
        return {}

    expected = hf_stitch.load(Row(), example_inputs=torch.randn(2, 8)).layers
    monkeypatch.setattr("hf_stitch.adapters.discovery.survey.sweep", none)
    assert hf_stitch.load(Row(), example_inputs=torch.randn(2, 8)).layers == expected


def peering() -> Row:
    """The first block reads the dtype of the weights of the last one, which reads its values."""
    row = Row()
    row.blocks[4] = Block(lambda x: x * 2 if float(x.detach().sum()) > 1e30 else x)
    row.blocks[0] = Block(lambda x: x.to(row.blocks[4].linear.weight.dtype))
    return row.eval()


@pytest.mark.xfail(strict=True, reason="modules that the code of one cut reads are kept in the plans of all cuts")
def test_a_read_module_refuses_no_cut_that_holds_alone() -> None:
    names = [f"blocks.{place}" for place in range(5)]
    alone = [hf_stitch.load(peering(), example_inputs=torch.randn(2, 8)).verify_cut(name).status for name in names]
    assert alone == ["verified"] * 5
    layers = hf_stitch.load(peering(), example_inputs=torch.randn(2, 8)).layers
    assert [name for name in layers if name in names] == names


LONG = 20
"""More tokens than in all probes that must run, and fewer than in the longest one."""


class Texts(nn.Module):
    """A network of texts; ``extra`` is added to its output, from the embeddings, the mask and further outputs."""

    def __init__(self, extra: Callable[..., Any]) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 8), nn.Embedding(2, 8)
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(8, 2)
        self.extra = extra
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        words = self.words(input_ids)
        y = words + self.kinds(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        for block in self.blocks:
            y = block(y)
        return self.head(y) + self.extra(words[..., :2], attention_mask, token_type_ids)


def example() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(50, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}


def test_a_block_of_a_text_network_runs_for_each_size_of_text_and_each_probe() -> None:
    texts, runs = Texts(lambda *_: 0), Counter[str]()
    adapter = hf_stitch.load(texts, example_inputs=example())
    for name, block in texts.blocks.named_children():
        block.register_forward_hook(lambda *_, name=name: runs.update([name]))
    assert len(adapter.layers) == 3
    assert adapter._survey().trace.sources == ["words"]  # the kinds are integers too, but the same for other words
    # alone and padded, twice on the example, in three sizes of traces, and on each of four probes, whole and in parts
    assert runs["1"] == 2 + 2 + 3 + 4 + 4


HIDDEN: dict[str, Callable[[Tensor, Tensor, Tensor | None], bool]] = {
    "no padding": lambda words, mask, kinds: bool(mask.all()) and kinds is None,
    "padding right": lambda words, mask, kinds: not mask[:, -1].all(),
    "padding left": lambda words, mask, kinds: not mask[:, 0].all(),
    "a long text": lambda words, mask, kinds: words.shape[1] > LONG,
    "kinds of tokens": lambda words, mask, kinds: kinds is not None,
    "a long text alone": lambda words, mask, kinds: words.shape[1] > LONG and kinds is None,
    "kinds of tokens alone": lambda words, mask, kinds: words.shape[1] < LONG and kinds is not None,
}
"""When the embeddings reach the output around the blocks; *alone* in networks that refuse long texts with kinds."""


@pytest.mark.parametrize(("how", "weight"), [*((how, 1) for how in HIDDEN), ("no padding", 0), ("padding right", 0)])
def test_a_bypass_in_one_kind_of_text_is_found(how: str, weight: int) -> None:
    def extra(words: Tensor, mask: Tensor, kinds: Tensor | None) -> Any:
        if how.endswith("alone") and words.shape[1] > LONG and kinds is not None:
            raise ValueError("no kinds of long texts")
        return weight * words if HIDDEN[how](words, mask, kinds) else 0

    assert not any("blocks" in layer for layer in hf_stitch.load(Texts(extra), example_inputs=example()).layers)


def test_a_bypass_that_disappears_where_it_is_followed_is_found() -> None:
    """The embeddings are added where no mode of torch follows them, as by a fused kernel."""
    fused = Texts(lambda words, *_: 0 if torch._C._len_torch_function_stack() else words)
    assert not any("blocks" in layer for layer in hf_stitch.load(fused, example_inputs=example()).layers)
