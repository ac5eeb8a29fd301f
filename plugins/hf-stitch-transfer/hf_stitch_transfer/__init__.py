"""Transfer of probes, directions and sparse autoencoders between networks through a stitch.

A stitch maps source activations to target activations. Functions of activations (probes, the encoder of an autoencoder)
are composed with the map to their original network; vectors of activations (directions, the decoder) are mapped to the
new network.
"""

from hf_stitch_transfer.carrying import transfer_direction, transfer_probe, transfer_sae
from hf_stitch_transfer.sparse_autoencoder import SparseAutoencoder

__all__ = ["SparseAutoencoder", "transfer_direction", "transfer_probe", "transfer_sae"]
