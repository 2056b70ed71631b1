"""Scans in CXI files as Zarr groups: values, the order of patterns, parts of patterns, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from halotile.cli.exits import exit_code
from halotile.cli.main import app
from halotile.errors import ConfigError, DamagedData, InputError, OutputRefused
from halotile.storage.scans import convert
from halotile.storage.scans.convert import Framing, along_curve, convert_scan
from halotile.storage.scans.known import KnownValues
from halotile.storage.scans.scan import ARRAYS, open_scan, open_summary
from tests.cases import in_folders

COUNT, EDGE = 30, 12


DETECTOR = "entry_1/instrument_1/detector_1"


def write_cxi(path: Path, change: Callable[[Any], None] = lambda file: None) -> str:
    """Write a scan whose values can be told apart."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file[f"{DETECTOR}/data"] = np.arange(COUNT * EDGE**2, dtype=np.int32).reshape(COUNT, EDGE, EDGE)
        file[f"{DETECTOR}/distance"] = 2.0
        # Rows go down along -y, columns along -x.
        file[f"{DETECTOR}/basis_vectors"] = np.array([[0, -3e-5], [-5e-5, 0], [0, 0]])
        file[f"{DETECTOR}/mask"] = np.where(np.arange(EDGE**2).reshape(EDGE, EDGE) == 5, 4, 0x1000).astype("u4")
        file["entry_1/instrument_1/source_1/energy"] = 1.98644586e-15
        file["entry_1/data_1/translation"] = random.uniform(-1e-6, 1e-6, (COUNT, 3))
        change(file)
    return str(path)


def converted(folder: Path, change: Any = lambda file: None, *options: Any, **more: Any) -> tuple[Any, Any]:
    """Convert such a scan, and open what is written: the scan and its patterns."""
    convert_scan(write_cxi(folder / "scan.cxi", change), str(folder / "scan.zarr"), *options, **more)
    return open_scan(str(folder / "scan.zarr"))


def test_a_scan_has_the_values_of_its_file_in_the_order_of_neighbours(tmp_path: Path) -> None:
    probe, dark = "entry_1/instrument_1/source_1/illumination", np.full((3, EDGE, EDGE), 2.0)
    dark[:, 0, 5] = np.nan  # which the mask leaves out

    nowhere = h5py.SoftLink("/entry_1/nowhere")  # which is no value
    values = {probe: np.ones((EDGE, EDGE)), f"{DETECTOR}/data_dark": dark, f"{DETECTOR}/translation": nowhere}
    scan, patterns = converted(tmp_path, _put(values))
    assert (scan.wavelength, scan.distance) == (pytest.approx(1e-10, rel=1e-12), 2.0)
    assert scan.pixel == pytest.approx((5e-5, 3e-5))
    assert (np.argwhere(~scan.mask).tolist(), scan.background[0, 5]) == ([[0, 5]], 0)
    assert np.delete(scan.background.reshape(-1), 5).tolist() == [2.0] * (EDGE**2 - 1)
    with h5py.File(tmp_path / "scan.cxi") as file:
        assert np.array_equal(patterns[:], file[f"{DETECTOR}/data"][:][scan.numbers])
        moved = file["entry_1/data_1/translation"][:][scan.numbers]
    # The sample moves along x; the beam moves over it the other way, and columns go along -x.
    assert np.allclose(scan.positions, moved[:, [1, 0]], rtol=1e-12, atol=0)
    assert not list(tmp_path.glob(".*"))
    text = f"the file has a probe: --probe {probe} lets reconstructions begin with it"
    assert scan.probe is None
    assert ("note", text) in scan.remarks
    raster = np.stack(np.meshgrid(np.arange(16), np.arange(16)), -1).reshape(-1, 2).astype(float)
    assert set(np.abs(np.diff(raster[along_curve(raster)], axis=0)).sum(1)) == {1.0}
    for shape in ((), (1,), (1, 1), (COUNT,)):  # a number of any shape is one
        numbers = {"distance": 2.0, "x_pixel_size": 3e-5, "y_pixel_size": 5e-5}
        shaped = {f"{DETECTOR}/{name}": np.full(shape, value) for name, value in numbers.items()}
        scan, _ = converted(tmp_path, _put({f"{DETECTOR}/basis_vectors": None, **shaped}), overwrite=True)
        assert (scan.distance, *scan.pixel) == pytest.approx((2.0, 5e-5, 3e-5))


