"""Put another vision encoder under a network that describes images: no labels, no training, an ordinary checkpoint."""

import copy
import tempfile

from networks import NUMBERS, captioner, digits, pixels, taught, vit
from transformers import VisionEncoderDecoderModel

import hf_stitch

old = captioner()  # "this is a three"
other = vit(seed=1)  # trained independently of the encoder of old
images = digits().take(600).unlabelled()

encoder = hf_stitch.load(other.model.vit, processor=other.processor)
exchanged = hf_stitch.swap(old, encoder, images, part="vision", progress=False)
print(exchanged)

with tempfile.TemporaryDirectory() as folder:
    exchanged.save_pretrained(folder)
    plain = VisionEncoderDecoderModel.from_pretrained(folder)  # an ordinary model, with the new encoder
print("class:", type(plain).__name__)

labelled = digits().take(600)  # a ceiling: cross-attention to the new encoder, trained on captions of the same images
ceiling = copy.deepcopy(plain)
cross_attention = [weight for name, weight in ceiling.decoder.named_parameters() if "crossattention.c_attn" in name]
taught(ceiling, pixels(other, labelled), labelled.labels, cross_attention)

tokenizer, test = old.processor.tokenizer, digits("test")
for name, model, network in (("before", old.model, vit()), ("after", plain, other), ("retrained", ceiling, other)):
    correct, example = 0, ""
    for batch in test.batches(100):
        ids = model.generate(pixel_values=network.preprocess(batch.samples)["pixel_values"], max_new_tokens=6)
        captions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        correct += sum(NUMBERS[label] in caption for label, caption in zip(batch.labels, captions, strict=True))
        example = captions[0]
    print(f"{name}: {correct / len(test):.3f} of captions name the digit, e.g. {example!r}")
