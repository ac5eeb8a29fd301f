"""Detectors at the layers of a target: fit, scores of stitched activations, and controls."""
