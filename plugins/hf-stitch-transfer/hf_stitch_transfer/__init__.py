"""Carrying what was found in one network to another through a stitch: probes, directions and sparse autoencoders.

A stitch maps activations of a source to those of a target. What reads activations (probes, the encoder of an
autoencoder) is composed with the map to its own network, and what writes them (directions, the decoder) is mapped to
the other network.
"""

from hf_stitch_transfer.carrying import transfer_direction, transfer_probe, transfer_sae
from hf_stitch_transfer.sparse_autoencoder import SparseAutoencoder

__all__ = ["SparseAutoencoder", "transfer_direction", "transfer_probe", "transfer_sae"]
