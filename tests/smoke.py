"""Use an installed hf-stitch in a fresh environment, next to other libraries; run by `make dist` on the wheel."""

import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

BESIDE = ("gradio", "sentence_transformers", "peft", "lightning")


def main() -> None:
    """Import everything, stitch two networks, save and load the result, and run the command line."""
    import hf_stitch

    assert "site-packages" in hf_stitch.__file__, f"imported from {hf_stitch.__file__}, not from the wheel"
    assert "torch" not in sys.modules, "import hf_stitch imports torch"
    for name in BESIDE:
        importlib.import_module(name)

    import torch
    from torch.nn import Linear, ReLU, Sequential

    networks = (Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in "ab")
    a, b = (hf_stitch.load(network, example_inputs=torch.randn(2, 4)) for network in networks)
    data = torch.randn(200, 4)
    assert hf_stitch.compare(a, b, data, progress=False).values
    stitched = hf_stitch.stitch(a, b, data, source_layer="1", target_layer="1", task=None, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        stitched.stitcher.save_pretrained(Path(folder) / "stitcher")
        again = hf_stitch.Stitcher.from_pretrained(Path(folder) / "stitcher").attach(a, b)
    assert torch.equal(again(input=data), stitched(input=data)), "the loaded stitcher gives other outputs"
    listed = subprocess.run(
        [Path(sys.executable).with_name("hf-stitch"), "list", "matchers"], capture_output=True, text=True, check=True
    )
    assert "lstsq" in listed.stdout
    doctor = subprocess.run([Path(sys.executable).with_name("hf-stitch"), "doctor"], capture_output=True, text=True)
    assert doctor.returncode == 0 and "unknown" not in doctor.stdout, doctor.stdout
    print("works:", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("hf-stitch", *BESIDE)))


if __name__ == "__main__":
    main()
