"""The gallery: what it does without its interface, and what it refuses."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer, VisionEncoderDecoderModel

import hf_stitch

SPACE = Path(__file__).parents[2] / "examples" / "space"


@pytest.fixture(scope="module")
def gallery() -> Iterator[Any]:
    pytest.importorskip("sklearn")
    sys.path.insert(0, str(SPACE))
    import gallery

    before, gallery.EPOCHS, gallery.SAMPLES = (gallery.EPOCHS, gallery.SAMPLES), 1, 120
    yield gallery
    gallery.EPOCHS, gallery.SAMPLES = before
    sys.path.remove(str(SPACE))


def test_two_networks_are_compared_stitched_tried_and_downloaded(gallery: Any, tmp_path: Path) -> None:
    a, b = "CNN, seed 0", "transformer, seed 0"
    data = gallery.samples(None, "")
    atlas = gallery.compare(a, b, data)
    assert atlas["linear_cka"].shape == (len(gallery.cuts(a)), len(gallery.cuts(b))) and atlas.tests
    stitched = gallery.stitch(a, a, *atlas.layers_a[:1] * 2, data)
    assert stitched.evaluation["agreement"].value > 0.9  # the same network
    found = gallery.answers(stitched, Image.new("RGB", (40, 30), "white"))
    assert found["stitched"].keys() <= set("0123456789") and len(found["target"]) == 5
    said = gallery.verdict(stitched.evaluation)
    assert said.startswith("Accuracy: **") and "mean only 0." in said and "chance 0." in said
    report, archive = gallery.downloads({"a": atlas, "b": stitched.evaluation}, stitched, tmp_path / "out")
    assert len(hf_stitch.load_report(report)) == 2
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    again = hf_stitch.StitchedModel.from_pretrained(tmp_path / "stitched")
    inputs = stitched.preprocess([Image.new("RGB", (40, 30), "white")])
    assert (again(**inputs).logits == stitched(**inputs).logits).all()


@pytest.fixture(scope="module")
def described(gallery: Any) -> dict[str, Any]:
    """What a captioner with another encoder writes, by the name of this encoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "SAMPLES", 400)
        patch.setattr(gallery, "EPOCHS", 4)
        forget(gallery)
        found = {name: gallery.describe("transformer, seed 0", name) for name in ("transformer, seed 1", "CNN, seed 0")}
    forget(gallery)
    return found


def forget(gallery: Any) -> None:
    for cached in (gallery.pictures, gallery.trained, gallery.captioner):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["transformer, seed 1", "CNN, seed 0"])
def test_an_exchanged_captioner_still_names_the_class(described: dict[str, Any], name: str) -> None:
    done = described[name]
    assert len(done.pictures) == len(done.classes) == len(done.before) == len(done.after) == done.found.n == 100
    assert done.right(done.before) > 0.5 and done.right(done.after) > 0.3  # by chance 0.1
    assert done.found.folded == (name == "transformer, seed 1")
    assert {"mean only", "another image"} <= set(done.found.beaten)
    shown = [(each.before, each.after) for each in done.found.captions]
    assert shown == list(zip(done.before, done.after, strict=True))[: len(shown)]
    said = done.verdict()
    assert said.startswith(f"With the {name.replace(', ', ' of ')} as its vision tower, ")
    assert f"**{done.right(done.after):.1%} after**" in said and "alone is right for 1" in said
    assert done.table(3).count("<img") == 3 and f"<td>{done.after[2]}</td>" in done.table(3)


def test_exchanged_captioners_are_downloaded(gallery: Any, described: dict[str, Any], tmp_path: Path) -> None:
    for name, done in described.items():
        report, archive = gallery.downloads({"a": done.found}, done.found, tmp_path / name, "exchanged")
        assert hf_stitch.load_report(report)[0].verdict == done.found.verdict
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(tmp_path / name)
    plain = VisionEncoderDecoderModel.from_pretrained(tmp_path / "transformer, seed 1" / "exchanged")
    done = described["transformer, seed 1"]
    pixels = done.found.preprocess(done.pictures[:9])["pixel_values"]
    reader = AutoTokenizer.from_pretrained(tmp_path / "transformer, seed 1" / "exchanged")
    assert reader.batch_decode(plain.generate(pixel_values=pixels), skip_special_tokens=True) == done.after[:9]
    stitched = hf_stitch.StitchedModel.from_pretrained(tmp_path / "CNN, seed 0" / "exchanged")
    done = described["CNN, seed 0"]
    ids = stitched.generate(**stitched.preprocess(done.pictures[:9]), max_new_tokens=6)
    assert reader.batch_decode(ids, skip_special_tokens=True) == done.after[:9]


def test_captions_need_the_gallery(gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gallery.Refused, match="Choose one of transformer, seed 0"):
        gallery.describe("CNN, seed 0", "CNN, seed 1")
    with pytest.raises(gallery.Refused, match="as new encoder one of CNN, seed 0"):
        gallery.describe("transformer, seed 0", "alice/network")
    names = ("<i>black  cat", "dog")
    for number in range(44):
        place = tmp_path / "pictures" / names[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (20, 30), (number % 2) * 200 + number).save(place)
    monkeypatch.setattr(gallery, "DATA", str(tmp_path / "pictures"))
    forget(gallery)
    done = gallery.describe("transformer, seed 0", "transformer, seed 1")
    monkeypatch.setattr(gallery, "SAMPLES", 42)
    forget(gallery)
    with pytest.raises(gallery.Refused, match="Captions require at least 43 images, but GALLERY_DATA has 42"):
        gallery.describe("transformer, seed 0", "transformer, seed 1")
    forget(gallery)
    assert gallery.caption_of(names[0]) == "a picture of a <i>black cat"
    assert set(done.classes[:8]) == {"<i>black  cat", "dog"}  # a folder comes class by class
    assert set(done.before) <= {gallery.caption_of(name) for name in names} and done.right(done.before) > 0.6
    for page in (done.table(), Path(gallery.downloads({"a": done.found}, None, tmp_path / "out")[0]).read_text()):
        assert "&lt;i&gt;black" in page and "<i>black" not in page


