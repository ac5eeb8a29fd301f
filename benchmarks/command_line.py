"""Processor time of the command line on small networks by part, relative to a process that imports and loads the same.

The networks are the quickstart's and a tiny BERT, with random weights; one thread. Each command runs in a separate
process, which times imports, loading and verification; *rest* is the remaining time: the parser, reading data, the
work (maps, scores) and tables. The floor imports torch, transformers and the library of each network, and loads the
networks with it; the second floor also reads the data with datasets and scikit-learn, and imports matplotlib where the
command draws.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as hf

from benchmarks import networks
from benchmarks.timing import show
from hf_stitch.cli import networks as of_quickstart

ROUNDS = int(os.environ.get("ROUNDS", "3"))
DRIVER = """
import importlib._bootstrap as bootstrap, json, sys, time
PARTS = {
    "hf_stitch.adapters.loading": {"load": "loading"},
    "hf_stitch.adapters.base": {"Adapter.candidates": "cuts", "Adapter.layers": "cuts", "Adapter.verify_cut": "cuts",
                                "Adapter.cut": "cuts", "Adapter.cut_info": "cuts", "Adapter.spec": "cuts"},
}
spent, stack = dict.fromkeys(["imports", "loading", "cuts", "rest"], 0.0), ["rest"]
last = time.process_time()

def switch(change):
    global last
    now = time.process_time()
    spent[stack[-1]] += now - last
    last = now
    change()

def timed(function, part):
    def call(*arguments, **options):
        switch(lambda: stack.append(part))
        try:
            return function(*arguments, **options)
        finally:
            switch(stack.pop)
    return call

def loaded(spec, load=bootstrap._load_unlocked):
    switch(lambda: stack.append("imports"))
    try:
        module = load(spec)
    finally:
        switch(stack.pop)
    for path, part in PARTS.pop(spec.name, {}).items():
        owner, _, name = path.rpartition(".")
        owner = getattr(module, owner) if owner else module
        own = vars(owner)[name]
        setattr(owner, name, property(timed(own.fget, part)) if isinstance(own, property) else timed(own, part))
    return module

bootstrap._load_unlocked = loaded
place, sys.argv = sys.argv[1], ["hf-stitch", *sys.argv[2:]]
spent["imports"] += last  # the interpreter
from hf_stitch.cli import main
try:
    main()
finally:
    switch(lambda: None)
    open(place, "w").write(json.dumps(spent))
"""
NETWORKS = ("cnn", "vit", "bert")
FLOORS = {
    "cnn": "import timm; timm.create_model('local-dir:{}')",
    "vit": "transformers.AutoModelForImageClassification.from_pretrained(PLACE := '{}')\n"
    "transformers.AutoImageProcessor.from_pretrained(PLACE)",
    "bert": "transformers.AutoModelForSequenceClassification.from_pretrained(PLACE := '{}')\n"
    "transformers.AutoTokenizer.from_pretrained(PLACE)",
    "data": "import datasets, sklearn.datasets; sklearn.datasets.load_digits()",
    "picture": "from matplotlib.figure import Figure",
}


def make(folder: Path) -> None:
    """Save the networks."""
    torch.manual_seed(0)
    of_quickstart.save(of_quickstart.residual_network(1, 10), folder / "cnn")
    of_quickstart.save(of_quickstart.vision_transformer(1, 10), folder / "vit")
    network = networks.build("bert")
    network.model.save_pretrained(folder / "bert")  # type: ignore[operator]
    network.processor.save_pretrained(folder / "bert")


def seconds(*command: str) -> float:
    """Run a process and return its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return each command with its arguments and the code of its floors."""
    cnn, vit, bert, out = (str(folder / name) for name in ("cnn", "vit", "bert", "out"))
    digits = ["--data", "sklearn:digits", "--split", "test"]
    cells = ["--source-layer", "layer2.0", "--target-layer", "vit.layers.1"]
    return {
        "list metrics": (["list", "metrics"], []),
        "layers, CNN": (["layers", cnn], ["cnn"]),
        "layers, ViT": (["layers", vit], ["vit"]),
        "layers, BERT": (["layers", bert], ["bert"]),
        "compare, CNN with ViT": (["compare", cnn, vit, *digits], ["cnn", "vit", "data"]),
        "stitch, CNN to ViT": (["stitch", cnn, vit, *cells, *digits, "--out", out], ["cnn", "vit", "data", "picture"]),
        "layers of a stitcher": (["layers", str(folder / "out-0" / "stitcher")], []),
    }


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each command."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    hf.logging.set_verbosity_error()
    with TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        for command, (arguments, loads) in commands(folder).items():
            lines = ["import torch, transformers", *(FLOORS[key].format(folder / key) for key in loads)]
            networks_only = [line for line, key in zip(lines, ["cnn", *loads], strict=True) if key in NETWORKS]
            floors = "\n".join(networks_only), "\n".join(lines)
            totals, parts = list[float](), dict[str, list[float]]()
            least = list[float](), list[float]()
            for repeat in range(ROUNDS):
                for floor, spent in zip(floors, least, strict=True):
                    spent.append(seconds("-c", floor))
                written = [str(folder / f"out-{repeat}") if part == str(folder / "out") else part for part in arguments]
                totals.append(seconds("-c", DRIVER, str(folder / "parts.json"), *written))
                for part, spent_seconds in json.loads((folder / "parts.json").read_text()).items():
                    parts.setdefault(part, []).append(spent_seconds)
            figures = {part: statistics.median(values) for part, values in parts.items()}
            row = [*figures.values(), statistics.median(totals)]
            for spent in least:
                row += [statistics.median(spent), (row[4] - figures["rest"]) / statistics.median(spent)]
            yield command, *(f"{figure:.2f}" for figure in row)


def main() -> None:
    """Run the benchmark and print its table."""
    columns = "imports", "loading", "cuts", "rest", "all", "floor", "without rest / floor", "second floor", "ratio"
    show("processor seconds of commands", ("command", *columns), rows())
