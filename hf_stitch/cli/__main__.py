"""``python -m hf_stitch.cli``."""

from hf_stitch.cli import main

main()
