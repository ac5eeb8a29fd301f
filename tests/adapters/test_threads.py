"""Threads that share a network: the same results as one after the other, and the network is left as it was."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.adapters.cutting.surgery import _LOCKS, alone, swapped

from tiny_networks import LAYERS, SIZE, adapted, build  # isort: skip

THREADS, ROUNDS = 4, 2
BATCHES = [torch.randn(1 + n % 3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(THREADS)]
FAMILIES = ("cnn", "vit")


def in_threads(work: Callable[[int], Any]) -> list[list[Any]]:
    """Call a function with the number of the thread, in threads that start together, several times."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> list[Any]:
        start.wait()
        return [work(number) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def tensors_of(adapter: Adapter, layer: str, pixels: Tensor) -> Sequence[Tensor]:
    """The output, the representation at a layer, and the output from there on."""
    inputs = adapter.preprocess(list(pixels))
    with torch.no_grad():
        found = adapter.encode(inputs, layer)[layer]
        outputs = adapter.forward(inputs), adapter.decode(found, layer)
    return found.values, *(output if isinstance(output, Tensor) else output.logits for output in outputs)


def state_of(model: nn.Module) -> list[Any]:
    """Every module with its mode and the number of its hooks, and every weight and buffer."""
    modules = [
        (name, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    return [*modules, *((name, value.clone().tolist()) for name, value in model.state_dict().items())]


def check(found: list[list[Sequence[Tensor]]], expected: Sequence[Sequence[Tensor]]) -> None:
    for rounds, once in zip(found, expected, strict=True):
        assert len(rounds) == ROUNDS
        for values in rounds:
            assert all(torch.equal(x, y) for x, y in zip(values, once, strict=True))


@pytest.mark.parametrize(("family", "adapters"), [("cnn", 1), ("vit", 2)])
def test_threads_share_a_network(family: str, adapters: int) -> None:
    model, layer = build(family, 0).train(), LAYERS[family]
    before = state_of(model)
    apart = adapted(family, build(family, 0))
    expected = [tensors_of(apart, layer, pixels) for pixels in BATCHES]
    shared = [adapted(family, model) for _ in range(adapters)]  # no cut is verified yet
    check(in_threads(lambda n: tensors_of(shared[n % adapters], layer, BATCHES[n])), expected)
    assert state_of(model) == before


def test_threads_load_cut_and_hash_a_network_that_others_run() -> None:
    model, layer = build("vit", 0), LAYERS["vit"]
    weights = adapted("vit", model).pinned.weights_hash

    def work(number: int) -> Any:
        adapter = hf_stitch.load(model)
        assert adapter.pinned.weights_hash == weights
        pixels = BATCHES[number]
        with torch.no_grad():
            return adapter.back(layer)(adapter.front(layer)(pixel_values=pixels)).logits, adapter.forward(pixels).logits

    with torch.no_grad():
        expected = [model(pixel_values=pixels).logits for pixels in BATCHES]
    check(in_threads(work), [(logits, logits) for logits in expected])


def test_a_network_waits_for_others_with_the_same_modules_only() -> None:
    part, other = nn.Linear(2, 2), nn.Linear(2, 2)
    whole, apart = nn.Sequential(part, other), nn.Linear(2, 2)
    entered = {id(model): threading.Event() for model in (whole, part, other, apart)}

    def enter(model: nn.Module) -> None:
        with alone(model):
            entered[id(model)].set()

    with ThreadPoolExecutor(3) as pool:
        with alone(part), alone(other), alone(part):
            waiting = pool.submit(enter, whole)
            pool.submit(enter, apart).result(timeout=10)
            assert not entered[id(whole)].wait(0.05)
        waiting.result(timeout=10)
        with alone(whole):
            waiting = pool.submit(enter, other)
            assert not entered[id(other)].wait(0.05)
        waiting.result(timeout=10)


def test_modules_that_were_swapped_out_while_a_thread_waited_are_locked_too() -> None:
    part, stub = nn.Linear(2, 2), nn.Identity()
    first, whole = nn.Sequential(part), nn.Sequential(part, nn.ReLU())
    with alone(first):  # the part has the lock of the first network
        pass
    entered, leave, beside = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with alone(whole):
            entered.set()
            assert leave.wait(10)

    def enter() -> None:
        with alone(first):
            beside.set()

    with ThreadPoolExecutor(2) as pool:
        with alone(whole), swapped(whole, {"0": stub}):
            holding = pool.submit(hold)
            until = time.monotonic() + 10
            while stub not in _LOCKS and time.monotonic() < until:  # the thread lists the modules, then it waits
                time.sleep(0.001)
        assert entered.wait(10)
        waiting = pool.submit(enter)
        alongside = beside.wait(0.05)
        leave.set()
        holding.result(timeout=10)
        waiting.result(timeout=10)
    assert not alongside


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_has_a_lock_of_its_own(copied: Callable[[Any], Any]) -> None:
    adapter, layer = adapted("vit", build("vit", 0)), LAYERS["vit"]
    expected = tensors_of(adapter, layer, BATCHES[0])
    with alone(adapter.model), ThreadPoolExecutor(1) as pool:  # the locks are held while the copies are made
        twin, model = copied(adapter), adapted("vit", copied(adapter.model))
        for other in (twin, model):
            found = pool.submit(tensors_of, other, layer, BATCHES[0]).result(timeout=60)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_threads_share_a_stitched_model_and_copies_of_it() -> None:
    a, b = (adapted(family, build(family, 0)) for family in FAMILIES)
    layers = {"source_layer": LAYERS["cnn"], "target_layer": LAYERS["vit"]}
    data = list(torch.randn(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1)))
    model = hf_stitch.stitch(a, b, data, **layers, matcher="ridge", ridge=1.0, progress=False)

    def work(number: int, model: Any = model) -> Any:
        with torch.no_grad():
            return (model(pixel_values=BATCHES[number]).logits,)

    expected = [work(number) for number in range(THREADS)]
    check(in_threads(work), expected)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check([[work(number, twin)] * ROUNDS for number in range(THREADS)], expected)