def test_patterns_are_cropped_around_the_beam_and_binned(tmp_path: Path) -> None:
    scan, patterns = converted(tmp_path, lambda file: None, Framing(crop=8, center=(4, 7), binning=2))
    with h5py.File(tmp_path / "scan.cxi") as file:
        kept = file[f"{DETECTOR}/data"][:][scan.numbers, 0:8, 3:11].astype(np.uint32)
    assert np.array_equal(patterns[:], kept.reshape(COUNT, 4, 2, 4, 2).sum((2, 4)))
    assert (scan.pixel, np.argwhere(~scan.mask).tolist()) == (pytest.approx((1e-4, 6e-5)), [[0, 1]])
    with pytest.raises(OutputRefused):  # nothing is replaced unasked
        converted(tmp_path)
    rows = [(Framing(crop=20), "leaves the pattern"), (Framing(center=(1, 1), crop=8), "leaves")]
    rows += [(Framing(binning=5), "--crop 10")]
    for framing, said in rows:
        with pytest.raises(ConfigError, match=said):
            converted(tmp_path, lambda file: None, framing, overwrite=True)
    assert open_scan(str(tmp_path / "scan.zarr"))[1].shape == (COUNT, 4, 4)
    assert Framing().windows(61, 65) == (slice(0, 61), slice(0, 65))
    assert Framing(center=(30, 20)).windows(61, 65) == (slice(0, 60), slice(0, 40))
    with pytest.raises(ConfigError, match="Write 1 or more"):
        Framing(binning=0).windows(8, 8)


def _put(values: dict[str, Any]) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        for name, value in values.items():
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value

    return change


ENERGY, MOVED = "entry_1/instrument_1/source_1/energy", "entry_1/data_1/translation"
WAVELENGTH = "entry_1/instrument_1/source_1/wavelength"
NO_SCAN: list[tuple[str, Any, str]] = [
    (f"{DETECTOR}/data", np.full((COUNT, EDGE, EDGE), -1), "negative pixels"),
    (f"{DETECTOR}/data", np.full((COUNT, EDGE, EDGE), np.nan), "NaN"),
    (f"{DETECTOR}/data", np.zeros((EDGE, EDGE)), r"\(positions, rows, columns\)"),
    (f"{DETECTOR}/data", None, "has no entry_1/data_1/data"), (f"{DETECTOR}/distance", None, "distance"),
    (f"{DETECTOR}/distance", 0.0, "distance is 0 m, which is no length. Give the right one: --distance"),
    (f"{DETECTOR}/distance", np.nan, "distance is nan m"),
    (f"{DETECTOR}/distance", np.array([2.0, 3.0]), "is from 2 to 3, .* one distance. Write .* as --distance"),
    (f"{DETECTOR}/distance", np.array([]), "is empty"),
    (f"{DETECTOR}/basis_vectors", np.array([[0, 0.0], [-5e-5, 0], [0, 0]]), "a basis vector of the detector has no length"),
    (f"{DETECTOR}/mask", np.full((EDGE, EDGE), 1), "no pixel that counts"),
    (f"{DETECTOR}/mask", np.zeros((2, 2)), "mask has shape"), (MOVED, None, "no translation"),
    (MOVED, h5py.SoftLink("/entry_1/nowhere"), "translation"), (MOVED, np.full((COUNT, 3), np.nan), "not finite"),
    (MOVED, np.zeros((COUNT - 1, 3)), "positions has shape"), (ENERGY, None, "source_1/energy"),
    (ENERGY, None, "Write it as --energy"), (ENERGY, 8800.0, "whose energy in joules"),
    (ENERGY, [1.9e-15, 2.1e-15], "all patterns of a scan have one wavelength"),
    (WAVELENGTH, 1.4089, "is 1.4089 m by .* whose wavelength is in metres"),
    (WAVELENGTH, 2e-10, "and by the energy it is 1e-10 m"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said"), NO_SCAN)
def test_what_no_scan_has_is_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        converted(tmp_path, _put({name: value}))
    assert not (tmp_path / "scan.zarr").exists()


@pytest.mark.parametrize(("flag", "kind"), [(-1, np.int32), (np.nan, np.float32)])
@pytest.mark.parametrize("binning", [1, 2])
def test_what_is_written_into_bad_pixels_does_not_count(tmp_path: Path, flag: float, kind: Any, binning: int) -> None:
    counts = np.arange(COUNT * EDGE**2).reshape(COUNT, EDGE, EDGE).astype(kind)
    flagged = counts.copy()
    flagged[:, 0, 5], counts[:, 0, 5] = flag, 0
    changes = (_put({f"{DETECTOR}/data": values}) for values in (flagged, counts))
    found = [converted(tmp_path, each, Framing(binning=binning), overwrite=True)[1][:] for each in changes]
    assert np.array_equal(*found)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int64, np.float32])
