"""The gallery: compare two networks, stitch them, try the result, and download it."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import gallery
import gradio as gr

INTRODUCTION = """# hf-stitch gallery
Choose two networks. **Compare** shows how similar their layers are. **Stitch** joins them: the first runs up to a
layer, a fitted map converts its activations, and the second continues. Then try the stitched network, and download it.
**Describe** gives another vision encoder to a network that writes captions.
"""
DESCRIBE = """A small network writes captions for the images of the gallery. Its vision encoder is exchanged for
another network without labels, by a fitted map. Is it as good as before? Source, target and your own samples are not
used here.
"""

ONE = {"concurrency_id": "networks", "concurrency_limit": 1}
"""Jobs share networks and random numbers, so only one runs at a time."""


def show_refusals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show errors of type ``Refused`` as messages in the interface."""

    @wraps(function)
    def wrapped(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except gallery.Refused as refusal:
            gr.Warning(str(refusal), duration=None)
            return gr.skip()

    return wrapped


def fresh() -> Path:
    """Return an empty folder for downloads."""
    return Path(tempfile.mkdtemp(prefix="gallery-"))


@show_refusals
def list_cuts(a: str, b: str) -> tuple[Any, Any]:
    """Fill both lists of layers, and select the middle layers."""
    return tuple(gr.update(choices=gallery.cuts(name), value=gallery.layer(name, None)) for name in (a, b))


@show_refusals
def compare(a: str, b: str, files: list[str] | None, lines: str) -> tuple[Any, str, list[str], Any]:
    """Compare two networks, and offer the report."""
    atlas = gallery.compare(a, b, gallery.samples(files, lines or ""))
    best = atlas.best_pair()
    paths = gallery.downloads({f"{a} and {b}": atlas}, None, fresh())
    message = f"Most similar: **{html.escape(best[0])}** and **{html.escape(best[1])}**."
    return atlas.plot(), message, paths, atlas


@show_refusals
def stitch(
    a: str, b: str, la: str, lb: str, files: list[str] | None, lines: str, atlas: Any
) -> tuple[Any, str, list[str], Any]:
    """Stitch two networks, score the result, and offer model and report."""
    la, lb = gallery.layer(a, la), gallery.layer(b, lb)  # the lists may be empty, or belong to other networks
    stitched = gallery.stitch(a, b, la, lb, gallery.samples(files, lines or ""))
    results = {f"{a} stitched to {b}": stitched.evaluation}
    if atlas is not None:
        results["similarity"] = atlas
    paths = gallery.downloads(results, stitched, fresh())
    message = f"{html.escape(la)} → {html.escape(lb)}. {gallery.verdict(stitched.evaluation)}"
    return stitched.evaluation.plot(), message, paths, stitched


@show_refusals
def answer(stitched: Any, image: Any, text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the predictions of the stitched network and its target."""
    if stitched is None:
        raise gallery.Refused("Stitch two networks first.")
    if image is None and not text:
        raise gallery.Refused("Upload an image, or enter a text.")
    predictions = gallery.answers(stitched, text if image is None else image)
    return predictions["stitched"], predictions["target"]


@show_refusals
def describe(writer: str, encoder: str) -> tuple[str, Any, str, list[str]]:
    """Exchange the vision encoder of a captioner, show captions before and after, and offer network and report."""
    described = gallery.describe(writer, encoder)
    paths = gallery.downloads({"Another vision encoder": described.found}, described.found, fresh(), "exchanged")
    return html.escape(described.verdict()), described.found.plot(), described.table(), paths


def example() -> Any:
    """Return an example image."""
    return next(gallery.pictures().batches(1)).samples[0].resize((128, 128))


with gr.Blocks(title="hf-stitch gallery") as demo:
    gr.Markdown(INTRODUCTION)
    atlas, stitched = gr.State(), gr.State()
    with gr.Row():
        names = list(gallery.SHIPPED)
        a = gr.Dropdown(names, value=names[0], label="Source", allow_custom_value=True, info="or an id on the Hub")
        b = gr.Dropdown(names, value=names[1], label="Target", allow_custom_value=True, info="or an id on the Hub")
    with gr.Accordion("Your own samples (default: the images of the gallery)", open=False):
        files = gr.File(label="Images", file_count="multiple", file_types=["image"])
        lines = gr.Textbox(label="Texts, one per line", lines=4)
    with gr.Tab("Compare"):
        compare_button = gr.Button("Compare", variant="primary")
        compared = gr.Markdown()
        atlas_plot = gr.Plot(label="Similarity of layers")
        atlas_files = gr.File(label="Report", file_count="multiple")
    with gr.Tab("Stitch"):
        with gr.Row():
            la, lb = gr.Dropdown([], label="Layer of the source"), gr.Dropdown([], label="Layer of the target")
        stitch_button = gr.Button("Stitch", variant="primary")
        scored = gr.Markdown()
        score_plot = gr.Plot(label="Scores and baselines")
        stitch_files = gr.File(label="Report and stitched model", file_count="multiple")
    with gr.Tab("Try"):
        with gr.Row():
            image, text = gr.Image(type="pil", label="Image"), gr.Textbox(label="Text")
        with gr.Row():
            example_button, try_button = gr.Button("Example image"), gr.Button("Try", variant="primary")
        with gr.Row():
            own, target = gr.Label(label="Stitched network"), gr.Label(label="Target")
    with gr.Tab("Describe"):
        gr.Markdown(DESCRIBE)
        with gr.Row():
            writer = gr.Dropdown(gallery.TRANSFORMERS, value=gallery.TRANSFORMERS[0], label="Captioner trained on")
            encoder = gr.Dropdown(names, value=gallery.TRANSFORMERS[1], label="New vision encoder")
        describe_button = gr.Button("Exchange", variant="primary")
        described = gr.Markdown()
        gr.Markdown("Distance from the original, with baselines")
        describe_plot = gr.Plot(show_label=False)  # a label covers the first row
        captions = gr.HTML()
        describe_files = gr.File(label="Report and network", file_count="multiple")

    compare_button.click(compare, [a, b, files, lines], [atlas_plot, compared, atlas_files, atlas], **ONE)
    gr.on([demo.load, a.change, b.change], list_cuts, [a, b], [la, lb], **ONE)
    gr.on([a.change, b.change], lambda: (None, None), None, [atlas, stitched])  # results of the previous networks
    stitch_button.click(
        stitch, [a, b, la, lb, files, lines, atlas], [score_plot, scored, stitch_files, stitched], **ONE
    )
    example_button.click(example, None, image)
    try_button.click(answer, [stitched, image, text], [own, target], **ONE)
    describe_button.click(describe, [writer, encoder], [described, describe_plot, captions, describe_files], **ONE)

demo.queue(max_size=16, default_concurrency_limit=1)

if __name__ == "__main__":
    gallery.pictures()  # fail here, not at the first click, if they cannot be read
    demo.launch(max_file_size=f"{gallery.LIMITS.megabytes}mb")
