"""Errors of the Hub keep their kind, also where a library wraps or swallows them, and broken files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors
from parents import files_of, serve
from server import Hub

import hf_stitch
from hf_stitch import Stitcher
from hf_stitch.data import read_data
from hf_stitch.hub import explained

from tiny_networks import LAYERS, build, stitched  # isort: skip

IDS = ("alice/vit", "timm/cnn")
KINDS = {
    401: (PermissionError, r"the token does not permit this .*; log in \(hf auth login\) or pass token="),
    403: (PermissionError, r"the token does not permit this .*; log in \(hf auth login\) or pass token="),
    404: (FileNotFoundError, "the model or file does not exist on the Hub .*; check the id and the revision"),
    429: (ConnectionError, "too many requests, status 429 .*; log in .* or wait"),
    503: (ConnectionError, "the Hub returned status 503 .*; try again later"),
}
CUT = (ConnectionError, "the Hub did not respond, or the connection broke .*; try again")


def refuses(error: type[OSError], message: str, call: Any) -> None:
    """Check the exact class: ``ConnectionError`` and its like are subclasses of ``OSError``, as which all came."""
    with pytest.raises(OSError, match=f"(?s){message}") as caught:
        call()
    assert caught.type is error


@pytest.fixture
def served(hub: Hub) -> Hub:
    serve(hub, *IDS)
    return hub


@pytest.mark.parametrize(
    ("id", "status", "file"),
    [(id, status, file) for id in IDS for status in KINDS for file in ("", "model.safetensors")],
)
def test_a_network_that_the_hub_refuses(id: str, status: int, file: str, served: Hub) -> None:
    served.fail(file, status=status)
    refuses(KINDS[status][0], f"^{id} could not be loaded: {KINDS[status][1]}", lambda: hf_stitch.load(id))
    served.heal()
    assert hf_stitch.load(id).reference.id == id


def test_a_connection_that_breaks(served: Hub) -> None:
    served.fail("/cdn/", cut=100)
    for id in IDS:
        refuses(CUT[0], f"^{id} could not be loaded: {CUT[1]}", lambda id=id: hf_stitch.load(id))


@pytest.mark.parametrize("id", IDS)
def test_a_network_that_is_not_there(id: str, served: Hub, tmp_path: Path) -> None:
    def check(message: str, name: str = id, **options: Any) -> None:
        error = f"^{name} could not be loaded: .*{message}"
        refuses(FileNotFoundError, error, lambda: hf_stitch.load(name, cache_dir=tmp_path / "cold", **options))

    check("the model does not exist on the Hub, or it is private", id.replace("/", "/no-"))
    check("the revision does not exist", f"{id}@old")
    check("it is not in the cache .*connect to the network", local_files_only=True)
    served.models[id].private = True
    check("or it is private", token="bob-token")


def test_a_network_without_safetensors(hub: Hub) -> None:
    hub.put("alice/pickled", {name: body for name, body in files_of("vit", 0).items() if "safetensors" not in name})
    message = "alice/pickled could not be loaded: it contains neither model.safetensors nor model.safetensors.index"
    refuses(FileNotFoundError, message, lambda: hf_stitch.load("alice/pickled"))


PROCESSORS = [("alice/vit", "preprocessor_config.json"), ("alice/bert", "/tokenizer")]


@pytest.mark.parametrize(("id", "file"), PROCESSORS)
def test_a_processor_that_the_hub_refuses_or_cannot_send_is_not_taken_for_missing(id: str, file: str, hub: Hub) -> None:
    serve(hub, id)
    hub.fail(file, status=403)
    error, message = KINDS[403]
    refuses(error, f"the processor of {id} could not be loaded: {message}", lambda: hf_stitch.load(id))
    hub.heal()
    hub.fail(file, status=503)
    with pytest.warns(UserWarning, match=f"the processor of {id} could not be loaded: {KINDS[503][1]}"):
        assert hf_stitch.load(id).processor is None
    hub.heal()
    assert hf_stitch.load(id).processor is not None


@pytest.mark.parametrize(("id", "file"), PROCESSORS)
def test_a_network_in_the_cache_without_a_processor_loads_without_a_connection(id: str, file: str, hub: Hub) -> None:
    hub.put(id, {name: body for name, body in files_of(id.partition("/")[2], 0).items() if "token" not in name
                 and "processor" not in name})  # fmt: skip
    with pytest.warns(UserWarning, match=f"{id} does not contain a usable (ImageProcessor|Tokenizer)"):
        hf_stitch.load(id)
    hub.fail("", status=503)
    with pytest.warns(UserWarning, match=f"the processor of {id} could not be loaded: {KINDS[503][1]}"):
        assert hf_stitch.load(id).processor is None


@pytest.mark.parametrize(("side", "status"), [("source", 503), ("target", 404)])
def test_the_networks_of_a_stitcher(side: str, status: int, served: Hub, images: Any, tmp_path: Path) -> None:
    a, b = map(hf_stitch.load, IDS)
    stitched(a, b, images, (LAYERS["vit"], LAYERS["cnn"])).stitcher.save_pretrained(tmp_path / "stitcher")
    again, id = Stitcher.from_pretrained(tmp_path / "stitcher"), IDS[side == "target"]
    served.fail(id, status=status)
    error, message = KINDS[status]
    expected = f"^the {side} {id}@[0-9a-f]* could not be loaded: {message}.*pass it as Stitcher.attach"
    refuses(error, expected, lambda: again.attach(cache_dir=tmp_path / "cold"))
    served.heal()
    damaged = {**served.files(id), "model.safetensors": b"\xff" * 600}
    served.models[id].commits[again.source.revision if side == "source" else again.target.revision] = damaged
    with pytest.raises(ValueError, match=rf"{id}@\w* could not be loaded: /.*model.safetensors is damaged .*force_dow"):
        again.attach(cache_dir=tmp_path / "other")


def test_broken_files_of_a_folder_are_named(tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"could not be loaded: {shards[1]} is damaged .*; restore it"):
        hf_stitch.load(str(tmp_path))


def test_other_errors_pass_unchanged() -> None:
    for error in (OSError("disk full"), KeyError("x"), RuntimeError("size mismatch"), ValueError("x")):
        assert explained("it failed", error) is None
    handled = ValueError("an unknown model type")
    handled.__context__ = errors.LocalTokenNotFoundError()
    assert explained("it failed", handled) is None


@pytest.mark.parametrize(("status", "kind"), [(403, PermissionError), (429, ConnectionError), (404, FileNotFoundError)])
def test_data_that_the_hub_refuses(status: int, kind: type[OSError], hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import HfApi

    def refused(*_: Any, **__: Any) -> None:  # as datasets wraps errors of the Hub
        try:
            HfApi(endpoint=hub.url).dataset_info("alice/data")
        except OSError as error:
            raise ConnectionError("Couldn't reach 'alice/data' on the Hub") from error

    hub.fail("alice/data", status=status)
    monkeypatch.setattr(datasets, "load_dataset", refused)
    refuses(kind, "cannot read the dataset alice/data", lambda: read_data("alice/data"))