@pytest.mark.parametrize("binning", [1, 2])
def test_pixels_at_the_largest_number_of_their_type_are_left_out(tmp_path: Path, kind: Any, binning: int) -> None:
    full = (np.arange(COUNT * EDGE**2).reshape(COUNT, EDGE, EDGE) % 1000).astype(kind)
    # In one pattern; floats of 32 bits may have been integers.
    full[3, 7, 8] = min(np.iinfo(kind).max if kind is not np.float32 else 2**32 - 1, 2**33)
    full[:, 0, 5] = full[3, 7, 8]  # which the mask leaves out
    scan, patterns = converted(tmp_path, _put({f"{DETECTOR}/data": full}), Framing(binning=binning))
    assert np.argwhere(~scan.mask).tolist() == [[0, 5 // binning], [7 // binning, 8 // binning]]
    assert scan.full == 1
    assert patterns[:].max() < 1000 * binning**2
    done = CliRunner().invoke(app, ["info", str(tmp_path / "scan.zarr")])
    assert "1 since they reach the largest number of their type" in done.output
    if kind is np.float32 and binning == 1:  # floats of any size are kept
        many = (np.arange(COUNT * EDGE**2).reshape(COUNT, EDGE, EDGE) * 2.0**24).astype(kind)
        many[3, 7, 8] = np.inf
        scan, patterns = converted(tmp_path, _put({f"{DETECTOR}/data": many}), overwrite=True)
        # A multiple of 2^24 is 2^32 in one pixel, which float32 has of a detector without a count as well.
        assert scan.full == 2
        assert np.array_equal(patterns[:][:, scan.mask], many[scan.numbers][:, scan.mask].astype(np.float32))


@pytest.mark.parametrize("factor", [1, 1e-6])
def test_blank_patterns_are_left_out_and_named(tmp_path: Path, factor: float) -> None:
    counts = factor * np.random.default_rng(0).poisson(5, (COUNT, EDGE, EDGE))
    counts[[3, 17]] = 0
    counts[:, 0, 5] = 9  # which the mask leaves out
    source, path = write_cxi(tmp_path / "scan.cxi", _put({f"{DETECTOR}/data": counts})), tmp_path / "s.zarr"
    for said in (CliRunner().invoke(app, ["convert", source, str(path)]), CliRunner().invoke(app, ["info", str(path)])):
        words = "2 blank patterns, in which next to nothing was counted: numbers 3, 17 of the file"
        assert words in " ".join(said.output.split())
    scan, patterns = open_scan(str(path))
    assert sorted(scan.numbers) == sorted(set(range(COUNT)) - {3, 17})
    assert np.array_equal(patterns[:], counts[scan.numbers].astype(np.float32))
    assert np.allclose(open_summary(str(path))[0], counts[scan.numbers].mean(0))


def test_a_detector_of_one_module_may_have_an_axis_for_it(tmp_path: Path) -> None:
    with_dark = _put({f"{DETECTOR}/data_dark": np.full((3, EDGE, EDGE), 2.0)})

    def with_axis(file: Any) -> None:
        with_dark(file)
        for name in (f"{DETECTOR}/{each}" for each in ("data", "mask", "data_dark")):
            _put({name: file[name][()][..., None, :, :]})(file)

    rows = in_folders(tmp_path, (with_dark, with_axis))
    (scan, patterns), (same_scan, same) = (converted(folder, change) for folder, change in rows)
    assert np.array_equal(patterns[:], same[:])
    assert scan.mask is not None
    assert scan.digest() == same_scan.digest()


def test_info_tells_a_scan_from_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.open_group(tmp_path / "all.zarr")
    source, path, run = write_cxi(tmp_path / "scan.cxi"), str(tmp_path / "all.zarr/scan.zarr"), CliRunner().invoke
    said = run(app, ["info", source])
    assert said.exit_code == 0
    assert f"{COUNT} of {EDGE} × {EDGE}, int32" in said.output
    assert f"recon-cli convert {source} {tmp_path}/scan.zarr" in said.output
    assert run(app, ["convert", source, path, "--crop", "8", "--center", "4,7", "--bin", "2"]).exit_code == 0
    said = run(app, ["info", path])
    assert "job: ptychography" in said.output
    assert "1 pixel of the detector left out" in said.output
    facts = json.loads(run(app, ["info", path, "--json"]).output)
    assert (facts["patterns"], facts["pattern"], facts["left_out"]) == (COUNT, [4, 4], 1)
    wrong = run(app, ["convert", source, path, "--center", "4"])
    assert (wrong.exit_code, "such as 128,131" in wrong.output) == (2, True)
    monkeypatch.chdir(path)  # the suggested result is beside the Zarr that has the scan
    for place, result in ((path, "all.zarr.scan.result.cxi"), (".", "all.zarr.scan.zarr.result.cxi")):
        assert f"output: {{path: {tmp_path}/{result}}}" in run(app, ["info", place]).stdout


def test_a_mask_that_leaves_out_nearly_all_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    name, target = f"{DETECTOR}/mask", str(tmp_path / "scan.zarr")
    for bad, said in ((EDGE**2 - 5, "leaves out 97% of the pixels"), (EDGE**2 // 2, None)):
        flags = (np.arange(EDGE**2) < bad).astype("u4").reshape(EDGE, EDGE)
        source = write_cxi(tmp_path / "scan.cxi", _put({name: flags}))
        if said:
            with pytest.raises(InputError, match=said):
                convert_scan(source, target)
        for known in (KnownValues(), KnownValues(bad=(name,)), KnownValues(good=name))[1 if said else 0 :]:
            convert_scan(source, target, known=known, overwrite=True)
            remarks = open_scan(target)[0].remarks
            noted = any("of the pixels. If the mask is inverted" in text for _, text in remarks)
            assert noted == (not known.good or not said)


@pytest.mark.parametrize(
    ("energy", "wavelength", "found"),
    [(0.0, 2e-10, 2e-10), (300e3 * 1.602176634e-19, 1.9687e-12, 1.9687e-12), ([1.98644586e-15] * 3, None, 1e-10)],
)
def test_energies_of_any_kind_are_taken(tmp_path: Path, energy: Any, wavelength: float | None, found: float) -> None:
    """Nothing known as 0, electrons, and the energy of each pattern."""
    scan, _ = converted(tmp_path, _put({ENERGY: energy, WAVELENGTH: wavelength}))
    assert scan.wavelength == pytest.approx(found)
    for wrong in (1.4, 1e-17):
        with pytest.raises(InputError, match="from 1 fm to 1 mm"):
            converted(tmp_path, known=KnownValues(wavelength=wrong), overwrite=True)


def test_a_scan_that_lost_patterns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 2**12)
    monkeypatch.setattr(convert, "CHUNK_BYTES", 2**11)
    paths = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    for number, path in enumerate(paths):
        counts = np.arange(COUNT * EDGE**2, dtype=np.int32).reshape(COUNT, EDGE, EDGE) + number
        convert_scan(write_cxi(tmp_path / "scan.cxi", _put({f"{DETECTOR}/data": counts})), str(path))
    first, *others = sorted(file for file in (paths[0] / "patterns" / "c").rglob("0") if file.is_file())
    assert len(others) == 4
    shutil.copy(paths[1] / first.relative_to(paths[0]), first)
    with pytest.raises(DamagedData, match=r"patterns has files of another scan or another conversion"):
        open_scan(str(paths[0]))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(DamagedData, match=rf"{first}: .*; 1 of the 5 shards"):
        open_scan(str(paths[0]))
    first.unlink()
    said = rf"{first}: the shard is missing; 1 of the 5 .* or convert the scan again\.$"
    with pytest.raises(DamagedData, match=said):
        open_summary(str(paths[0]))


def test_a_scan_that_lost_another_array_is_refused(tmp_path: Path) -> None:
    path, run = tmp_path / "scan.zarr", CliRunner().invoke
    values = {f"{DETECTOR}/data_dark": np.ones((EDGE, EDGE)), "probe": np.ones((EDGE, EDGE), complex)}
    source = write_cxi(tmp_path / "scan.cxi", _put({"entry_1/data_1/intensities": np.ones(COUNT), **values}))
    convert_scan(source, str(path), known=KnownValues(probe="probe"))
    places = f"input: {{path: {path}}}\noutput: {{path: {tmp_path}/a.cxi}}\n"
    (tmp_path / "job.yaml").write_text(f"version: 1\njob: ptychography\n{places}model: {{field: far}}\n")
    for words in (["info", str(path)], ["plan", str(tmp_path / "job.yaml")]):
        assert run(app, words).exit_code == 0
    shutil.copytree(path, tmp_path / "whole")
    names = {entry.name for entry in path.iterdir() if entry.is_dir()} - {"patterns"}
    assert names == {*ARRAYS, "mean", "maximum"}

    def zeros(folder: Path) -> None:
        zarr.open_array(folder)[...] = 0

    commands = (f"info {path}", f"run {tmp_path}/job.yaml", f"export {path} {tmp_path}/a.png")
    kinds: list[Callable[[Path], Any]] = [lambda folder: shutil.rmtree(folder / "c"), zeros, shutil.rmtree]
    for number, (name, damage) in enumerate(itertools.product(sorted(names), kinds)):
        damage(path / name)
        done = run(app, commands[(number + number // 3) % 3].split())
        assert done.exit_code == exit_code(DamagedData()), done.output
        said = rf"scan\.zarr: {name} is not what the conversion wrote: .* convert the scan again"
        assert re.search(said, done.stderr)
        assert not list(tmp_path.glob("a.*"))
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "whole", path)
    del zarr.open_group(path).attrs["arrays"]
    zeros(path / "mean")
    assert not open_summary(str(path))[0].any()


def test_numbers_in_a_file_that_is_missing_are_refused(tmp_path: Path) -> None:
    for name in (f"{DETECTOR}/data", f"{DETECTOR}/mask", "entry_1/data_1/translation"):

        def change(file: Any, name: str = name) -> None:
            shape, dtype = file[name].shape, file[name].dtype
            layout, half = h5py.VirtualLayout(shape, dtype), shape[0] // 2
            layout[:half] = h5py.VirtualSource(".", name + "_", shape)[:half]
            layout[half:] = h5py.VirtualSource("gone.h5", "x", shape)[half:]
            file.move(name, name + "_")
            file.create_virtual_dataset(name, layout, fillvalue=0)

        with pytest.raises(InputError, match=r"scan\.cxi are in another file, gone\.h5, which is not in"):
            converted(tmp_path, change)

        with pytest.raises(InputError, match=rf"{name} is in another file, gone\.h5, which cannot be opened"):
            converted(tmp_path, _put({name: h5py.ExternalLink("gone.h5", "x")}))


def test_a_scan_that_is_converted_already_is_refused_with_what_takes_it(tmp_path: Path) -> None:
    scan = str(tmp_path / "scan.zarr")
    convert_scan(write_cxi(tmp_path / "scan.cxi"), scan)
    for options in ([], ["--crop", "8"]):
        done = CliRunner().invoke(app, ["convert", scan, str(tmp_path / "again.zarr"), *options])
        assert done.exit_code == exit_code(InputError())
        assert f"{scan} is a scan of halotile already: there is nothing to convert. `recon-cli plan`" in done.stderr
        assert "convert its original file with these options" in done.stderr
    known = KnownValues(patterns="patterns", positions="positions", wavelength=1e-10, distance=2.0, pixel=(5e-5, 3e-5))
    convert_scan(scan, str(tmp_path / "named.zarr"), Framing(crop=8), known)
    assert open_scan(str(tmp_path / "named.zarr"))[1].shape == (COUNT, 8, 8)
