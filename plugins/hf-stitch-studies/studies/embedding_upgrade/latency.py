"""Costs of a map: latency of a query by runtime, and rewriting a million vectors."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import study
import torch
from embedding_upgrade.encoders import Teacher, Vectors, parser, prepared
from embedding_upgrade.upgrade_table import stitch_of
from hf_stitch_embeddings import EmbeddingMap
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch import registries

BATCH = 8192
MAPS: dict[str, Any] = {"ridge": {}, "piecewise": {}, "residual_mlp": {"epochs": 3}}
CALLS = 500
ROWS = (100_000, 1_000_000)


class Served(nn.Module):
    """Map followed by normalisation."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, vectors: Tensor) -> Tensor:
        """Map and normalise ``(n, d)``."""
        return functional.normalize(self.body(vectors), dim=-1)


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Return median and 95th percentile of the time of a call, in microseconds."""
    for _ in range(max(3, count // 10)):
        call()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - began))
    return [round(float(quantile), 1) for quantile in np.percentile(taken, (50, 95))]


def latencies(embedding_map: EmbeddingMap, query: Vectors) -> dict[str, list[float]]:
    """Measure the latency of a query ``(1, d)`` by runtime."""
    served = Served(embedding_map.stitch).eval()
    rows = torch.from_numpy(query)
    by_runtime = {"EmbeddingMap": timed(lambda: embedding_map(query), CALLS)}
    if (affine := embedding_map.affine()) is not None:
        weight, bias = affine

        def plain() -> Vectors:
            mapped = query @ weight.T + bias
            return mapped / np.linalg.norm(mapped)

        by_runtime["numpy"] = timed(plain, CALLS)
    with torch.inference_mode():
        by_runtime["torch"] = timed(lambda: served(rows), CALLS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.onnx"
        torch.onnx.export(served, (rows,), str(path), dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        by_runtime["ONNX Runtime"] = timed(lambda: session.run(None, {name: query}), CALLS)
    return by_runtime


def peak() -> float:
    """Return the peak resident memory of this process in MiB (unlike ``ru_maxrss``, without the parent process)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def rewrite(embedding_map: EmbeddingMap, count: int, width: int) -> dict[str, float]:
    """Write ``count`` vectors to a file, map them batch by batch into a second file, and measure time and memory."""
    block = np.random.default_rng(0).normal(size=(BATCH, width)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "old.f32", Path(folder) / "new.f32"
        with open(source, "wb") as file:
            for start in range(0, count, BATCH):
                file.write(block[: count - start].tobytes())
        before = peak()
        wall, used = time.perf_counter(), time.process_time()
        with open(source, "rb") as file, open(target, "wb") as out:
            for start in range(0, count, BATCH):
                rows = np.fromfile(file, np.float32, min(BATCH, count - start) * width).reshape(-1, width)
                out.write(embedding_map(rows).tobytes())
            out.flush()
            os.fsync(out.fileno())
        wall, used = time.perf_counter() - wall, time.process_time() - used
        after = peak()
        if target.stat().st_size != source.stat().st_size * embedding_map.out_features // width:
            raise RuntimeError(f"the rewritten file has a wrong size, {target.stat().st_size} bytes")
    return {
        "rows": count, "seconds": round(wall, 2), "processor_seconds": round(used, 4),
        "peak_mib": round(after), "more_mib": round(after - before),
    }  # fmt: skip


def in_another_process(folder: Path, count: int, width: int) -> dict[str, float]:
    """Rewrite in a separate process, so that its peak memory is the peak of the rewriting."""
    done = subprocess.run(
        [sys.executable, study.RUN, "embedding_upgrade.latency", "--rewrite", str(folder), str(count), str(width)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def embedding_rate(texts: Sequence[str]) -> dict[str, float]:
    """Measure the number of texts that all-MiniLM-L6-v2 embeds per second, and the latency of a text."""
    teacher = Teacher()
    ordered = sorted(texts, key=len)
    with torch.inference_mode():
        teacher.body(**teacher.tokens(ordered[:8]))
        wall, used = time.perf_counter(), time.process_time()
        for start in range(0, len(ordered), 64):
            teacher.body(**teacher.tokens(ordered[start : start + 64]))
        wall, used = time.perf_counter() - wall, time.process_time() - used
        one = timed(lambda: teacher.body(**teacher.tokens(texts[:1])), 20)
    return {
        "texts": len(texts), "per_second": round(len(texts) / wall, 2),
        "per_processor_second": round(len(texts) / used, 2), "one_text": one[0],
    }  # fmt: skip


def page(record: dict[str, Any]) -> str:
    runtimes = dict.fromkeys(name for by_runtime in record["latency"].values() for name in by_runtime)
    quiet = record["load"] < record["cores"] / 2
    few, *_, many = rows = record["rewriting"]
    rate = record["embedding"]["per_processor_second"]
    return study.text(__file__).format(
        **{key: record[key] for key in ("cores", "load", "width", "calls")}, batch=BATCH, rate=rate,
        state="quiet" if quiet else "**not quiet**: times are upper bounds", texts=record["embedding"]["texts"],
        text=record["embedding"]["one_text"] / 1000, few=few["rows"], many=many["rows"],
        verdict="flat" if many["peak_mib"] <= 1.1 * few["peak_mib"] else "not flat",
        latency=study.table(record["latency"].items(), {"map": "{0}"} | {
            key: lambda _, by_runtime, key=key: "{:.0f} ({:.0f})".format(*by_runtime[key]) if key in by_runtime else "–"
            for key in runtimes
        }),
        rewriting=study.table(rows, {
            "rows": "{rows:,}", "seconds": "{seconds:.1f}", "processor seconds": "{processor_seconds:.1f}",
            "peak memory (MiB)": "{peak_mib:,}", "more than before (MiB)": "{more_mib:,}",
            "re-embedding, seconds": lambda row: f"{row['rows'] / rate:,.0f}",
            "ratio": lambda row: f"{row['rows'] / rate / max(row['processor_seconds'], 1e-4):,.0f}",
        }),
    )  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--rewrite"]:
        folder, count, width = sys.argv[2:5]
        print(json.dumps(rewrite(EmbeddingMap.from_pretrained(folder), int(count), int(width))))
        return
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    texts, vectors = prepared(arguments)
    old, new = (vectors[name]["pairs"] for name in ("hidden_3", "final"))
    query = np.ascontiguousarray(vectors["final"]["queries"][:1])
    maps = {}
    for name, options in MAPS.items():
        matcher = registries.matchers.build(name, **options)
        maps[name] = EmbeddingMap.of(stitch_of(matcher, new, old), direction="query")
    record: dict[str, Any] = {
        "width": query.shape[1], "calls": CALLS, "load": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "latency": {name: latencies(embedding_map, query) for name, embedding_map in maps.items()},
        "embedding": embedding_rate(texts.parts["index"][:512]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        maps["ridge"].save_pretrained(folder)
        record["rewriting"] = [in_another_process(Path(folder), n, query.shape[1]) for n in ROWS]
    study.write_results("embedding_latency", record, page, arguments.out)
