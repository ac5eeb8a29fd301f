"""Write what this version writes, for later versions to read: ``python tests/hub/make_fixtures.py VERSION``.

The networks have random weights and take a few kB. Each artefact is written together with an input and its output. What
is there already stays as it is.
"""

from __future__ import annotations

import sys

import torch
from fixture_files import FILES
from fixture_models import MODELS, output_of
from fixture_networks import EXACT, FIXTURES
from fixture_results import results
from safetensors.torch import load_file, save_file

MAKERS = {**MODELS, **FILES, "results": results}
"""Name of a file or folder -> function that writes it."""


@torch.no_grad()
def write_exact_outputs() -> None:
    """Compute outputs in float64 from the saved weights and inputs."""
    from test_what_earlier_versions_wrote import ENDS, LOADERS, attached, inputs, loaded

    found = {}
    for version in sorted(FIXTURES.iterdir()):
        for name in sorted((LOADERS | ENDS).keys()):
            if (path := version / name).exists():
                model = (attached if name in ENDS else loaded)(path)
                output = output_of(model.double()(**inputs(load_file(f"{path}.answer.safetensors"), torch.float64)))
                found[f"{version.name}/{name}"] = output.contiguous()
    save_file(found, EXACT)


def main(version: str) -> None:
    folder = FIXTURES / version
    folder.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        if not (folder / name).exists():
            make(folder / name)
    if not EXACT.exists():
        write_exact_outputs()


if __name__ == "__main__":
    main(sys.argv[1])
