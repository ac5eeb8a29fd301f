"""What changed between two versions of a network: weights, outputs, and which blocks carry the change."""
