"""Grids of stitches: every layer of one network stitched into every layer of another."""
