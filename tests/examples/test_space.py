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


def test_own_samples_have_limits(gallery: Any, tmp_path: Path) -> None:
    with pytest.raises(gallery.Refused, match="takes 20 to 400 samples, got 2"):
        gallery.samples(None, "one\ntwo\n\n")
    with pytest.raises(gallery.Refused, match="images or texts, not both"):
        gallery.samples(["x.png"], "one")
    assert len(gallery.samples(None, "a line\n" * 30)) == 30
    paths = []
    for number in range(20):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.new("L", (9, 9), number).save(paths[-1])
    assert len(gallery.samples(paths, "")) == 20
    Path(paths[3]).write_text("no image")
    with pytest.raises(gallery.Refused, match=r"3\.png is no image"):
        gallery.samples(paths, "")
    with pytest.raises(gallery.Refused, match="takes images of 0 MB together"):
        gallery.samples(paths, "", gallery.Limits(megabytes=0))


def test_long_jobs_and_wrong_samples_are_refused(gallery: Any) -> None:
    a = "CNN, seed 0"
    with pytest.raises(gallery.Refused, match="the gallery takes jobs of 0 s"):
        gallery.compare(a, a, gallery.pictures(), gallery.Limits(seconds=0))
    with pytest.raises(gallery.Refused):
        gallery.compare(a, a, hf_stitch.Samples.of(["a text"] * 30))


def test_an_accuracy_is_called_good_or_not(gallery: Any) -> None:
    score = hf_stitch.analysis.Score
    scores = {who: {"accuracy": score(*at)} for who, at in (("stitched", (0.8, 0.7, 0.9)), ("chance", (0.1, 0.1, 0.1)))}
    good = hf_stitch.analysis.Evaluation("image-classification", 9, "sha256:0", scores)
    assert gallery.verdict(good).endswith("chance 0.100. Better than chance: the map carries something over.")
    assert "Accuracy is no better than chance" in gallery.verdict(replace(good, no_better=("chance",)))


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
    with pytest.raises(gallery.Refused, match="no public model 'none/such'"):
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
