"""What the tables of broken entries cannot say: parts that depend on what is around an entry, and what conforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import pytest
import ready_command
import torch
from broken import failing
from broken_maps import Shifted
from broken_networks import BATCHES, ForNet, Net
from broken_sources import Lines
from hf_stitch_testing import (
    check_command,
    check_data_source,
    check_override,
    check_stitch,
    check_task,
    parametrize_with_checks,
)
from torch import Tensor, nn

import hf_stitch
from hf_stitch.cli.listing import listing
from hf_stitch.data import Samples
from hf_stitch.registry import Entry, UnknownNameError, registries

from tests.tiny_networks import SIZE, network  # isort: skip


@parametrize_with_checks(check_data_source, "sklearn", "digits", missing="iris")
def test_the_built_in_source_conforms(check: Any) -> None:
    check()


@parametrize_with_checks(check_command, listing, "metrics")
def test_a_built_in_command_conforms(check: Any) -> None:
    check()


@parametrize_with_checks(check_command, ready_command.several, "farewell", "you")
def test_an_app_of_several_commands_conforms(check: Any) -> None:
    check()


def test_an_app_needs_a_help_text() -> None:
    found = failing(check_command, ready_command.several_undescribed, "farewell", "you")
    assert list(found) == ["described"] and "the first line of the help text must describe" in found["described"]


def test_a_stitch_must_be_registered() -> None:
    with pytest.raises(UnknownNameError, match="shifted"):
        check_stitch(Shifted(3, 3))


class Same(nn.Module):
    """A network whose only block is bypassed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.first(pairs) + pairs


def test_an_override_without_a_cut() -> None:
    parts = {part.name: part for part in check_override.parts(ForNet(), Same())}
    with pytest.raises(AssertionError, match="the network must have a cut"):
        parts["cuts"]()


def test_an_override_whose_batches_contradict_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_stitch.Adapter, "decode", lambda self, representation, layer: torch.zeros(1))
    found = failing(check_override, ForNet(), Net(), *BATCHES)
    assert list(found) == ["exact"] and "must equal the output of the model" in found["exact"]


def test_an_override_is_registered_only_while_it_is_checked() -> None:
    before = dict(registries.overrides._entries)
    assert failing(check_override, ForNet(), Net(), *BATCHES) == {}
    assert registries.overrides._entries == before


def test_a_source_that_read_data_reads_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.data._entries, "lines", Entry.of("lines", Lines))
    assert failing(check_data_source, "lines", "poem", missing="prose") == {}

    def read(self: Any, place: str, own: Callable[..., Any] = Lines.splits) -> Any:
        found = own(self, place)
        return found if getattr(self, "kept", False) else {"all": found["all"].select([2, 1, 0])}

    monkeypatch.setattr(Lines, "splits", read)
    source = Lines()
    source.kept = True
    found = failing(check_data_source, source, "poem")
    assert "splits and read_data of split 'all' differ in row 0" in found["read_data"]


@pytest.mark.filterwarnings("ignore:.* does not contain a usable ImageProcessor")
def test_a_task_whose_model_loads_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    load = hf_stitch.StitchedModel.from_pretrained

    def changed(*given: Any, **options: Any) -> Any:
        model = load(*given, **options)
        with torch.no_grad():
            next(model.parameters()).mul_(1.001)
        return model

    monkeypatch.setattr(hf_stitch.StitchedModel, "from_pretrained", changed)
    task, pixels = registries.tasks.build("image-classification"), torch.randn(12, 3, SIZE, SIZE)
    data = Samples.of(pixels, label=[place % 3 for place in range(12)])
    parts = {part.name: part for part in check_task.parts(task, network("vit"), data)}
    with pytest.raises(AssertionError, match="must have equal outputs"):
        parts["saved"]()


def test_a_command_is_a_function() -> None:
    with pytest.raises(AssertionError, match="a command must be a function or a typer app, got ABCMeta"):
        check_command(Lines)


def test_a_command_that_takes_any_option(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer.core

    monkeypatch.setattr(typer.core.TyperCommand, "ignore_unknown_options", True)
    monkeypatch.setattr(typer.core.TyperCommand, "allow_extra_args", True)
    found = failing(check_command, ready_command.greet, "you")
    assert list(found) == ["unknown_option"] and "must exit with 2, got 0" in found["unknown_option"]


def test_a_module_that_cannot_be_imported_by_its_name_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("__main__", "no_such_module.of_a_file"):
        monkeypatch.setattr(ready_command.greet, "__module__", module)
        parts = {part.name: part for part in check_command.parts(ready_command.greet, "you")}
        with pytest.raises(SkipTest, match="import"):
            parts["light"]()
        check_command(ready_command.greet, "you")


def test_an_error_that_another_one_is_expected_for_is_a_failure() -> None:
    class Late(Lines):
        def splits(self, place: str) -> Any:
            return super().splits(place) if place == "poem" else open(place + "\0")

    class Lost(Lines):
        def splits(self, place: str) -> Any:
            return super().splits(place) if place == "poem" else {}[place]

    assert "must name no-such-place: embedded null byte" in failing(check_data_source, Late, "poem")["missing"]
    assert "ValueError, got KeyError: 'no-such-place'" in failing(check_data_source, Lost, "poem")["missing"]
