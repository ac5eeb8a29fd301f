"""The notebook runs from the first to the last cell."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_and_ends_in_a_verdict(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "in distribution" in printed or "out of distribution" in printed
    tables = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("mean_only" in table for table in tables), "the evaluation is shown as a table"
