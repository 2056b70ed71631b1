"""Plans: sizes and needs are found out, what cannot be is refused in words with the numbers, and values that spoil a result are noted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from skimage.data import binary_blobs, retina

from halotile.cli.info import describe
from halotile.errors import ConfigError, DiskRefused, HalotileError, InputError, MemoryRefused, UnknownName
from halotile.graphs.jobs.denoise import plan as denoise_plan
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, parse_bytes
from halotile.graphs.plans import plan
from halotile.graphs.plans.needs import DECODED, READ, TILES
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import claim
from halotile.storage.arrays import open_source
from halotile.storage.stored_array import StoredArray
from tests import support
from tests.cases import in_folders
from tests.graphs.holed import FILTERS, NODATA, scene

MonkeyPatch = pytest.MonkeyPatch


def network(name: str, **more: Any) -> dict[str, Any]:
    return {"import": f"tests.networks:{name}", **more}


CONVOLUTIONS: dict[str, Any] = {"name": "torch", "options": network("convolutions")}
REFUSALS: dict[str, tuple[dict[str, Any], type[HalotileError], str]] = {
    "shallow depth": ({"tile": {"depth": 2}}, ConfigError, "receptive field is 20: seams would show. Write depth: 20"),
    "negative depth": ({"tile": {"depth": -1}}, ConfigError, "tile.depth: -1 is too small"),
    "three depths": ({"tile": {"depth": (30, 30, 30)}}, ConfigError, "one for each of the 2 tiled axes"),
    "part of a shard": ({"tile": {"block": 100}}, ConfigError, "Write a multiple of 128"),
    "shard of half chunks": ({"shard": 100, "chunk": 64}, ConfigError, "a shard holds whole chunks"),
    "no tile": ({"tile": {"size": 0}}, ConfigError, "tile.size: 0 is too small"),
    "no batch": ({"tile": {"batch": 0}}, ConfigError, "tile.batch: 0 is too small"),
    "unknown axis": ({"tile": {"axes": "zq"}}, ConfigError, "image's axes are 'yx'"),
    "axis twice": ({"tile": {"axes": "yy"}}, ConfigError, "one different letter for each"),
    "one axis": ({"tile": {"axes": "y"}}, ConfigError, "works on 3 or 2 axes"),
    "reversed range": ({"input": {"range": (1.0, 0.0)}}, ConfigError, "runs backwards"),
    "unknown side": ({"input": {"sides": {"sgima": "x"}}}, ConfigError, "Write one of mask, sigma"),
    "missing side": ({"input": {"sides": {"sigma": "nowhere.zarr"}}}, InputError, "nowhere.zarr"),
    "missing input": ({"source": "nowhere.zarr"}, InputError, "nowhere.zarr"),
    "unknown denoiser": ({"name": "gausian"}, UnknownName, "gaussian"),
    "unknown option": ({"options": {"sigma": "auto", "sterngth": 1}}, ConfigError, "no option 'sterngth'"),
    "missing option": ({"options": {}}, ConfigError, "strength"),
    "no import": ({**CONVOLUTIONS, "allow_import": False}, ConfigError, "--allow-import"),
    "whole image": ({"name": "torch", "options": network("whole_norm")}, ConfigError, "whole image"),
    "bad memory": ({"run": {"memory_per_worker": "lots"}}, ValueError, "is not a size"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_and_nothing_touched(case: str, tmp_path: Path) -> None:
    changes, error, said = REFUSALS[case]
    source = support.write_zarr(tmp_path / "in.zarr", support.noisy_image((300, 260)))
    values: dict[str, Any] = {"source": source, "name": "tv", "options": {"strength": 0.1}} | changes
    may_import = values.pop("allow_import", True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said):
        make_plan(replace(support.job_of(output=tmp_path / "o.zarr", **values), allow_import=may_import))
    assert sorted(tmp_path.rglob("*")) == before


def test_seams_may_be_allowed_and_are_noted(tmp_path: Path) -> None:
    plan = planned(tmp_path, SMALL, "tv", tile={"depth": 2, "seams": "allow"})
    assert support.work_of(plan).task.tiling.depth == ((2, 2), (2, 2))
    assert "seams will show" in plan.notes[0]


def test_a_strided_network_that_loses_the_ragged_edge_is_refused(tmp_path: Path) -> None:
    ragged = support.write_zarr(tmp_path / "ragged.zarr", support.noisy_image((302, 260)))
    with pytest.raises(ConfigError, match=r"total stride of 4, and the image's sides \[302, 260\]"):
        make_plan(support.job_of(ragged, tmp_path / "o.zarr", "torch", network("cropping")))
    pixels = support.noisy_image((300, 260))
    even = support.write_zarr(tmp_path / "even.zarr", pixels)
    job = support.job_of(even, tmp_path / "o.zarr", "torch", network("cropping"))
    assert np.array_equal(support.run_inline(job), support.whole_picture(job, pixels, 0))


def test_channels_that_do_not_match_are_refused(tmp_path: Path) -> None:
    weights = str(support.dncnn_weights(tmp_path / "w.safetensors", channels=(3, 3)))
    options = {"weights": weights, "depth": 5, "width": 8, "channels": (3, 3)}

    def job(axes: str, *shape: int) -> Denoising:
        source = support.write_zarr(tmp_path / f"{len(shape)}{axes}.zarr", support.noisy_image(shape), axes=axes)
        return support.job_of(source, tmp_path / "o.zarr", "dncnn", options)

    with pytest.raises(InputError, match="takes 3 channels, the image has axes 'yx'"):
        make_plan(job("yx", 200, 190))
    with pytest.raises(InputError, match="takes 3 channels, the image has 4"):
        make_plan(job("cyx", 4, 200, 190))
    assert support.run_inline(job("yxc", 200, 190, 3)).shape == (3, 200, 190), "in the order of OME-Zarr"


def test_a_plan_has_the_side_input_that_it_checked(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    mask = tmp_path / "mask.npy"
    np.save(mask, np.ones((300, 260), "uint8"))
    checked = open_source(mask).fingerprint()

    def replaced_meanwhile(*_: object) -> None:
        np.save(mask, np.ones((2, 2), "float32"))

    monkeypatch.setattr(denoise_plan, "check_units", replaced_meanwhile)
    assert planned(tmp_path, SMALL, input={"sides": {"mask": str(mask)}}).identity["sides"] == {"mask": checked}


def test_an_output_that_cannot_hold_the_image_is_noted(tmp_path: Path) -> None:
    rows: list[tuple[str, str, str | None]] = [
        ("uint16", "uint8", "whole numbers from 0 to 255, and the input's uint16 goes from 0 to 65535"),
        ("float32", "uint16", "only 0 and 1 are left"),
        ("uint8", "uint16", None),
        ("uint16", "float32", None),
    ]
    for given, made, words in rows:
        job = planned(tmp_path, ((64, 64), given, 64), "none").job
        plan = make_plan(replace(job, output=replace(job.output, dtype=made)))
        found = [note for note in plan.notes if note.startswith("output.dtype")]
        assert [words in note for note in found if words] == [True] * len(found) == [True] * (words is not None)


def test_a_noise_level_or_strength_in_counts_is_refused_for_a_picture_that_is_mapped(tmp_path: Path) -> None:
    source = support.write_zarr(tmp_path / "in.zarr", np.zeros((64, 64), "uint16"))
    floats = support.write_zarr(tmp_path / "floats.zarr", np.zeros((64, 64), "float32"))
    job = support.job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": 150.0})
    with pytest.raises(ConfigError, match=r"sigma is 150. The image's 0 to 65535 .* as 0 to 1.*Write sigma: 0.00229"):
        make_plan(job)
    levels = support.write_zarr(tmp_path / "sigma.zarr", np.full((64, 64), 0.01, "float32"))
    words = r"strength is 2000. The image's 0 to 65535 .*strength is in units of that range.*Write strength: 0.0305, or sigma: auto"
    for name in ("tv", "nlm"):
        job = support.job_of(source, tmp_path / "o.zarr", name, {"strength": 2000.0})
        with pytest.raises(ConfigError, match=words):
            make_plan(job)
        make_plan(support.job_of(floats, tmp_path / "o.zarr", name, {"strength": 2000.0}))
        make_plan(replace(job, input=replace(job.input, sides={"sigma": str(levels)})))
        make_plan(support.job_of(source, tmp_path / "o.zarr", name, {"strength": 1.5, "sigma": 0.01}))


def planned(folder: Path, source: Any, name: str = "gaussian", options: Any = None, **parts: Any) -> Plan:
    """The plan of a job on an image that is there, or on one of zeros of this shape and type in chunks of this size."""
    if isinstance(source, tuple):
        shape, dtype, chunk = source
        path = folder / f"{len(list(folder.glob('*.zarr')))}.zarr"
        source = support.write_zarr(path, np.zeros(shape, dtype), chunk=chunk)
    options = {"gaussian": {"sigma": 1}, "none": {}}.get(name, {"strength": 0.1}) if options is None else options
    return make_plan(support.job_of(source, folder / "o.zarr", name, options, **parts))


SMALL = ((300, 260), "float32", 64)
LARGE = ((6000, 6000), "uint8", 250)


def test_sizes_left_to_the_planner_fit_together(tmp_path: Path) -> None:
    plan = planned(tmp_path, ((5000, 4000), "uint8", 2500), options={"sigma": 2}, shard="auto", chunk="auto")
    tiling = support.work_of(plan).task.tiling
    assert (plan.layout.chunk, plan.layout.shard, plan.grid.block) == ((256, 256), (1024, 1024), (1024, 1024))
    assert (tiling.tile, tiling.depth, len(plan.grid)) == ((512, 512), ((8, 8), (8, 8)), 20)
    layout = planned(tmp_path, SMALL, shard=128, chunk="auto").layout
    assert (layout.shard, layout.chunk) == ((128, 128), (128, 128))
    for workers, edge in ((1, 1152), (8, 384)):  # until workers would idle
        plan = planned(tmp_path, ((3200, 3200), "uint8", 3200), run={"workers": workers})
        assert plan.grid.block == (edge, edge)
    for size in ("auto", 4096, 10**8, 64):  # no more tiles at once than a block has
        plan = planned(tmp_path, SMALL, options={"sigma": 2}, tile={"size": size})
        assert support.work_of(plan).task.tiling.batch == 1
        assert plan.memory_bytes < 2**30


def test_the_resolved_configuration_makes_the_same_output(tmp_path: Path) -> None:
    source = support.write_zarr(tmp_path / "in.zarr", support.noisy_image((2, 300, 260), "uint16"), axes="zyx")
    denoisers: dict[str, dict[str, Any]] = {
        "gaussian": {"sigma": 1.5},
        "dncnn": {"weights": str(support.dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8},
        "tv": {"strength": 1.0, "sigma": "auto", "iterations": 7},
    }
    for number, (name, options) in enumerate(denoisers.items()):
        job = support.job_of(source, tmp_path / f"{number}.zarr", name, options, tile={"axes": "yx"})
        plan = make_plan(job)
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps(plan.documents.resolved))
        again = make_plan(support.load_denoising(file))
        decided = {name: value for name, value in vars(again.job.tile).items() if name != "channels_last"}  # of GPUs
        assert "auto" not in decided.values()
        ours, theirs = plan.identity, again.identity
        assert {key for key in ours if ours[key] != theirs[key]} <= {"denoiser", "noise_level"}  # estimated, a number
        assert support.work_of(again).task.denoiser == support.work_of(plan).task.denoiser


def test_less_memory_means_smaller_sizes_then_a_refusal(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source = support.write_zarr(tmp_path / "in.zarr", np.zeros((6000, 6000), "uint8"), chunk=250)

    def sizes(memory: str) -> tuple[int, int]:
        plan = planned(tmp_path, source, "tv", shard=256, run={"memory_per_worker": memory})
        assert plan.memory_bytes <= parse_bytes(memory)
        return plan.grid.block[0], support.work_of(plan).task.tiling.tile[0]

    large, medium, small = sizes("4GiB"), sizes("724MiB"), sizes("706MiB")
    assert large > medium > small
    with pytest.raises(MemoryRefused, match=r"run\.memory_per_worker is 700MiB; one block .* needs 70\d MiB"):
        sizes("700MiB")
    roomy = planned(tmp_path, source, "tv", shard=256, run={"workers": 4})
    monkeypatch.setattr(plan, "machine_bytes", lambda: 240 * 2**20 + 4 * 476 * 2**20)
    tight = planned(tmp_path, source, "tv", shard=256, run={"workers": 4})
    assert tight.memory_bytes <= 716 * 2**20 < roomy.memory_bytes


BIG, MORE = ((9000, 9000), "uint16", 300), r"\. Write run.memory_per_worker: \d+MiB"
HELPS: list[Any] = [
    (BIG, "gaussian", {"sigma": 1e9}, "1GiB", r"\. Choose a denoiser with a smaller receptive field.$"),
    (BIG, "gaussian", {"sigma": 900}, "800MiB", f"{MORE}, or choose a denoiser with a smaller receptive field.$"),
    (((9000, 9000), "uint16", 9000), "gaussian", None, "800MiB", f"{MORE}, or store the input in smaller chunks.$"),
    (BIG, "gaussian", None, "100MiB", f"{MORE}.$"),
    (SMALL, "gaussian", None, "65MiB", r"Write run.memory_per_worker: 70\dMiB\.$"),
    (LARGE, "tv", {"strength": 0.1, "iterations": 1000}, "750MiB", r"With depth 1\d\d\d, a tile of 128 × 128 pixels computes \d+ ×"),
]  # fmt: skip


@pytest.mark.parametrize(("image", "name", "options", "memory", "said"), HELPS)
def test_a_refusal_names_remedies(tmp_path: Path, image: Any, name: str, options: Any, memory: str, said: str) -> None:
    with pytest.raises(MemoryRefused, match=rf"needs .*{said}"):
        planned(tmp_path, image, name, options, run={"memory_per_worker": memory})


def test_workers_without_memory_are_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "machine_bytes", lambda: 3 * 2**30)
    planned(tmp_path, SMALL, "tv", run={"workers": 5, "memory_per_worker": "64GiB"})
    with pytest.raises(MemoryRefused, match=r"run\.workers is 9; each needs 7\d\d MiB.*has 3 GiB.*workers: [56],"):
        planned(tmp_path, SMALL, "tv", run={"workers": 9, "memory_per_worker": "64GiB"})
    monkeypatch.setattr(plan, "check_job", lambda _: None)
    elsewhere = planned(tmp_path, SMALL, run={"workers": 3}).job
    make_plan(replace(elsewhere, run=replace(elsewhere.run, workers=500), cluster=Cluster(kind="elsewhere")))


def test_a_filter_of_planes_has_room_for_the_tiles_of_holes(tmp_path: Path) -> None:
    tile = {"size": 512, "batch": 4}
    plan = planned(
        tmp_path, ((700, 900), "float32", 250), "gaussian", {"sigma": 1.0}, shard="auto", chunk="auto", tile=tile
    )
    pixels, denoiser = 4 * 512**2, support.work_of(plan).task.denoiser
    assert denoiser.plane_filter() is not None
    assert support.footprint_of(plan)[TILES] >= pixels * denoiser.bytes_per_pixel()


def test_a_window_that_is_cut_at_the_picture_needs_no_more_than_the_picture(tmp_path: Path) -> None:
    options = {"strength": 0.1, "iterations": 5000}
    plan = planned(tmp_path, ((700, 900), "float32", 250), "tv", options, shard="auto", chunk="auto")
    assert support.work_of(plan).task.tiling.depth[0] >= (5000, 5000)
    assert support.footprint_of(plan)[READ] == 700 * 900 * 4 * (1 + support.work_of(plan).task.overlap)
    assert plan.summary()["compute_redundancy"] == round(700 * 900 / (512 * 512), 4)


def test_an_input_of_one_compressed_piece_is_counted_and_noted(tmp_path: Path) -> None:
    pixels = np.zeros((2048, 2048), "uint16")
    (tmp_path / "whole.png").write_bytes(imagecodecs.png_encode(pixels))
    (tmp_path / "mask.png").write_bytes(imagecodecs.png_encode(np.ones((2048, 2048), "uint8")))
    for rows in (2048, 64):
        tifffile.imwrite(tmp_path / f"{rows}.tif", pixels, compression="zlib", rowsperstrip=rows)
    pieces, kept = "chunks of 2048 × 2048 pixels", "keeps the last one (8 MiB)"
    for name, rows, words in (("2048.tif", 2048, pieces), ("64.tif", 64, pieces), ("whole.png", 2048, kept)):
        plan = planned(tmp_path, tmp_path / name, shard=256)
        assert any(words in note for note in plan.notes) == (rows == 2048)
        assert support.footprint_of(plan)[DECODED] == 2 * 2 * 2048 * rows
    masked = {"sides": {"mask": str(tmp_path / "mask.png")}}
    plan = planned(tmp_path, tmp_path / "whole.png", shard=256, input=masked)
    assert support.footprint_of(plan)[DECODED] == (2 * 2 + 1) * 2048**2


def test_an_input_too_large_to_decode_is_refused_before_it_is(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    pixels = np.zeros((8192, 4096), "uint16")
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(pixels))
    tifffile.imwrite(tmp_path / "a.tif", pixels, compression="zlib", rowsperstrip=8192)
    monkeypatch.setattr(StoredArray, "read", lambda *_: pytest.fail("it was read"))
    for name in ("a.png", "a.tif"):
        with pytest.raises(MemoryRefused, match=r"8192 × 4096 pixels, 64 MiB each.*takes 128 MiB.*in small chunks"):
            planned(tmp_path, tmp_path / name, "tv", run={"memory_per_worker": "100MiB"})


def test_an_output_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DiskRefused, match=r"output takes up to 576 KiB, and .* has 1,000 B free"):
        planned(tmp_path, SMALL, "tv")


VOLUME: dict[str, Any] = {"shard": "auto", "chunk": "auto", "input": {"axes": "zyx"}, "tile": {"axes": "zyx"}}


@pytest.mark.parametrize(("name", "most"), [("nlm", 1.3), ("gaussian", 1.3), ("tv", 1.6)])
def test_the_halo_of_a_volume_costs_little(tmp_path: Path, name: str, most: float) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (512, 512, 512))
    run, options = {"memory_per_worker": "4GiB", "workers": 2}, {"sigma": 2.0} if name == "gaussian" else None
    plan = planned(tmp_path, tmp_path / "a.npy", name, options, run=run, **VOLUME)
    assert plan.summary()["compute_redundancy"] <= most
    plan.check_fits()


def test_a_deep_halo_gets_larger_blocks_where_memory_allows_it(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (1024, 1024, 1024))

    def plan_with(memory: str) -> Plan:
        return planned(tmp_path, tmp_path / "a.npy", "tv", run={"memory_per_worker": memory, "workers": 2}, **VOLUME)

    redundant = {memory: plan_with(memory).summary()["compute_redundancy"] for memory in ("4GiB", "8GiB")}
    assert redundant["8GiB"] <= 1.3 < redundant["4GiB"] < 1.5
    with claim(plan_with("8GiB")):
        pass
    for memory in ("8GiB", "9GiB"):
        assert plan_with(memory).earlier.resumes


Image = NDArray[Any]
FAR, CUT_OFF = "far from all others", "cut off"


def notes_on(folder: Path, words: str, pixels: Image, name: str = "tv", sigma: Any = "auto", **parts: Any) -> list[str]:
    """The notes of a plan with these words."""
    source = support.write_zarr(folder / "in.zarr", pixels) if not (folder / "in.zarr").exists() else folder / "in.zarr"
    options = {"strength": 1.0, "sigma": sigma} if name == "tv" else FILTERS[name]
    plan = make_plan(support.job_of(source, folder / "out.zarr", name, options, **parts))
    return [note for note in plan.notes if words in note]


def noise(*shape: int) -> Image:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("name", ["tv", "gaussian"])
def test_a_value_far_from_all_others_is_noted(tmp_path: Path, name: str) -> None:
    pixels, holes = scene(NODATA)
    low, high = pixels[~holes].min(), pixels[~holes].max()
    (note,) = notes_on(tmp_path, FAR, pixels, name)
    assert note == (
        f"{holes.sum():,} pixels are -9999, far from all others ({low:,.5g} to {high:,.5g}): if they are no measurements, "
        "write input.nodata: -9999, or they may spoil the pixels around them"
    )
    for nodata in (NODATA, "none"):
        assert notes_on(tmp_path, FAR, pixels, name, input={"nodata": nodata}) == []


@pytest.mark.parametrize("alone", [True, False])
def test_areas_of_a_far_integer_are_noted_and_hot_pixels_are_defects(tmp_path: Path, alone: bool) -> None:
    pixels = np.random.default_rng(0).normal(200, 30, (600, 600)).clip(0, 399).astype(np.uint16)
    pixels.flat[::1000] = 65535
    if not alone:
        pixels[300:310, 300:310] = 65535
    notes = notes_on(tmp_path, FAR, pixels)
    assert len(notes) == (not alone)
    words = ("% of the pixels, by samples, are 65535, far from all others", "write input.nodata: 65535, or")
    assert all(each in note for note in notes for each in words)


def test_noise_of_which_little_is_left_is_noted_where_sigma_is_estimated(tmp_path: Path) -> None:
    pixels = (noise(256, 256) - 0.85).clip(0, 9)
    assert notes_on(tmp_path, CUT_OFF, pixels) == [
        "about 80% of the pixels are 0, at the end of the range of values, where noise was cut off: the estimated noise level may be too "
        "low. Write the level in the units of the file: noise: {model: gaussian, read_sigma: ...}"
    ]
    assert notes_on(tmp_path, CUT_OFF, pixels, sigma=1.0) == []


def test_the_plane_and_both_ends_are_named(tmp_path: Path) -> None:
    pixels = np.stack([noise(256, 256), noise(256, 256).clip(-0.25, 0.25), noise(256, 256)])
    (note,) = notes_on(tmp_path, CUT_OFF, pixels)
    assert note.startswith("about 80% of the pixels in q=1 are -0.25 or 0.25, at the end of the range")


DARK: Image = np.rint((retina()[:600, :600, 1] - 100.0) * 3).clip(0, 255)
PHOTO = (DARK + np.random.default_rng(0).integers(0, 9, DARK.shape)).clip(0, 255)
RANDOM, GREEN = np.random.default_rng(0), retina()[200:712, 100:612, 1] / 255
TISSUE = binary_blobs(512, 0.1, volume_fraction=0.1, rng=RANDOM)
USUAL: dict[str, tuple[str, Image]] = {
    "photo": (FAR, PHOTO.astype(np.uint8)),
    "float photo": (FAR, PHOTO.astype(np.float32)),
    "mask": (FAR, np.where(np.random.default_rng(0).random((600, 600)) < 0.5, 0, 255).astype(np.uint8)),
    "few": (FAR, np.where(np.arange(360_000).reshape(600, 600) < 5, 1e6, PHOTO).astype(np.float32)),
    "half": (CUT_OFF, noise(256, 256).clip(0, 9)),
    "photograph": (CUT_OFF, (GREEN + 0.2 * noise(512, 512)).clip(0, 1)),
    "slide": (CUT_OFF, np.where(TISSUE, 180 + 9 * noise(512, 512), 255).clip(0, 255).astype(np.uint8)),
    "mosaic": (CUT_OFF, np.where(TISSUE, 1 + GREEN + 0.1 * noise(512, 512), 0.0)),
    "dead pixels": (CUT_OFF, np.where(RANDOM.random((512, 512)) < 0.3, 0, 5 + noise(512, 512))),
    "few measured": (CUT_OFF, np.where(RANDOM.random((512, 512)) < 0.75, 0, 5 + noise(512, 512))),
    "two values": (CUT_OFF, (RANDOM.random((256, 256)) < 0.3).astype(np.uint8)),
    "counts": (CUT_OFF, RANDOM.poisson(0.3, (256, 256)).astype(np.uint16)),
}


def test_genuine_black_and_white_and_noise_whose_level_is_known_have_no_note(tmp_path: Path) -> None:
    for folder, (words, pixels) in in_folders(tmp_path, USUAL.values()):
        assert notes_on(folder, words, pixels) == []


KEPT = np.ones((100, 120), bool)
KEPT[30:60, 40:80] = False
MASK = 4
"""NewSubfileType of a mask."""


def masked_map(path: Path, mask: Any = KEPT, bands: int = 2, **options: Any) -> Path:
    """A map as GDAL writes it, whose pixels under the mask are far from the others."""
    pixels = support.noisy_image((*KEPT.shape, bands), "uint16")
    pixels[~KEPT] = 60_000
    options |= {"photometric": "minisblack", "planarconfig": "contig", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2) if options.get("tile") else (1,):
            file.write(pixels[::step, ::step], subfiletype=step - 1, **options)
            file.write(mask[::step, ::step], subfiletype=step - 1, **options)
    # tifffile does not write masks of several bands.
    with tifffile.TiffFile(path, mode="r+b") as file:
        for number, page in enumerate(file.pages[1::2]):
            page.tags["NewSubfileType"].overwrite(MASK | number)
    return path


def masked_job(source: Path, **section: Any) -> Denoising:
    return support.job_of(source, source.with_suffix(".zarr"), "gaussian", {"sigma": 3.0}, input=section)


@pytest.mark.parametrize("level", [0, 1])
def test_the_mask_of_a_file_or_of_each_band_keeps_its_pixels(tmp_path: Path, level: int) -> None:
    source = masked_map(tmp_path / "a.tif", tile=(16, 16))
    result, kept = support.run_inline(masked_job(source, level=level)), KEPT[:: 2**level, :: 2**level]
    assert (result[:, ~kept] == 60_000).all()
    assert result[:, kept].max() < 60_000 - 1000 == result[:, ~kept].min() - 1000
    assert np.array_equal(open_source(source, dataset="mask", level=level)[:], kept)
    bands = np.stack([KEPT, np.ones_like(KEPT)], -1).astype("uint8") * 255  # each may have its mask
    one, other = support.run_inline(masked_job(masked_map(tmp_path / "b.tif", bands)))
    assert (one[~KEPT] == 60_000).all()
    assert (other[~KEPT] != 60_000).any()


def test_another_mask_or_none_can_be_written_and_not_both(tmp_path: Path) -> None:
    source = masked_map(tmp_path / "a.tif")
    np.save(tmp_path / "all.npy", np.ones_like(KEPT))
    further = {"sides": {"mask": str(tmp_path / "all.npy")}}

    def sides_of(**given: Any) -> Any:
        return make_plan(masked_job(source, **given)).identity["sides"]

    assert sides_of()["mask"]["series"] == sides_of(nodata=7)["mask"]["series"] == "mask"
    assert (sides_of(nodata="none"), sides_of(nodata="none", **further)["mask"]["format"]) == ({}, "npy")
    with pytest.raises(ConfigError, match=r"a mask of its own\. Leave yours out; or write one"):
        sides_of(**further)


def test_a_mask_is_no_series_and_one_that_cannot_be_used_is_refused_with_what_does_without(tmp_path: Path) -> None:
    source = masked_map(tmp_path / "a.tif", bands=3)
    facts = describe(str(source))
    assert facts["series"] == [[100, 120, 3]]
    assert ["input.nodata: none" in remark for remark in facts["remarks"]] == [True]
    volume = {"input": {"axes": "yxz"}, "tile": {"axes": "zyx"}}
    with pytest.raises(InputError, match=r"own mask.*nodata: none"):
        make_plan(support.job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}, **volume))


def test_a_mask_beside_the_file_is_named(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", support.noisy_image(KEPT.shape, "uint16"))
    beside = tmp_path / "a.tif.msk"
    with tifffile.TiffWriter(beside) as file:
        file.write(KEPT, photometric="mask", subfiletype=MASK, metadata=None)
    (remark,) = describe(str(tmp_path / "a.tif"))["remarks"]
    assert f"input: {{sides: {{mask: {beside}}}}}" in remark
    assert np.array_equal(open_source(beside)[:], KEPT)
