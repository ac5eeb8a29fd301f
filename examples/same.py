"""Find the first difference of a port: the eps of one of its norms is wrong, and all weights are equal."""

import copy

from hf_stitch_versions import same
from networks import digits, vit

import hf_stitch

original, images = vit(), digits("test")
port = copy.deepcopy(original.model)
port.vit.layers[1].layernorm_after.eps = 1e-3
comparison = same(original, hf_stitch.load(port, processor=original.processor), images.take(32), progress=False)

print(comparison.verdict)
for row in comparison.modules:
    if row.ratio > comparison.tolerance:
        print(f"{row.name or 'output':36} {row.ratio:10.1f} times the null")
