"""Three families of mutations of a saved artefact: damage, hostile records, and random values in records.

Every mutation is a function of a folder and a random generator. It returns the path of the field that it changed in the
record, empty if it changed files. Records are signed again, as an attacker can.
"""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_stitch.artefacts.files import checksum
from hf_stitch.storage.files import digest

Way = tuple[Any, ...]
Hostile = Callable[[Path, dict[str, Any], list[Way], random.Random], Way | None]


def record_of(folder: Path) -> Path:
    return next(path for path in (folder / "stitcher.json", folder / "config.json") if path.is_file())


def sign(folder: Path, record: dict[str, Any]) -> None:
    """Write a record with the digests of the files as they are, and with a checksum that fits."""
    if isinstance(record.get("manifest"), dict):
        for name in record["manifest"]:
            if (folder / name).is_file():
                record["manifest"][name] = digest(folder / name)
    record["checksum"] = checksum(record)
    record_of(folder).write_text(json.dumps(record))


def read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(record_of(folder).read_text())
    return values


def at(record: Any, way: Way) -> Any:
    for key in way:
        record = record[key]
    return record


def put(record: Any, way: Way, value: Any) -> None:
    at(record, way[:-1])[way[-1]] = value


def places(value: Any, way: Way = ()) -> Iterator[Way]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*way, key)
        yield from places(item, (*way, key))


# -- damage: a broken disk or transfer, or files of another artefact --------------------------------------------------
DAMAGES: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "bit": lambda data, place, draw: data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :],
    "cut": lambda data, place, draw: data[:place],
    "insert": lambda data, place, draw: data[:place] + draw.randbytes(draw.randrange(1, 9)) + data[place:],
    "zero": lambda data, place, draw: data[:place] + bytes(len(data[place : place + 16])) + data[place + 16 :],
    "empty": lambda data, place, draw: b"",
    "text": lambda data, place, draw: b"<html>404</html>",
}
"""Change of the content of a file, at a random place."""


def damage(folder: Path, draw: random.Random, others: list[Path]) -> Way:
    """Damage, remove or swap one of the files that the record names, or the record itself."""
    record = record_of(folder)
    path = folder / draw.choice([record.name, *sorted({record.name, *read(folder)["manifest"]})])
    data = path.read_bytes()
    kind = draw.choice(["bit", *DAMAGES, "missing", "folder", "swap"])
    if kind in DAMAGES:
        path.write_bytes(DAMAGES[kind](data, draw.randrange(len(data)), draw))
    elif kind == "swap":
        files = [file for other in others for file in other.iterdir() if file.suffix == path.suffix]
        path.write_bytes(draw.choice(files).read_bytes())
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
    return ()


# -- hostile -----------------------------------------------------------------------------------------------------------
SIZES = [-1, 0, 7, 1000, 2**63, 10**30, 1.5, math.inf]
"""None that costs much: whoever writes a config can make it cost CPU time and memory."""
NAMES = ["org/name", "../../etc", "/etc/passwd", "hf-hub:org/name", "http://127.0.0.1:9/x", "os.system", "x" * 5000, ""]


def of_transformers(kind: str, **config: Any) -> dict[str, Any]:
    return {"library": "transformers", "class": kind, "config": config}


def of_timm(architecture: str, **arguments: Any) -> dict[str, Any]:
    return {"library": "timm", "architecture": architecture, "arguments": arguments}


