"""``python -m hf_stitch.cli``."""

from . import main

main()
