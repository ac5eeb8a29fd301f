"""Find where a port first differs: the eps of one of its norms is wrong, and its other weights are the same."""

import copy

from hf_stitch_versions import same
from networks import digits, vit

import hf_stitch

original, images = vit(), digits("test")
port = copy.deepcopy(original.model)
port.vit.layers[1].layernorm_after.eps = 1e-3
found = same(original, hf_stitch.load(port, processor=original.processor), images.take(32), progress=False)

print(found.verdict)
for row in found.modules:
    if row.ratio > found.tolerance:
        print(f"{row.name or 'output':36} {row.ratio:10.1f} times the null")
