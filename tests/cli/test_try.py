"""`recon-cli try` lays the results of settings side by side, names the best, and refuses in plain words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from skimage.data import camera

import halotile
from halotile.errors import ConfigError, OutputRefused
from tests.cli.engine import ask, printed, refused

JOB = """\
version: 1
job: denoise
input: {path: a.npy}
output: {path: o.zarr}
denoiser: {name: tv, strength: 1.0, sigma: auto}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    noise = 15 * np.random.default_rng(0).standard_normal((200, 160))
    np.save(tmp_path / "a.npy", (camera()[60:260, 150:310] + noise).astype("f4"))
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_combination_is_drawn_and_the_best_is_named(folder: Path) -> None:
    lists = ("--set", "denoiser.name=tv,nlm", "--set", "denoiser.strength=0.2,0.8,8")
    result = printed("try", "job.yaml", "sheet.png", *lists)
    assert result.count("(SURE)") == 6
    assert " ".join(result.split()).count("% detected") == 6
    assert result.count("strength=8") == result.count("; the residual holds structure") == 2
    suggested = result.partition("suggested")[2]
    assert "--set denoiser.strength=0.8" in suggested
    sheet = np.asarray(Image.open(folder / "sheet.png")).astype(int)
    assert (sheet.shape > np.array([2 * 200, 4 * 160, 0])).all()
    assert sorted(path.name for path in folder.iterdir()) == ["a.npy", "job.yaml", "sheet.png"]


def test_the_sheet_shows_the_pixels_with_one_contrast(folder: Path) -> None:
    found = halotile.try_settings("job.yaml", {"denoiser.strength": [0.5, 1]}, "s.png", region="10:90,20:100")
    assert found.best.denoised.shape == (1, 80, 80)
    low, high = np.percentile(found.noisy, (0.5, 99.5))
    sheet = np.asarray(Image.open("s.png"))[..., 0]
    for image, (dark, bright) in ((found.noisy, (low, high)), (found.tried[1].denoised, (low, high)),
                                  (found.tried[0].residual, (-3, 3))):  # fmt: skip
        drawn = (np.clip((image[0] - dark) / (bright - dark), 0, 1) * 255).round().repeat(5, 0).repeat(5, 1)
        windows = np.argwhere((sheet[:-400, :-400] == drawn[0, 0]) & (sheet[399:-1, 399:-1] == drawn[-1, -1]))
        assert any(np.array_equal(sheet[y : y + 400, x : x + 400], drawn) for y, x in windows)


def test_no_setting_is_suggested_where_none_beats_the_noisy_crop(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB.replace("tv, strength: 1.0, sigma: auto", "gaussian, sigma: 1.0"))
    lists = ("--set", "denoiser.sigma=8,12")
    result = ask("try", "job.yaml", "sheet.png", *lists)
    assert "no setting is better than the image as it is" in " ".join(result.stdout.split())
    assert "--set" not in result.stdout
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert min(entry["error"] for entry in found["settings"]) >= 1
    assert found["suggested"] is None


def test_correlated_noise_has_no_error_and_the_reason_is_given(folder: Path) -> None:
    noise = 15 * np.random.default_rng(0).standard_normal((256, 256))
    np.save("a.npy", (camera()[:256, :256] + noise + np.roll(noise, 1, 1)).astype("f4"))
    lists = ("--set", "denoiser.strength=0.5,1")
    result = " ".join(printed("try", "job.yaml", "sheet.png", *lists).split())
    assert "error none can be estimated: the noise is correlated, by " in result
    assert "The likely cause is a readout or scan along x: train a network with structure: x" in result
    assert "suggested none: settings cannot be compared by their errors" in result
    assert "SURE" not in result
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert [entry["error"] for entry in found["settings"]] == [None, None]
    assert found["suggested"] is None
    assert found["noise_correlation"]["x"][0] == pytest.approx(0.5, abs=0.08)


def test_figures_for_programs(folder: Path) -> None:
    result = ask("try", "job.yaml", "--json", "--set", "denoiser.strength=1,-1", "--region", "0:64,0:64")
    found = json.loads(result.stdout)
    assert found["place"] == {"y": [0, 64], "x": [0, 64]}
    (entry,) = found["settings"]
    assert entry["correlation"] == max(entry["correlations"].values())
    assert found["noise_correlation"] is None
    assert [entry["set"] for entry in found["settings"]] == [["denoiser.strength=1"]] == [found["suggested"]]
    assert [entry["set"] for entry in found["failed"]] == [["denoiser.strength=-1"]]
    assert result.stderr.startswith("not shown: strength=-1: ")


