"""Another tower under the same decoder: folded into a network of the class, or stitched; and what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import timm
import torch
import transformers as hf
from hf_stitch_towers.exchange import exchange, with_context
from hf_stitch_towers.folding import tower_of, with_tower
from hf_stitch_towers.inputs import ImageAndTextProcessor
from hf_stitch_towers.outputs import CaptionInputs, Captions, with_captions
from hf_stitch_towers.places import Folded, full_inputs
from hf_stitch_towers.result import DECIDED, DECIDED_AGREEMENT, MEAN, MOMENTS, NO_MAP, ORIGINAL
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_stitch
from hf_stitch.running import Run

SIZE, MARK = 16, 59
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = {"image_size": SIZE, "patch_size": 4}
QUIET = Run(progress=False)


def images(count: int, seed: int = 0) -> list[Image.Image]:
    draw = np.random.default_rng(seed)
    return [Image.fromarray(draw.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)) for _ in range(count)]


def of_images() -> Any:
    return hf.ViTImageProcessor(size={"height": SIZE, "width": SIZE})


def words() -> Any:
    names = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, MARK)}, "<image>": MARK}
    made = Tokenizer(models.WordLevel(names, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"], padding_side="left",
    )  # fmt: skip


def vit(width: int = 32, **more: Any) -> Any:
    return hf.ViTModel(hf.ViTConfig(**{**SMALL, **IMAGES, "hidden_size": width, **more})).eval()


def ved(width: int = 32, decoder: int = 32) -> Any:
    gpt2 = hf.GPT2Config(n_embd=decoder, n_layer=2, n_head=4, vocab_size=60, n_positions=32, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0, add_cross_attention=True, is_decoder=True)  # fmt: skip
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit(width).config, gpt2)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    model = hf.VisionEncoderDecoderModel(config).eval()
    model.generation_config.decoder_start_token_id = 1
    return louder(model)


def llava() -> Any:
    vision = hf.CLIPVisionConfig(**SMALL, **IMAGES)
    text = hf.LlamaConfig(**SMALL, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=MARK, image_seq_length=16)
    return louder(hf.LlavaForConditionalGeneration(config).eval())


def louder(model: Any) -> Any:
    """Return a network of which the image changes the outputs, as in trained ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    return model


def network(kind: str) -> Any:
    """Return a network of images and texts with its processor."""
    torch.manual_seed(0)
    if kind == "llava":
        processor = hf.LlavaProcessor(
            of_images(), words(), patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            image_token="<image>",
        )  # fmt: skip
        return hf_stitch.load(llava(), processor=processor, context="<image> w5 w6")
    width = {"ved": 32, "ved projected": 48}[kind]
    return hf_stitch.load(ved(width), processor=of_images())


TOWERS: dict[str, Any] = {
    "vit": lambda: vit(),
    "wide vit": lambda: vit(48, num_hidden_layers=2),
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**{**SMALL, "hidden_size": 48}, **IMAGES)).eval(),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, **IMAGES, vision_use_head=False)).eval(),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                                                     **IMAGES)).eval(),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "tower"), [
    ("ved", "wide vit"), ("ved projected", "wide vit"), ("llava", "clip"), ("llava", "dinov2"),
])  # fmt: skip
def test_a_folded_network_is_one_of_the_class_and_computes_what_the_mapped_one_does(kind: str, tower: str) -> None:
    old = network(kind)
    before = {name: value.clone() for name, value in old.model.state_dict().items()}
    found = exchange(old, hf_stitch.load(TOWERS[tower](), processor=of_images()), images(48), "vision", QUIET)
    assert found.folded and found.error < 1e-5 and type(found.model) is type(old.model)
    assert all(torch.equal(value, before[name]) for name, value in old.model.state_dict().items())
    assert set(found.held_out) == {"procrustes", "procrustes(scale=True)", "ridge"} and found.matcher in found.held_out