NAMED: dict[str, dict[str, Any]] = {
    "attention": of_transformers("BertModel") | {"attention": "org/kernel"},
    "attention of a package": of_transformers("BertModel") | {"attention": "flash_attention_2"},
    "attention of parts": of_transformers("BertModel") | {"attention": {"": "org/kernel"}},
    "another module of transformers": of_transformers("BertModel") | {"attention": "ninja"},
    "attention in the config": of_transformers("BertModel", _attn_implementation="org/kernel"),
    "attention of a part": of_transformers("CLIPModel", text_config={"attn_implementation": "flash_attention_3"}),
    "experts": of_transformers("MixtralModel", experts_implementation="org/kernel"),
    "quantisation": of_transformers("BertModel", quantization_config={"quant_method": "bitsandbytes"}),
    "backbone on the Hub": of_transformers("DPTForDepthEstimation", backbone="org/name", use_timm_backbone=False),
    "backbone of old times": of_transformers("DPTForDepthEstimation", backbone="gpt2"),
    "backbone of timm, looked up": of_transformers("DPTForDepthEstimation", backbone="resnet50"),
    "options of a backbone": of_transformers("DPTForDepthEstimation", backbone_kwargs={"checkpoint_path": "x"}),
    "tag of a backbone": of_transformers("TimmBackbone", model_type="timm_backbone", backbone="resnet18.org/name"),
    "tag of a wrapper": of_transformers("TimmWrapperModel", architecture="resnet18.any"),
    "a list as wrapper": of_transformers("TimmWrapperModel", architecture=["hf-hub:org/name"]),
    "pretrained wrapper": of_transformers("TimmWrapperModel", model_args={"pretrained": True}),
    "weights of a wrapper": of_transformers("TimmWrapperModel", model_args={"checkpoint_path": "x"}),
    "a class of another module": of_transformers("models.bert.modeling_bert.BertModel"),
    "no class": of_transformers("logging"),
    "a class that chooses another": of_transformers("AutoModel"),
    "weights of timm": of_timm("resnet10t", checkpoint_path="x"),
    "pretrained": of_timm("resnet10t", pretrained=True),
    "address": of_timm("resnet10t") | {"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}},
    "file": of_timm("resnet10t") | {"pretrained_cfg": {"file": "/etc/passwd"}},
    "Hub": of_timm("resnet10t") | {"pretrained_cfg": {"hf_hub_id": "org/name"}},
    "architecture": of_timm("hf-hub:org/name"),
    "folder": of_timm("local-dir:/tmp"),
    "architecture with a tag": of_timm("resnet10t.org/name"),
}  # fmt: skip
"""Networks whose configs name what would be fetched or run."""
NETWORKS: list[Any] = [
    *NAMED.values(),
    of_transformers("MarianModel", max_position_embeddings=100),
    of_transformers("BertModel", num_hidden_layers=9_999),
    of_transformers("RwkvModel"),
    of_transformers("PreTrainedModel"),
    of_transformers("RagModel"),
    of_transformers("EncoderDecoderModel"),
    of_timm("resnet10t", num_classes=3_000_000),
    of_timm("vit_tiny_patch16_224", img_size=160),
    of_timm("resnet10t", layers=[10**4] * 4),
    *({"library": library} for library in ("torch", "os", ["timm"])),
    *({}, None),
]
ADDED: list[dict[str, Any]] = [
    *(each["config"] for each in NAMED.values() if each.get("config")),
    *(each["arguments"] for each in NAMED.values() if each.get("arguments")),
    {"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}},
    {"pretrained_cfg_overlay": {"file": "/etc/passwd"}},
    {"trust_remote_code": True},
    {"text_config": {"model_type": "bert", "hidden_size": 10**30}},
    {"torchscript": True},
    {"output_attentions": True, "output_hidden_states": True},
    {"return_dict": False},
    {"pruned_heads": {"0": [0, 1]}},
    {"layer_types": ["full_attention"] * 10**3},
]
"""Keys that an attacker adds to the config of a network."""
MANIFESTS: list[Any] = [
    *({name: "sha256:0"} for name in (".", "..", "../x", "/etc/passwd", "x\0")),
    *({}, [], None, {"config.json": 5}),
]
"""Other files than the artefact was saved with."""
OPTIONS: list[dict[str, Any]] = [
    {"x": 1}, {"output_attentions": True}, {"past_key_values": [1]}, {"cache": [1]}, {"labels": 5}, {"use_cache": True},
]  # fmt: skip
"""Arguments of a forward that a network does not have, or that change what it returns."""
REQUIREMENTS: list[Any] = [
    [{"registry": "matchers", "name": "x", "distribution": "evil", "version": "1"}],
    [{"registry": "__class__", "name": "x", "distribution": None, "version": None}],
    *([{}], [5], "x", {"registry": "matchers"}),
]
"""What is not installed, or no requirement."""
STITCHES: list[dict[str, Any]] = [
    {"name": "relative", "anchors": 10**3},
    {"name": "low_rank", "rank": 10**3},
    {"name": "identity"},
    {"in_features": 10**3, "out_features": 10**3},
    {"subspaces": 10**30},
    {"similarities": ["cosine"] * 10**2},
    {"dtype": "float64"},
    {"dtype": "__loader__"},
    {"fitted": 5},
]
"""Another map, or other options of it."""


def hostile(folder: Path, draw: random.Random, others: list[Path]) -> Way:
    """Make a record ask for too much, or name what it should not, and sign it."""
    record = read(folder)
    ways = list(places(record))
    kind = draw.choice(list(HOSTILE))
    way: Way | None = None
    while way is None:
        way = HOSTILE[kind](folder, record, ways, draw)
        if way is None:  # not possible for this artefact
            kind = draw.choice(list(HOSTILE))
    sign(folder, record)
    return way


def _some(ways: list[Way], draw: random.Random, fits: Callable[[Way], bool]) -> Way | None:
    """Choose a path; parts of the record are equally likely, although plans have many more values than the others."""
    found = [way for way in ways if fits(way)]
    if not found:
        return None
    part = draw.choice(sorted({way[:3] for way in found}, key=str))
    return draw.choice([way for way in found if way[:3] == part])


NOT_READ = ("recipe", "scores")
"""Parts of a record that describe a model."""


def _changed(fits: Callable[[Way, Any], bool], values: list[Any], update: bool = False) -> Hostile:
    """Replace a value that fits by one of these, or update it with one of these."""

    def change(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
        way = _some(ways, draw, lambda way: fits(way, at(record, way)))
        if way is not None:
            new = copy.deepcopy(draw.choice(values))
            put(record, way, at(record, way) | new if update else new)
        return way

    return change


def _sizes(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    """Set all sizes of the same name to the same enormous value, so that they agree."""

    def is_size(way: Way) -> bool:
        return type(at(record, way)) is int and type(way[-1]) is str and way[0] not in NOT_READ

    way = _some(ways, draw, is_size)
    if way is not None:
        value = draw.choice(SIZES)
        for other in ways:
            if other[-1] == way[-1] and is_size(other):
                put(record, other, value)
    return way


def _outputs(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    """Make stubs allocate memory, or return something else than tensors."""
    way = _some(ways, draw, lambda way: way[-1] in ("stubs", "after", "entry") and bool(at(record, way)))
    if way is None:
        return None
    holder = at(record, way[:-1])
    holder["materialise"] = draw.random() < 0.5
    huge = {"tensor": {"dims": [[0, 1, 0, 0], [10 ** draw.randrange(1, 4), 0, 0, 0], [10**2, 0, 0, 0]], "dtype": "cut"}}
    new = draw.choice(
        [huge, {"value": {"x": 1}}, {"argument": [7]}, {"argument": ["x", 0]}, {"tuple": []}, {"dict": {}}]
    )
    if way[-1] == "entry":
        holder["entry"] = new
    else:
        name = draw.choice(list(holder[way[-1]]))
        holder[way[-1]][name] = new
    return way


WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor], str], object]] = {
    "shape": lambda weights, name: weights.update({name: weights[name].flatten()[:1].expand(7).clone()}),
    "dtype": lambda weights, name: weights.update(
        {name: weights[name].to(torch.int64 if weights[name].is_floating_point() else torch.float32)}
    ),
    "missing": lambda weights, name: weights.pop(name),
    "more": lambda weights, name: weights.update(x=torch.zeros(1)),
    "many": lambda weights, name: weights.update({f"x{index}": torch.zeros(0) for index in range(20_000)}),
    "empty": lambda weights, name: weights.clear(),
}
"""Change of the weights, at a random name."""


def _weights(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    """Change the weights and their digest: other shapes, dtypes, names, or a header that lies."""
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is written again
    kind = draw.choice([*WEIGHTS, "header", "pickle"])
    if kind == "header":
        path.write_bytes(draw.choice([2**62, 2**31, 0]).to_bytes(8, "little") + path.read_bytes()[8:])
    elif kind == "pickle":
        torch.save(weights, path)
    else:
        WEIGHTS[kind](weights, draw.choice(sorted(weights)))
        save_file(weights, path)
    return ()


def _text_of_record(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    """Nest a value deeply, or repeat it very often."""
    way = _some(ways, draw, lambda way: True)
    nested: Any = []
    for _ in range(draw.choice([50, 800])):
        nested = [nested]
    put(record, way or (), draw.choice([nested, [[]] * 10**5, dict.fromkeys(map(str, range(10**5))), "x" * 10**6]))
    return way


def _beside(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    """Let a file beside the record name code or something to fetch."""
    others = [name for name in record["manifest"] if name.endswith(".json")]
    if not others:
        return None
    path = folder / draw.choice(others)
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        return None
    (folder / "code.py").write_text("raise SystemExit")
    new: dict[str, Any] = draw.choice(
        [
            {"auto_map": {"AutoTokenizer": ["code.T", "code.T"], "AutoImageProcessor": "code.P"}},
            {"tokenizer_class": "code.T", "image_processor_type": "code.P"},
            {"tokenizer_file": "/etc/passwd"},
            {"custom_generate": "org/name"},
            {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
            {"max_length": 10**9, "num_beams": 10**6},
        ]
    )
    path.write_text(json.dumps(values | new))
    return ("beside",)


def _anchors(folder: Path, record: dict[str, Any], ways: list[Way], draw: random.Random) -> Way | None:
    path = folder / "anchors.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    put(values, draw.choice(list(places(values))), copy.deepcopy(draw.choice(VALUES)))
    path.write_text(json.dumps(values))
    return ("anchors",)


HOSTILE: dict[str, Hostile] = {
    "size": _changed(lambda way, value: type(value) in (int, float) and way[0] not in NOT_READ, SIZES),
    "sizes": _sizes,
    "name": _changed(
        lambda way, value: isinstance(value, str) and way[0] not in (*NOT_READ, "manifest", "checksum"), NAMES
    ),
    "added": _changed(
        lambda way, _: way[-2:] in (("blueprint", "config"), ("blueprint", "arguments")), ADDED, update=True
    ),
    "other network": _changed(lambda way, _: way[-1] == "blueprint", NETWORKS),
    "outputs": _outputs,
    "options": _changed(lambda way, _: way[-2:] == ("interface", "options"), OPTIONS, update=True),
    "manifest": _changed(lambda way, _: way == ("manifest",), MANIFESTS),
    "requirements": _changed(lambda way, _: way == ("requires",), REQUIREMENTS),
    "stitch": _changed(lambda way, _: way == ("stitch", "body"), STITCHES, update=True),
    "weights": _weights,
    "text": _text_of_record,
    "beside": _beside,
    "anchors": _anchors,
}


# -- random values -----------------------------------------------------------------------------------------------------
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 10**3, 10**30, 1.5, math.nan, math.inf),
    *("", "x", "cut", "float16", "sdpa", "../../etc/passwd"),
    *([], {}, [[]], [1, 2], {"x": 1}, [None]),
]


def random_values(folder: Path, draw: random.Random, others: list[Path]) -> Way:
    record = read(folder)
    ways = [way for way in places(record) if way[0] not in ("manifest", "checksum")]
    way = _some(ways, draw, lambda way: True) or ()
    match draw.choice(["value", "value", "value", "remove", "exchange"]):
        case "value":
            put(record, way, copy.deepcopy(draw.choice(VALUES)))
        case "remove":
            del at(record, way[:-1])[way[-1]]
        case "exchange":
            put(record, way, copy.deepcopy(at(record, draw.choice(ways))))
    sign(folder, record)
    return way


FAMILIES: dict[str, Callable[[Path, random.Random, list[Path]], Way]] = {
    "damage": damage,
    "hostile": hostile,
    "random": random_values,
}


def copied(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to))