MISTAKES = [
    ("job.yaml --set denoiser.name=tw,tx", "no denoiser is called"),
    ("job.yaml --set denoiser.strength=-1,-2", "none of 2 settings can be used"),
    ("job.yaml --set denoiser.name=median --set denoiser.size=3,5", "the name is median"),
    ("job.yaml --set denoiser.strength", "not a key and a value"),
    (f"job.yaml --set denoiser.strength={','.join(map(str, range(1, 60)))}", "make 59 settings"),
    ("job.yaml --region 5:9", "not rows and columns"),
    ("job.yaml --region 0:1,0:100", "1 × 100 pixels, too few"),
    ("job.yaml --region 0:9,0:9", "Take at least 16 × 16"),
    ("job.yaml --plane t=3", "the image's axes are yx"),
    ("job.yaml sheet.jpg", "a name that ends in .png"),
    ("job.yaml a.npy.png --set input.path=nothing.npy", "nothing.npy"),
    ("job.yaml nowhere/sheet.png", "no folder nowhere"),
    ("reconstruct.yaml", "only the settings of job: denoise"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_named(folder: Path, reconstruction: Path, words: str, message: str) -> None:
    result = ask("try", *words.split())
    assert result.exit_code in (2, 4)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sheet_replaces_nothing_unasked_and_the_image_never(folder: Path) -> None:
    noisy = np.random.default_rng(0).integers(0, 255, (64, 64), "u1")
    Image.fromarray(noisy).save("scan.png")
    Path("sheet.png").write_text("mine")
    assert ask("try", "job.yaml", "sheet.png").exit_code == 2
    assert Path("sheet.png").read_text() == "mine"
    assert ask("try", "job.yaml", "sheet.png", "--overwrite").exit_code == 0
    before = Path("scan.png").read_bytes()
    assert "it is the image" in refused("try", "job.yaml", "scan.png", "--overwrite", "--set", "input.path=scan.png")
    assert Path("scan.png").read_bytes() == before


def test_a_script_lists_values_of_any_kind_for_many_images_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [{"name": "gaussian", "sigma": 1.0}, {"name": "median", "size": 3}]
    found = halotile.try_settings("job.yaml", {"denoiser": kinds})
    assert [tried.setting[0] for tried in found.tried] == [f"denoiser={json.dumps(kind)}" for kind in kinds]
    settings: dict[str, Any] = {"denoiser.name": "tv", "denoiser.iterations": np.int64(9)}
    settings["denoiser.strength"] = np.array([0.5, 1], "f4")
    assert len(halotile.try_settings("job.yaml", settings).tried) == 2
    Path("mine.png").touch()
    with pytest.raises(OutputRefused, match="overwrite=True"):
        halotile.try_settings("job.yaml", {}, "mine.png")
    for region, words in (("5:9", r"^region 5:9"), ((slice(0, 9),), r"region is \(slice.*0:512,1000:1512")):
        with pytest.raises(ConfigError, match=words):
            halotile.try_settings("job.yaml", {}, region=region)  # type: ignore[arg-type]
    np.save(folder / "b.npy", np.load(folder / "a.npy"))
    job = JOB.replace("a.npy", '"*.npy"').replace("o.zarr", '"{stem}.zarr"')
    (folder / "many.yaml").write_text(job)
    many, one = (printed("try", name, "--set", "denoiser.strength=1,2", "--json") for name in ("many.yaml", "job.yaml"))
    assert json.loads(many) == json.loads(one)
    monkeypatch.setitem(sys.modules, "PIL.ImageFont", None)
    assert 'pip install "halotile[images]"' in refused("try", "job.yaml", "sheet.png")
    assert ask("try", "job.yaml").exit_code == 0


def test_each_channel_is_tried_and_the_lines_to_paste_make_a_job(folder: Path) -> None:
    rng, image = np.random.default_rng(0), camera()[60:188, 150:278].astype("f4")
    stack = np.stack([image + 2 * rng.standard_normal(image.shape), image + 60 * rng.standard_normal(image.shape)])
    names = {"Name": ["DAPI", "Alexa 488"]}
    tifffile.imwrite("a.tif", stack.astype("f4"), ome=True, metadata={"axes": "CYX", "Channel": names})
    job = JOB.replace("a.npy", "a.tif")
    Path("job.yaml").write_text(job)
    result = printed("try", "job.yaml", "sheet.png", "--set", "denoiser.strength=0.2,1.5")
    line = 'denoiser: {name: tv, strength: {DAPI: 0.2, "Alexa 488": 1.5}, sigma: auto}'
    assert result.rstrip().endswith(f"to paste      {line}")
    Path("pasted.yaml").write_text(job.replace(JOB.splitlines()[-1], line))
    assert "Alexa 488: {name: tv, strength: 1.5, sigma: auto}" in printed("plan", "pasted.yaml")
    again = printed("try", "pasted.yaml", "--plane", "c=Alexa 488")
    assert "error" in again
    assert "c=1" in again
    found = halotile.try_settings(
        "job.yaml", {"denoiser": ["{name: tv, strength: 0.2, sigma: auto}", "{name: gaussian, sigma: 2}"]}
    )
    assert [one.place["y"] for one in found.channels.values()] == [(0, 128)] * 2
    assert found.written["denoiser"] == {"name": "tv", "strength": 0.2, "sigma": "auto"}
    assert found.written["channels"] == {"Alexa 488": {"name": "gaussian", "sigma": 2}}


def test_a_channel_that_cannot_be_compared_is_named_and_the_others_are_drawn(folder: Path) -> None:
    rng, image = np.random.default_rng(0), camera()[60:188, 150:278].astype("f4")
    stack = np.stack([np.ones_like(image), *(image + sigma * rng.standard_normal(image.shape) for sigma in (10, 20))])
    tifffile.imwrite("a.tif", stack.astype("f4"), ome=True, metadata={"axes": "CYX", "Channel": {"Name": [*"ABC"]}})
    Path("job.yaml").write_text(JOB.replace("a.npy", "a.tif"))
    lists = ("--set", "denoiser.strength=0.5,1", "--set", "denoiser.iterations=20")
    result = ask("try", "job.yaml", "sheet.png", *lists)
    assert result.exit_code == 0
    assert "not shown: channel A: " in result.stderr
    with Image.open("sheet.png") as sheet:
        assert sheet.size[0] > 3 * 128
    found = json.loads(ask("try", "job.yaml", *lists, "--json").stdout)
    assert [*found["channels"]] == ["B", "C"]
    assert "no noise can be estimated" in found["missing"]["A"]