def test_the_same_tower_changes_nothing() -> None:
    old = network("llava")
    own = copy.deepcopy(old.model.model.vision_tower)
    found = exchange(old, hf_stitch.load(own, processor=of_images()), images(48), "vision", QUIET, matcher="lstsq")
    row = found.scores["exchanged"]
    assert row["kl_divergence"].value < 1e-8 and row["agreement"].value == 1
    assert len(found.captions) == 8 and all(each.before == each.after != "" for each in found.captions)
    assert found.scores["no map"]["kl_divergence"].value < 1e-12
    assert found.scores["mean only"]["kl_divergence"].value > 1e-3
    assert found.scores["another image"]["kl_divergence"].value > 1e-3


def test_scales_and_shifts_of_a_tower_are_found_by_its_images_alone() -> None:
    old = network("ved")
    own, scale = copy.deepcopy(old.model.encoder), torch.linspace(0.5, 2, 32)
    with torch.no_grad():
        own.layernorm.weight.mul_(scale)
        own.layernorm.bias.mul_(scale).add_(scale)
    found = exchange(old, hf_stitch.load(own, processor=of_images()), images(64), "vision", QUIET, matcher="ridge")
    assert found.scores["exchanged"]["kl_divergence"].value < 1e-6
    assert found.scores[MOMENTS]["kl_divergence"].value < 1e-6 < found.scores[NO_MAP]["kl_divergence"].value


def test_matchers_are_chosen_on_images_that_fitted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, fits, scores = sys.modules["hf_stitch_towers.exchange"], list[set[Any]](), list[set[Any]]()
    fit_maps, scored = Folded.fit_maps, module.scored

    def fitting(self: Any, matchers: Any, samples: Any) -> Any:
        fits.append({*samples.ids})
        return fit_maps(self, matchers, samples)

    def scoring(place: Any, samples: Any, rows: Any) -> Any:
        scores.append({*samples.ids})
        return scored(place, samples, rows)

    monkeypatch.setattr(Folded, "fit_maps", fitting)
    monkeypatch.setattr(module, "scored", scoring)
    exchange(network("ved"), hf_stitch.load(TOWERS["vit"](), processor=of_images()), images(48), "vision", QUIET)
    (first, both), (chosen, tested) = fits, scores
    assert not first & chosen and both == first | chosen and not both & tested


def test_a_saved_network_loads_without_hf_stitch(tmp_path: Path) -> None:
    old = network("llava")
    found = exchange(old, hf_stitch.load(TOWERS["siglip"](), processor=of_images()), images(48), "vision", QUIET)
    found.save_pretrained(tmp_path / "new")
    found.save_pretrained(tmp_path / "new")
    inputs = found.preprocess(images(2, seed=3))
    torch.save((inputs, found.model.generate(**inputs, max_new_tokens=5)), tmp_path / "wanted.pt")
    code = (
        "import sys, torch, transformers\n"
        f"inputs, wanted = torch.load({str(tmp_path / 'wanted.pt')!r})\n"
        f"model = transformers.AutoModelForImageTextToText.from_pretrained({str(tmp_path / 'new')!r}).eval()\n"
        "assert torch.equal(model.generate(**inputs, max_new_tokens=5), wanted)\n"
        f"processor = transformers.AutoProcessor.from_pretrained({str(tmp_path / 'new')!r})\n"
        "assert 'hf_stitch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert "decided by the image" in (tmp_path / "new" / "README.md").read_text()


def test_a_tower_of_another_kind_is_stitched() -> None:
    old = network("ved")
    torch.manual_seed(2)
    resnet = timm.create_model("resnet10t", num_classes=3).eval()
    new = hf_stitch.load(resnet, example_inputs=torch.randn(2, 3, SIZE, SIZE), processor=to_tensor)
    found = exchange(old, new, images(64), "vision", QUIET, matcher="ridge")
    assert not found.folded and isinstance(found.model, hf_stitch.StitchedModel)
    assert "is a function" in found.notes[0] and "not folded" in found.notes[1]
    inputs = found.preprocess(images(2, seed=3))
    ids = found.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    assert ids.shape == (2, 5)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.resize((SIZE, SIZE)))).permute(2, 0, 1).float() / 255


