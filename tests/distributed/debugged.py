"""The user's script under ``accelerate.debug_launcher``."""

import sys

import accelerate
import script

if __name__ == "__main__":
    accelerate.debug_launcher(script.main, sys.argv[1:2], num_processes=2)
