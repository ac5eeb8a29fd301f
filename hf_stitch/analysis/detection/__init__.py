"""Detectors at the layers of a target: their fit, what they make of stitched activations, and their controls."""
