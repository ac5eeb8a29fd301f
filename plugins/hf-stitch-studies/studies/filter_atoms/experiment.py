"""Shared parts of the experiments: arguments, pages and claims."""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from hf_stitch.storage.files import write_whole

PAPER_TITLE = "Inner product-based neural network similarity (Chen, Miao & Qiu, NeurIPS 2023)"
DEMONSTRATION = (
    "A demonstration, not a reproduction: the CIFAR-100 at hand has 6,000 training and 4,000 test images of 100 "
    "classes, and its split is not the official one."
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser with the arguments shared by all experiments."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset",
        choices=("small", "paper", "test"),
        default="small",
        help="small: minutes; paper: the sizes of the paper; test: seconds, to check that the script runs",
    )
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument(
        "--published", type=Path,
        help="folder that contains drfrankenstein_tiny10, published networks trained on CIFAR-10; default: train them",
    )  # fmt: skip
    made.add_argument(
        "--networks", type=Path, required=True, help="folder of networks; missing networks are trained and saved"
    )
    made.add_argument("--out", type=Path, help="output folder for the page, its record as JSON and figures as PNG")
    return made


def leave(
    name: str, record: Mapping[str, Any], page: Callable[[dict[str, Any]], str], pictures: Mapping[str, Figure],
    out: Path | None,
) -> None:  # fmt: skip
    """Print the page, and write it, its record and the figures if an output folder is given.

    Args:
        name: Name of the files.
        record: Everything that the page needs. Numbers are rounded to six digits.
        page: Function from the record, as it is read from JSON, to the page.
        pictures: Name -> figure.
        out: Output folder, or ``None``.
    """
    stored = json.dumps(_rounded(record), indent=1) + "\n"
    if out is not None:  # the record first: a mistake in the page must not lose it
        write_whole(out / f"{name}.json", lambda path: path.write_text(stored))
    text = page(json.loads(stored))
    Console(width=180).print(text, markup=False, highlight=False)
    if out is not None:
        write_whole(out / f"{name}.md", lambda path: path.write_text(text))
        for picture, figure in pictures.items():
            write_whole(out / f"{picture}.png", partial(figure.savefig, dpi=120, format="png"))


def _rounded(value: Any) -> Any:
    """Return dataclasses, NumPy numbers and containers as JSON with six significant digits; NaN becomes ``None``."""
    if hasattr(value, "__dataclass_fields__"):
        return _rounded(asdict(value))
    if hasattr(value, "tolist"):
        return _rounded(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def footer(name: str, options: str = "--published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT") -> str:
    """Return the end of a page: the record, and the command of the script, which has the same name."""
    return (
        f"This page and [its figures as JSON]({name}.json) are written by the command:\n\n```\n"
        f"python examples/filter_atoms/{name}.py {options}\n```\n"
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def claim(place: str, claimed: str, published: str, ours: str, n: str, verdict: str) -> dict[str, str]:
    """Return a row of the table of all experiments.

    Args:
        place: Section, figure or table of the paper.
        claimed: The claim, in one sentence.
        published: The paper's figure.
        ours: The figure here.
        n: What was counted.
        verdict: One of ``confirmed``, ``in part``, ``refuted``, ``undecided``; ``stand-in`` before it where networks or
            data differ in kind.
    """
    row = {"place": place, "claim": claimed, "published": published, "ours": ours, "n": n, "verdict": verdict}
    return {"paper": "3", **row}
