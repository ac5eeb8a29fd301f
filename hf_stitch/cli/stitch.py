"""``hf-stitch stitch``: stitch two networks, score the result and save it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_stitch.cli.output import as_json
from hf_stitch.cli.verbs import Job, command
from hf_stitch.printing import warn
from hf_stitch.storage.files import replacing

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel


@command("hf_stitch.workflows._stitch:stitch")
def stitch(job: Job) -> None:
    """Stitch two networks, and save the stitched model with its scores."""
    with job.folder(needed=True):
        stitched = job.run()
        layers = {"source_layer": stitched.source.cut.layer, "target_layer": stitched.target.cut.layer}
        job.output.show(" → ".join(layers.values()))
        finish(job, stitched, layers)


def finish(job: Job, stitched: StitchedModel, record: dict[str, str]) -> None:
    """Save a stitched model, and show its scores."""
    evaluation = stitched.evaluation
    saved = save(stitched, job.shared.out or Path())
    job.output.show(evaluation or "not scored: the target has no head")
    record = {**record, "evaluation": evaluation and evaluation.to_dict(), "recipe": stitched.config.recipe}
    job.tell(evaluation, saved, record)


def save(stitched: StitchedModel, folder: Path) -> dict[str, Path]:
    """Save a stitched model, its stitcher and its scores in a folder.

    The model is left out, with a warning, if a half cannot be rebuilt from its record (user code), and the stitcher if
    the weights of either half were changed, because the parents do not contain them.
    """
    changed = stitched.has_changed("source") or stitched.has_changed("target")
    with replacing(folder, lambda _: ["evaluation.json", "evaluation.png"]):  # of another model
        shutil.rmtree(folder / "stitcher", ignore_errors=True)
    saved = {"model": folder / "model"}
    try:
        stitched.save_pretrained(saved["model"])
    except ValueError as error:
        if changed:
            raise
        shutil.rmtree(saved.pop("model"), ignore_errors=True)  # of another run
        warn(
            f"only the stitcher is saved, not the whole model, because {str(error).partition('. ')[0]}: "
            "hf-stitch evaluate takes the networks again, with --source and --target"
        )
    if not changed:
        saved["stitcher"] = folder / "stitcher"
        stitched.stitcher.save_pretrained(saved["stitcher"])
    if stitched.evaluation is not None:
        saved |= {"evaluation": folder / "evaluation.json", "plot": folder / "evaluation.png"}
        with replacing(folder) as fresh:
            text = as_json(stitched.evaluation.to_dict()) + "\n"
            (fresh / saved["evaluation"].name).write_text(text, encoding="utf-8")
            stitched.evaluation.plot().savefig(fresh / saved["plot"].name, dpi=150)
    return saved
