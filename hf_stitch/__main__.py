"""``python -m hf_stitch``."""

from hf_stitch.cli import main

if __name__ == "__main__":
    main()