def test_own_samples_have_limits(gallery: Any, tmp_path: Path) -> None:
    with pytest.raises(gallery.Refused, match="accepts 20 to 400 samples, got 2"):
        gallery.samples(None, "one\ntwo\n\n")
    with pytest.raises(gallery.Refused, match="images or enter texts, not both"):
        gallery.samples(["x.png"], "one")
    assert len(gallery.samples(None, "a line\n" * 30)) == 30
    paths = []
    for number in range(20):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.new("L", (9, 9), number).save(paths[-1])
    assert len(gallery.samples(paths, "")) == 20
    Path(paths[3]).write_text("no image")
    with pytest.raises(gallery.Refused, match=r"3\.png is not a readable image"):
        gallery.samples(paths, "")
    with pytest.raises(gallery.Refused, match="accepts images of 0 MB in total"):
        gallery.samples(paths, "", gallery.Limits(megabytes=0))


def test_long_jobs_and_wrong_samples_are_refused(gallery: Any) -> None:
    a = "CNN, seed 0"
    with pytest.raises(gallery.Refused, match="accepts jobs of up to 0 s"):
        gallery.compare(a, a, gallery.pictures(), gallery.Limits(seconds=0))
    with pytest.raises(gallery.Refused):
        gallery.compare(a, a, hf_stitch.Samples.of(["a text"] * 30))


def test_an_accuracy_is_called_good_or_not(gallery: Any) -> None:
    score = hf_stitch.analysis.Score
    scores = {who: {"accuracy": score(*at)} for who, at in (("stitched", (0.8, 0.7, 0.9)), ("chance", (0.1, 0.1, 0.1)))}
    good = hf_stitch.analysis.Evaluation("image-classification", 9, "sha256:0", scores)
    assert gallery.verdict(good).endswith("chance 0.100. Better than chance: the map transfers information.")
    assert "Accuracy is not better than chance" in gallery.verdict(replace(good, no_better=("chance",)))


def test_real_pictures_are_read_from_a_folder(gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        place = tmp_path / "pictures" / ("cat" if number % 2 else "dog") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (600, 300), number).save(place)
    gallery.pictures.cache_clear()
    monkeypatch.setattr(gallery, "DATA", str(tmp_path / "pictures"))
    read = gallery.pictures()
    gallery.pictures.cache_clear()
    assert read.label_names == ("cat", "dog") and len(read) == 8
    assert next(read.batches(1)).samples[0].size == (256, 128)
    monkeypatch.setattr(gallery, "DATA", str(tmp_path / "pictures" / "cat"))
    with pytest.raises(ValueError, match=r"four or more images of two or more classes, got .* from .*cat"):
        gallery.pictures()


@pytest.mark.parametrize("architecture", ["cnn", "vit"])
def test_one_picture_more_than_whole_batches_trains_a_network(gallery: Any, architecture: str) -> None:
    images = [Image.new("RGB", (20, 20), (7 * number, 0, 0)) for number in range(gallery.networks.BATCH + 1)]
    samples = hf_stitch.Samples.of(images, label=[number % 2 for number in range(len(images))])
    assert len(list(gallery.networks.train(gallery.networks.build(architecture, 0, samples), samples, 2, 0))) == 2


def test_many_layers_are_thinned(gallery: Any) -> None:
    name = "CNN, seed 0"
    whole, few = gallery.cuts(name), gallery.cuts(name, gallery.Limits(layers=2))
    assert few == [whole[0], whole[-1]]
    assert gallery.layer(name, whole[1]) == whole[1]
    assert gallery.layer(name, None) == gallery.layer(name, "of another network") == whole[len(whole) // 2]


def test_networks_of_the_hub_are_checked_before_they_are_loaded(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        size: Any = None

        def model_info(self, name: str, files_metadata: bool) -> Any:
            if name == "none/such":
                raise OSError("no such model")
            return type("Info", (), {"safetensors": self.size and type("Size", (), {"total": self.size})})

    monkeypatch.setattr(gallery, "HfApi", Api)
    loaded: list[Any] = []
    monkeypatch.setattr(hf_stitch, "load", lambda *given, **options: loaded.append((given, options)))
    with pytest.raises(gallery.Refused, match="public model 'none/such'"):
        gallery.network("none/such")
    with pytest.raises(gallery.Refused, match="has an unknown number of parameters"):
        gallery.network("alice/pickled")
    Api.size = 10**9
    with pytest.raises(gallery.Refused, match="has 1,000,000,000 parameters"):
        gallery.network("alice/large")
    assert not loaded
    Api.size = 10**6
    gallery.network("alice/small")
    assert loaded == [(("alice/small",), {})]  # no option that allows code of a repository
