"""Stitch two language models with different tokenizers: at each token of the target, the source reads the same text."""

from networks import SENTENCES, decoder

import hf_stitch

fine, coarse = decoder(300, 32), decoder(400, 48)
for network in (fine, coarse):
    print(network.processor.tokenize(SENTENCES[0]))

stitched = hf_stitch.stitch(
    fine, coarse, SENTENCES, source_layer="transformer.h.0", target_layer="transformer.h.0", align="prefix", own=True
)
print(stitched.evaluation)  # bits per character, with the baseline: a map of the target's own embeddings

inputs = stitched.preprocess(["She is walk"])
print(stitched.processor.decode(stitched.generate(**inputs, max_new_tokens=8)[0]))
