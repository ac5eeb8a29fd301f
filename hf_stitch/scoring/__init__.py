"""Scores of stitching layers between halves of networks, measured in one pass over samples."""