def test_swap_exchanges_a_part(tmp_path: Path) -> None:
    new = hf_stitch.load(TOWERS["vit"](), processor=of_images())
    found = hf_stitch.swap(network("ved"), new, images(48), part="vision", matcher="ridge", progress=False)
    assert found.to_pandas()["row"].iloc[0] == "original" and found.matcher == "ridge"
    again = type(found).from_dict(found.to_dict())
    assert again == found
    again.to_html(tmp_path / "page.html")
    assert "as good as before" in (tmp_path / "page.html").read_text()
    with pytest.raises(TypeError, match="cannot be combined with pooling"):
        hf_stitch.swap(network("ved"), new, images(48), part="vision", pooling="mean", progress=False)


def test_tokens_behind_the_end_of_a_caption_decide_nothing() -> None:
    torch.manual_seed(0)
    logits = {name: torch.randn(2, 5, 7, dtype=torch.float64) for name in (ORIGINAL, MEAN, "exchanged")}
    outputs = Captions(None, "vision")
    outputs.tokens = logits[ORIGINAL].argmax(-1)
    outputs.counted = torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])
    found = outputs.measures({name: [values] for name, values in logits.items()})["exchanged"]
    logs = {name: values.log_softmax(-1) for name, values in logits.items()}
    for place, length in enumerate((4, 2)):
        own, mean, new = (logs[name][place, :length] for name in (ORIGINAL, MEAN, "exchanged"))
        decided = mean.argmax(-1) != own.argmax(-1)
        changes = (new - own).gather(1, own.argmax(-1)[:, None])[:, 0]
        assert found[DECIDED][place] == pytest.approx(float(changes[decided].mean()))
        agrees = (new.argmax(-1) == own.argmax(-1)).double()
        assert found[DECIDED_AGREEMENT][place] == pytest.approx(float(agrees[decided].mean()))


def test_a_stitched_network_that_cannot_be_saved_says_so_at_once(tmp_path: Path) -> None:
    old = network("ved").model
    old.encoder = hf.ViTModel(old.encoder.config, add_pooling_layer=False).eval()  # which no config tells of
    given = hf_stitch.load(old, processor=of_images())
    found = exchange(given, hf_stitch.load(vit(patch_size=8), processor=of_images()), images(48), "vision", QUIET)
    assert not found.folded and "cannot be saved" in found.notes[-1]
    with pytest.raises(ValueError, match="cannot be saved"):
        found.save_pretrained(tmp_path / "new")


def test_positions_of_the_image_are_known_in_the_decoder() -> None:
    old = network("llava")
    given = old.preprocess(images(2))
    layer = next(name for name in old.layers if "language_model" in name)
    found = old.encode(given, layer)[layer]
    assert torch.equal(old.positions_of_content(found), given["input_ids"] == MARK)
    with pytest.raises(ValueError, match="pass a layer of the decoder"):
        old.positions_of_content(old.encode(given, old.layers[0])[old.layers[0]])


def clip(width: int = 32, **more: Any) -> Any:
    """A network of two towers with its processors."""
    torch.manual_seed(width)
    vision = hf.CLIPVisionConfig(**{**SMALL, **IMAGES, "hidden_size": width, **more})
    text = hf.CLIPTextConfig(**SMALL, vocab_size=60, max_position_embeddings=16, eos_token_id=2, bos_token_id=1)
    made = hf.CLIPModel(hf.CLIPConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=16))
    return louder(made.eval())


def test_a_tower_of_a_pair_is_exchanged_by_embeddings() -> None:
    old = hf_stitch.load(clip(), processor=of_images())
    own = hf_stitch.load(copy.deepcopy(old.model.vision_model), processor=of_images())
    found = exchange(old, own, images(80), "vision", QUIET, matcher="lstsq")
    assert found.folded and type(found.model) is hf.CLIPModel and found.error < 1e-5
    assert found.scores["exchanged"]["cosine"].value == pytest.approx(1) and found.figures == ("cosine", "nearest")
    assert found.scores["exchanged"]["nearest"].value == 1 and "mean only" in found.beaten
    other = hf_stitch.load(clip(48, num_hidden_layers=2).vision_model, processor=of_images())
    assert exchange(old, other, images(80), "vision", QUIET).model.config.vision_config.hidden_size == 48


