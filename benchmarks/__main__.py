"""Run the named benchmarks, or all benchmarks if no name is given."""

import importlib
import sys

NAMES = (
    *(
        "atlas",
        "atoms",
        "command_line",
        "cuts",
        "device",
        "diff",
        "generation",
        "gpu",
        "grid",
        "least_squares",
        "listing",
    ),
    *("offload", "permutations", "plans", "relative", "same", "saving", "scaling", "shorten", "task_loss", "towers"),
)

for name in sys.argv[1:] or NAMES:
    importlib.import_module(f"benchmarks.{name}").main()