class Doubled(hf.ViTModel):
    """An encoder with code of its own under the config of a ViT."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        found = super().forward(*inputs, **options)
        found["last_hidden_state"] = 2 * found["last_hidden_state"] ** 2
        return found


def test_an_encoder_that_is_not_what_its_config_tells_is_not_folded() -> None:
    torch.manual_seed(0)
    own = hf_stitch.load(Doubled(vit().config).eval(), processor=of_images())
    found = exchange(network("ved"), own, images(48), "vision", QUIET, matcher="ridge")
    assert not found.folded and "cannot be rebuilt from its config" in found.notes[0]


def test_neighbours_are_no_other_images_and_labels_divide_nothing() -> None:
    from hf_stitch_towers.exchange import half_away, split_unlabelled

    whole = hf_stitch.Samples.of(images(12))
    assert half_away(whole.take(2), whole).ids == (6, 7)
    data = hf_stitch.Samples.of(labelled(40))
    plain = hf_stitch.Samples.of(images(40))
    assert [part.ids for part in split_unlabelled(data, 0)] == [part.ids for part in split_unlabelled(plain, 0)]
    assert split_unlabelled(data, 0)[1].labels is not None


def paligemma() -> Any:
    vision = hf.SiglipVisionConfig(**SMALL, **IMAGES, vision_use_head=False, projection_dim=32)
    text = {"model_type": "gemma", **SMALL, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 60}
    config = hf.PaliGemmaConfig(vision_config=vision.to_dict(), text_config=text, image_token_index=MARK,
                                projection_dim=32, hidden_size=32)  # fmt: skip
    return louder(hf.PaliGemmaForConditionalGeneration(config).eval())


@pytest.mark.parametrize("kind", ["ved", "prompted", "llava", "paligemma", "options"])
def test_captions_are_what_the_network_predicts(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "paligemma":
        ids = torch.tensor([[MARK] * 16 + [5, 6]] * 3)
        model, inputs = paligemma(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= {"pixel_values": torch.randn(3, 3, SIZE, SIZE), "token_type_ids": torch.zeros_like(ids)}
    else:
        given = network("llava" if kind in ("llava", "options") else "ved")
        given = given.beside({"decoder_input_ids": [1, 7, 8]}) if kind == "prompted" else with_context(given)[0]
        model, inputs = given.model, full_inputs(given, hf_stitch.Samples.of(images(3)))
    if kind == "options":
        for option, value in (("num_beams", 2), ("return_dict_in_generate", True), ("repetition_penalty", 1.5)):
            setattr(model.generation_config, option, value)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    found = with_captions(model, inputs)
    full, wanted, counted = found.full, found.tokens, found.counted
    assert torch.equal(full[name][:, : inputs[name].shape[1]], inputs[name])
    logits = model(**full).logits[:, -wanted.shape[1] :].detach()
    logits[..., MARK] = -torch.inf  # which is never written
    assert torch.equal(logits.argmax(-1)[counted], wanted[counted])
    assert bool((counted | ((wanted == 2).cumsum(1) > 0)).all())  # up to their ends


def test_another_image_is_another_one_in_every_batch() -> None:
    old, new = network("ved"), hf_stitch.load(TOWERS["vit"](), processor=of_images())
    one, many = (
        exchange(old, new, images(48), "vision", Run(progress=False, batch_size=size), matcher="ridge").scores
        for size in (1, 64)
    )
    for row in one:
        for figure, score in one[row].items():
            assert score.value == pytest.approx(many[row][figure].value, rel=1e-4, abs=1e-6, nan_ok=True), (row, figure)
    assert one["another image"]["kl_divergence"].value > one["exchanged"]["kl_divergence"].value > 0


def test_a_bfloat16_network_and_one_in_train_mode() -> None:
    old, new = network("llava"), hf_stitch.load(TOWERS["clip"](), processor=of_images())
    exact = exchange(old, new, images(48), "vision", QUIET, matcher="ridge")
    old.model.train()
    again = exchange(old, new, images(48), "vision", QUIET, matcher="ridge")
    assert old.model.training and again.scores == exact.scores
    half = hf_stitch.load(old.model.eval().bfloat16(), processor=old.processor, context="<image> w5 w6")
    found = exchange(half, new, images(48), "vision", QUIET, matcher="ridge")
    assert found.folded and found.error < 3e-2 and found.model.dtype == torch.bfloat16


def test_a_tower_with_other_patches_has_a_processor_that_fits() -> None:
    wide = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8)).eval()
    processor = hf.ViTImageProcessor(size={"height": 32, "width": 32})
    found = exchange(network("llava"), hf_stitch.load(wide, processor=processor), images(48), "vision", QUIET)
    assert found.folded and not found.notes and found.processor.patch_size == 8
    made = found.processor(images=images(2), text=["<image> w5"] * 2, return_tensors="pt")
    assert found.model.generate(**made, max_new_tokens=2).shape[0] == 2


def test_an_encoder_that_reads_two_things_gives_its_tower() -> None:
    whole = hf_stitch.load(clip(), processor=of_images())
    found = exchange(network("llava"), whole, images(48), "vision", QUIET, matcher="ridge")
    assert found.folded and found.encoder == "CLIPVisionModel"


def test_a_network_without_a_context_reads_a_default_text() -> None:
    given = network("llava")
    old = hf_stitch.load(given.model, processor=given.processor)
    found = exchange(old, hf_stitch.load(TOWERS["clip"](), processor=of_images()), images(48), "vision", QUIET)
    assert "Describe the image" in found.notes[0]


def test_a_paligemma_takes_a_siglip_of_its_own() -> None:
    model, other = paligemma(), TOWERS["siglip"]()
    assert not hasattr(other.config, "projection_dim")
    tower = tower_of(model, "vision")
    made = with_tower(model, tower, other)
    assert made.get_submodule(tower.name).config.projection_dim == 32


KILLED = """
import os, signal, sys
from pathlib import Path
import test_exchange as tests
(folder,) = sys.argv[1:]
found = tests.saved()
found.save_pretrained(folder)
kind_of = type(found.processor)
written = kind_of.save_pretrained
kind_of.save_pretrained = lambda self, place: (written(self, place), os.kill(os.getpid(), signal.SIGKILL))
found.save_pretrained(folder)
"""


def saved() -> Any:
    """A stitched result to save."""
    old = hf_stitch.load(network("ved").model, processor=ImageAndTextProcessor(of_images(), words()))
    return exchange(old, hf_stitch.load(vit(patch_size=8), processor=of_images()), images(48), "vision", QUIET,
                    matcher="ridge")  # fmt: skip


def test_a_killed_save_leaves_the_old_folder_whole(tmp_path: Path) -> None:
    folder, path = tmp_path / "new", [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n{KILLED}"
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()[-500:]
    files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    hf_stitch.StitchedModel.from_pretrained(folder)
    assert files == {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    saved().save_pretrained(folder)
    assert "decided by the image" in (folder / "README.md").read_text() and not (folder / ".hf_stitch_save").exists()


def test_a_broken_save_leaves_the_old_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = saved()
    found.save_pretrained(tmp_path / "new")
    before = {each.name: each.read_bytes() for each in (tmp_path / "new").iterdir() if each.is_file()}

    def broken(self: Any, folder: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(type(found.processor), "save_pretrained", broken)
    with pytest.raises(OSError, match="no space left"):
        found.save_pretrained(tmp_path / "new")
    assert before == {each.name: each.read_bytes() for each in (tmp_path / "new").iterdir() if each.is_file()}


def labelled(count: int, seed: int = 0, names: tuple[str, ...] = ("w7", "w9", "w11")) -> datasets.Dataset:
    """Images with classes whose names are words."""
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    rows = {"image": images(count, seed), "label": [place % len(names) for place in range(count)]}
    return datasets.Dataset.from_dict(rows, features=kinds)


def test_names_of_classes_are_choices() -> None:
    old, encoder = network("llava"), hf_stitch.load(TOWERS["clip"](), processor=of_images())
    test = labelled(24, seed=5)
    found = exchange(old, encoder, images(48), "vision", QUIET, test_data=test, matcher="ridge")
    inputs = found.preprocess(list(test["image"]))
    with torch.no_grad():
        logs = found.model(**inputs).logits[:, -1].double().log_softmax(-1)[:, [7, 9, 11]]
    right = torch.tensor(test["label"])
    row = found.scores["exchanged"]
    assert row["accuracy"].value == pytest.approx(float((logs.argmax(1) == right).double().mean()))
    assert row["answer_log_likelihood"].value == pytest.approx(float(logs.gather(1, right[:, None]).mean()), abs=1e-4)
    change = row["accuracy"].value - found.scores["original"]["accuracy"].value
    assert row["accuracy_change"].value == pytest.approx(change)
    assert "the right answer is the most likely for" in found.verdict
    same = labelled(24, seed=5, names=("zebra", "yak"))  # both unknown words
    unread = exchange(old, encoder, images(48), "vision", QUIET, test_data=same, matcher="ridge")
    assert "accuracy" not in unread.scores["exchanged"] and "does not distinguish" in unread.notes[0]


@pytest.mark.parametrize("kind", ["llava", "ved"])
def test_answers_are_scored_by_their_likelihood(kind: str) -> None:
    old = network("llava")
    if kind == "ved":
        old = hf_stitch.load(network("ved").model, processor=ImageAndTextProcessor(of_images(), words()), context="w5")
    encoder = hf_stitch.load(TOWERS["clip" if kind == "llava" else "vit"](), processor=of_images())
    pictures, answers = images(20, seed=5), [f"w{3 + place} w{4 + place}" + " w8" * (place % 2) for place in range(20)]
    rows = [{"image": image, "answer": answer} for image, answer in zip(pictures, answers, strict=True)]
    found = exchange(old, encoder, images(48), "vision", QUIET, test_data=rows, matcher="ridge")
    wanted = []
    for image, answer in zip(pictures, answers, strict=True):
        inputs = full_inputs(with_context(old)[0], hf_stitch.Samples.of([image]))
        name = "input_ids" if kind == "llava" else "decoder_input_ids"
        assert inputs[name][0, -1] == (6 if kind == "llava" else 5) and inputs[name].shape[1] > 1
        tokens = torch.tensor([[int(word[1:]) for word in answer.split()]])
        inputs = {**inputs, name: torch.cat([inputs[name], tokens], 1)}
        inputs.pop("attention_mask", None)
        with torch.no_grad():
            logs = old.model(**inputs).logits.double().log_softmax(-1)
        likely = logs[:, -tokens.shape[1] - 1 : -1].gather(-1, tokens[..., None])
        wanted.append(float(likely.mean()))
    row = found.scores["original"]
    assert row["answer_log_likelihood"].value == pytest.approx(np.mean(wanted), abs=1e-5) and "accuracy" not in row
    assert "the log-likelihood of right answers" in found.verdict


@pytest.mark.parametrize(("kind", "how"), [("llava", "folded"), ("ved", "stitched")])
def test_a_pipeline_reads_an_exchanged_network(kind: str, how: str, tmp_path: Path) -> None:
    old = network("llava")
    if kind == "ved":
        old = hf_stitch.load(network("ved").model, processor=ImageAndTextProcessor(of_images(), words()), context="w5")
    tower = {"llava": "clip", "ved": "vit"}[kind]
    model = TOWERS[tower]() if how == "folded" else vit(patch_size=8)
    encoder = hf_stitch.load(model, processor=of_images())
    found = exchange(old, encoder, images(48), "vision", QUIET, matcher="ridge")
    assert found.folded == (how == "folded")
    found.save_pretrained(tmp_path / "new")
    assert "decided by the image" in (tmp_path / "new" / "README.md").read_text()
    pipeline = hf.pipeline("image-text-to-text", model=str(tmp_path / "new"))
    text = "<image> w5 w6" if kind == "llava" else "w5"
    given = images(2, seed=3)
    made = pipeline(images=given, text=[text] * 2, generate_kwargs={"max_new_tokens": 3, "min_new_tokens": 3})
    own = found.preprocess(given)
    ids = found.model.generate(**own, max_new_tokens=3, min_new_tokens=3)
    ends = old.processor.tokenizer.batch_decode(ids[:, -3:])
    assert [each["generated_text"].split()[-3:] for each in made] == [end.split() for end in ends]


def test_each_image_is_read_with_its_own_text(tmp_path: Path) -> None:
    given = network("llava")
    old = hf_stitch.load(given.model, processor=given.processor)
    rows = [{"image": image, "text": f"<image> w5{' w6' * (place % 3)}"} for place, image in enumerate(images(48))]
    encoder = hf_stitch.load(vit(patch_size=8), processor=of_images())
    found = exchange(old, encoder, rows, "vision", QUIET, matcher="ridge")
    assert not found.folded and not any("Describe" in note for note in found.notes)
    written = found.model.generate(**found.preprocess([rows[each.image] for each in found.captions]),
                                   max_new_tokens=16, do_sample=False)[:, -16:]  # fmt: skip
    texts = given.processor.tokenizer.batch_decode(written, skip_special_tokens=True)
    assert texts == [each.after for each in found.captions]
    found.save_pretrained(tmp_path / "new")
    again: Any = hf_stitch.StitchedModel.from_pretrained(tmp_path / "new")
    given_to = again.preprocess([rows[each.image] for each in found.captions])
    assert torch.equal(again.generate(**given_to, max_new_tokens=16, do_sample=False)[:, -16:], written)


def test_buffers_that_no_state_contains_stay_exact_in_half_precision() -> None:
    config = llava().config
    model = hf.LlavaForConditionalGeneration(config)
    exact = model.model.language_model.rotary_emb.inv_freq.clone()
    model = model.bfloat16()
    model.model.language_model.rotary_emb.inv_freq = exact  # as from_pretrained leaves it
    made = with_tower(model, tower_of(model, "vision"), copy.deepcopy(model.model.vision_tower))
    kept = made.model.language_model.rotary_emb.inv_freq
    assert kept.dtype == torch.float32 and torch.equal(kept, exact)
    assert next(made.model.vision_tower.parameters()).dtype == torch.bfloat16


def test_a_name_that_begins_another_is_no_choice() -> None:
    data = labelled(24, seed=5, names=("w7", "w7 w8"))
    found = exchange(network("llava"), hf_stitch.load(TOWERS["clip"](), processor=of_images()), images(48), "vision",
                     QUIET, test_data=data, matcher="ridge")  # fmt: skip
    assert "accuracy" not in found.scores["exchanged"] and "beginning" in found.notes[0]


def test_answers_follow_the_special_tokens_that_all_captions_begin_with() -> None:
    tokens = torch.tensor([[2, 55, 7, 8], [2, 55, 9, 8]])
    inputs = {"input_ids": torch.tensor([[1], [1]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    made = CaptionInputs(inputs, "input_ids", "attention_mask", 0, inputs["input_ids"], tokens, tokens > 0)
    moved = made.move_shared_tokens([2, 55], 0)
    assert moved.text.tolist() == [[1, 2, 55]] * 2 and moved.tokens.tolist() == [[7, 8], [9, 8]]
    full = moved.with_tokens(torch.tensor([[5, 6], [5, 6]]))
    assert full["input_ids"].tolist() == [[1, 2, 55, 5]] * 2 and full["attention_mask"].tolist() == [[1] * 4] * 2
    assert made.move_shared_tokens([2, 55], 2).text.tolist() == [[1]] * 2  # an end is no beginning


def padded_behind() -> Any:
    old = with_context(network("llava"))[0]
    inputs = full_inputs(old, hf_stitch.Samples.of(images(2)))
    inputs["attention_mask"][0, -1] = 0
    return with_captions(old.model, inputs)


def exchanged(old: Any, tower: Any, count: int = 48, part: str = "vision", **options: Any) -> Any:
    return exchange(old, hf_stitch.load(tower, processor=of_images()), images(count), part, QUIET, **options)


def planned() -> Any:
    new = hf_stitch.load(vit(), processor=of_images())
    return hf_stitch.plan(hf_stitch.swap, network("ved"), new, images(48), part="vision")


def of_two_towers() -> Any:
    return hf_stitch.load(clip(), processor=of_images())


REFUSALS: dict[str, Callable[[], object]] = {
    "part='audio' requires a tower with a nested config": lambda: exchanged(network("ved"), vit(), part="audio"),
    "too few": lambda: exchanged(network("ved"), vit(), 10),
    "plans are not available": planned,
    "is not a transformers class": lambda: with_tower(ved(), tower_of(ved(), "vision"), torch.nn.Linear(2, 2)),
    # no bias can be folded, and 48 vectors have width 64
    "features .* at least": lambda: exchanged(of_two_towers(), clip(64).vision_model, matcher="lstsq"),
    "padding_side = 'left'": padded_behind,
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()
