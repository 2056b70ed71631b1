"""A child process that changes small files at random and reads them: ``python -m tests.storage.fuzzing FORMAT EXAMPLES LAST``.

LAST is a file that records the last example, in case the process crashes. The exit status is 0 when every changed file is refused with an :class:`InputError`, or read
with the bits that the format's own library returns. An error that arose in halotile's own code is a bug, even if it was converted.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import math
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import imagecodecs
import numcodecs
import numpy as np
import tifffile
import zarr
import zarr.codecs
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import halotile
from halotile.cli.screens.scan_views import ScanFacts
from halotile.errors import ConfigError, HalotileError, InputError, MissingPackage
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.scans import convert, formats, scan
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_output

MEMORY_BYTES = 4 * 2**30
_PIXELS = (np.random.default_rng(7).random((3, 40, 33)) * 200).astype("u2")
_PATTERNS = np.random.default_rng(7).poisson(20, (15, 8, 8)).astype("u2")
_PLACES = np.indices((3, 5)).reshape(2, -1).T * 2e-7


def _write_npy(folder: Path) -> None:
    np.save(folder / "c.npy", _PIXELS)
    np.save(folder / "fortran.npy", np.asfortranarray(_PIXELS.astype(">f4")))


def _write_hdf5(folder: Path) -> None:
    packed: Any = {"chunks": (1, 16, 16), "compression": "gzip", "fletcher32": True}
    for name, options in {"plain": {}, "gzip": packed}.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("image", data=_PIXELS, **options)


def _write_tiff(folder: Path) -> None:
    write = tifffile.imwrite
    write(folder / "plain.tif", _PIXELS, photometric="minisblack")
    write(folder / "tiled.tif", _PIXELS, photometric="minisblack", tile=(16, 16), compression="zlib")
    sizes: Any = {"resolution": (5, 5), "metadata": {"unit": "um", "spacing": 2}}
    write(folder / "imagej.tif", _PIXELS, imagej=True, **sizes)
    write(folder / "big.tif", _PIXELS[0], bigtiff=True, compression="lzw", predictor=True, resolutionunit=3)


def _write_ome_tiff(folder: Path) -> None:
    words = {"axes": "ZYX", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
    tifffile.imwrite(folder / "a.ome.tif", _PIXELS, photometric="minisblack", metadata=words)
    with tifffile.TiffWriter(folder / "levels.ome.tif") as file:
        file.write(_PIXELS, subifds=1, tile=(16, 16), compression="zlib", metadata=words)
        file.write(_PIXELS[:, ::2, ::2], subfiletype=1, tile=(16, 16), compression="zlib")


def _write_png(folder: Path) -> None:
    colours = np.ascontiguousarray(np.moveaxis(_PIXELS, 0, -1))
    for name, pixels in {"grey": _PIXELS[0].astype("u1"), "deep": _PIXELS[0] * 300, "rgb": colours * 300}.items():
        (folder / f"{name}.png").write_bytes(imagecodecs.png_encode(pixels))
    image = Image.fromarray(colours.astype("u1"))
    image.convert("P").save(folder / "palette.png", transparency=3)
    image.convert("1").save(folder / "bits.png")
    image.save(folder / "moving.png", save_all=True, append_images=[image.rotate(180)])


def _write_jpeg(folder: Path) -> None:
    image = Image.fromarray(np.moveaxis(_PIXELS, 0, -1).astype("u1"))
    image.save(folder / "rgb.jpg")
    image.convert("L").save(folder / "grey.jpg", progressive=True)
    exif = Image.Exif()
    exif[274] = 1
    image.save(folder / "exif.jpg", exif=exif)


ZARR2: dict[str, dict[str, Any]] = {
    "zstd": {"compressors": numcodecs.Zstd()}, "blosc": {"compressors": numcodecs.Blosc()}, "raw": {"compressors": None},
    "turned": {"compressors": numcodecs.Zlib(), "order": "F", "dtype": ">u2"},
    "delta": {"compressors": numcodecs.Zstd(), "filters": [numcodecs.Delta("<u2")]},
}  # fmt: skip
ZARR3: dict[str, dict[str, Any]] = {
    "zstd": {}, "blosc": {"compressors": zarr.codecs.BloscCodec()}, "sharded": {"shards": (1, 32, 32)},
    "gzip": {"compressors": zarr.codecs.GzipCodec(), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "raw": {"compressors": None, "dimension_names": ["z", "y", "x"]},
    "turned": {"filters": zarr.codecs.TransposeCodec(order=(2, 1, 0))},
}  # fmt: skip


def _write_zarr(folder: Path, version: Any, kinds: dict[str, dict[str, Any]]) -> None:
    usual = {"shape": _PIXELS.shape, "chunks": (1, 16, 16), "dtype": "<u2", "zarr_format": version}
    for name, options in kinds.items():
        zarr.create_array(folder / f"{name}.zarr", **usual | options)[...] = _PIXELS
    if version == 3:
        _write_output(folder / "ours.zarr", ome=False)


def _write_ome_zarr(folder: Path) -> None:
    _write_output(folder / "ours.zarr", ome=True)
    for version in (2, 3):
        group = zarr.open_group(folder / f"v{version}.zarr", mode="w", zarr_format=version)
        place = {"type": "translation", "translation": [0, 5, 5]}
        moved = {"coordinateTransformations": [{"type": "scale", "scale": [1, 0.5, 0.5]}, place]}
        axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
        image = {"axes": axes, "datasets": [{"path": "0"} | moved], **moved}
        channels = {"channels": [{"color": "00FF00", "window": {"start": 0, "end": 9, "min": 0, "max": 9}}]}
        said = {"multiscales": [image], "omero": channels}
        group.attrs.update(said if version == 2 else {"ome": said | {"version": "0.5"}})
        group.create_array("0", data=_PIXELS, chunks=(1, 16, 16))


def _write_output(path: Path, *, ome: bool) -> None:
    shapes = (_PIXELS.shape, "uint16", (1, 32, 32), (1, 16, 16))
    layout = Layout(*shapes, "lz4", ("z", "y", "x"), (1.0, 0.5, 0.5), (None,) * 3, ome)
    create_output(path, layout)
    ShardWriter(path, layout).write(Region.whole(_PIXELS.shape), _PIXELS)


def _read_hdf5(path: Path) -> Any:
    with h5py.File(path) as file:
        return file["image"][...]


def _read_jpeg(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image))


def _write_czi(folder: Path) -> None:
    from pylibCZIrw import czi

    with czi.create_czi(str(folder / "a.czi")) as file:
        for z, plane in enumerate(_PIXELS):
            file.write(data=plane[..., None].copy(), plane={"Z": z})
        file.write_metadata(scale_x=1e-7, scale_y=1e-7, scale_z=3e-7)


def _read_czi(path: Path) -> Any:
    from pylibCZIrw import czi

    with czi.open_czi(str(path)) as file:
        box = file.total_bounding_box
        return np.stack([file.read(plane={"Z": z})[..., 0] for z in range(*box["Z"])])


def _read_zarr(path: Path) -> Any:
    node = zarr.open(path, mode="r", zarr_format=3 if (path / "zarr.json").exists() else 2)
    return (node if isinstance(node, zarr.Array) else node["0"])[...]


def write_cxi(path: Path) -> None:
    """A scan of a few patterns, with everything that is read of a CXI file."""
    detector, source = "entry_1/instrument_1/detector_1", "entry_1/instrument_1/source_1"
    with h5py.File(path, "w") as file:
        packed: Any = {"chunks": (4, 8, 8), "compression": "gzip", "fletcher32": True}
        file.create_dataset("entry_1/data_1/data", data=_PATTERNS, **packed)
        file["entry_1/data_1/translation"] = np.pad(_PLACES, ((0, 0), (0, 1)))
        file[f"{detector}/distance"] = 2.0
        file[f"{detector}/basis_vectors"] = np.array([[0, -3e-5], [-5e-5, 0], [0, 0]])
        file[f"{detector}/mask"] = np.zeros((8, 8), "u4")
        file[f"{detector}/data_dark"] = np.zeros((2, 8, 8), "f4")
        file[f"{source}/energy"] = 1.98644586e-15
        file[f"{source}/wavelength"] = np.full(len(_PATTERNS), 1e-10)
        file[f"{source}/illumination"] = np.ones((8, 8), "c8")
        file["entry_1/sample_1/geometry_1/intensities"] = np.ones(len(_PATTERNS))


def write_ptyd(path: Path) -> None:
    """The same patterns as ptypy prepares them."""
    with h5py.File(path, "w") as file:
        for number, part in enumerate((slice(0, 8), slice(8, None))):
            chunk = file.create_group(f"chunks/{number}")
            chunk["data"], chunk["positions"] = _PATTERNS[part], _PLACES[part]
            chunk["weights"] = np.ones_like(_PATTERNS[part], "f4")
        for name, value in {"energy": 12.39842, "distance": 2.0, "psize": [5e-5, 3e-5], "center": [4.0, 4.0]}.items():
            file[f"meta/{name}"] = value
        file["info/weight2d"] = np.ones((8, 8))


def write_result(path: Path) -> None:
    """The result of a job."""
    place, count = "sample_1/geometry_1", len(_PLACES)
    contents: dict[str, Any] = {
        "image_1/data": np.ones((20, 20), "c8"), "image_2/data": np.ones((2, 8, 8), "c8"),
        f"{place}/translation": np.zeros((count, 3)), f"{place}/translation_before": np.zeros((count, 3)),
        "process_1/loss": np.arange(3.0),
        "process_1/first_pixel": np.arange(2.0 * count).reshape(count, 2) % 12,
        "process_1/amplitude": np.ones(count), "instrument_1/detector_1/background": np.zeros((8, 8)),
        **dict.fromkeys(("process_1/ring_frequency", "process_1/ring_correlation"), np.ones(4)),
    }  # fmt: skip
    links = {"object": "image_1/data", "probe": "image_2/data", "loss": "process_1/loss"}
    links["positions"] = f"{place}/translation"
    path.write_bytes(formats.encode_cxi(contents, {"image_1": {"pixel_size": (1e-9, 1e-9)}}, links))


def try_scan(path: Path) -> None:
    """Look at a scan, convert it, and read everything of what is written."""
    _refused(lambda: _shown(path))
    with TemporaryDirectory() as folder:
        if _refused(lambda: convert.convert_scan(str(path), f"{folder}/a.zarr")):
            try_scan_zarr(Path(folder, "a.zarr"))


def try_scan_zarr(path: Path) -> None:
    """Read everything of a scan."""
    _refused(lambda: (scan.open_scan(str(path))[1][...], scan.open_summary(str(path)), _shown(path)))


def _shown(path: Path) -> Any:
    """Everything that `recon-cli info` shows of a scan."""
    facts = ScanFacts.from_file(str(path))
    return facts and (facts.to_json(), facts.rows(), facts.next_step())


def try_result(path: Path) -> None:
    """Read a result as what it is, as the start of another job, and as images."""
    with TemporaryDirectory() as folder:
        _refused(lambda: scan.StartValues.read(str(path)))
        if _refused(lambda: scan.read_result(str(path))):
            _refused(lambda: scan.export_result(str(path), f"{folder}/a.zarr"))


def _refused(call: Callable[[], Any]) -> bool:
    """True where a call returns; an error that is no refusal is raised."""
    try:
        call()
    except (InputError, ConfigError) as error:
        refuse_fault(error)
        return False
    return True


def _write_scan_zarr(folder: Path) -> None:
    write_cxi(folder / "scan.cxi")
    convert.convert_scan(str(folder / "scan.cxi"), str(folder / "scan.zarr"))
    (folder / "scan.cxi").unlink()


IMAGES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "npy": (_write_npy, np.load), "hdf5": (_write_hdf5, _read_hdf5), "tiff": (_write_tiff, partial(tifffile.imread, series=0)),
    "ome-tiff": (_write_ome_tiff, partial(tifffile.imread, series=0)), "png": (_write_png, lambda path: imagecodecs.png_decode(path.read_bytes())), "jpeg": (_write_jpeg, _read_jpeg),
    "czi": (_write_czi, _read_czi), "zarr-v2": (partial(_write_zarr, version=2, kinds=ZARR2), _read_zarr),
    "zarr-v3": (partial(_write_zarr, version=3, kinds=ZARR3), _read_zarr),
    "ome-zarr": (_write_ome_zarr, _read_zarr),
}  # fmt: skip

_TAKEN_OUT = "(taken out)"
_ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**70, -(2**63), 0.5, 1e300, math.nan, math.inf),
        *("", "\0", "a", "x", "NaN", "uint8", "<f4", "0x7", "../..", "/", "é", "scale", "zstd", "2", _TAKEN_OUT),
        *([], {}, [[]], [None], [1], [0, 0, 0], [-1, 4, 4], {"name": "blosc"}, {"": None}, [{}]),
    ]
)

ODD_VALUES: dict[str, Callable[[str, tuple[int, ...]], Any]] = {
    "a link to itself": lambda name, shape: h5py.SoftLink(f"/{name}"),
    "a link to another file": lambda name, shape: h5py.ExternalLink("gone.h5", "x"),
    "null": lambda name, shape: h5py.Empty("f4"),
    "compound": lambda name, shape: np.zeros(shape, [("x", "f4"), ("y", "f4")]),
    "text": lambda name, shape: "none", "bytes": lambda name, shape: np.full(shape, b"x"),
    "complex": lambda name, shape: np.ones(shape, complex), "not a number": lambda name, shape: np.full(shape, np.nan),
    "negative": lambda name, shape: np.full(shape, -1.0), "huge": lambda name, shape: np.full(shape, 1e300),
    "a number": lambda name, shape: 3.0, "two numbers": lambda name, shape: np.ones(2),
    "empty": lambda name, shape: np.ones((0, *shape[1:])), "one axis more": lambda name, shape: np.ones((*shape, 1)),
    "one row less": lambda name, shape: np.ones((*(n - 1 for n in shape[:1]), *shape[1:])),
}  # fmt: skip
ODD_HDF5: dict[str, Callable[[Any, str, tuple[int, ...]], Any]] = {
    "nothing": lambda file, name, shape: None,
    "a group": lambda file, name, shape: file.create_group(name),
    "references": lambda file, name, shape: file.create_dataset(name, shape, h5py.ref_dtype),
    "without attributes": lambda file, name, shape: file.create_group(f"{name}/data"),
} | {
    odd: lambda file, name, shape, value=value: file.__setitem__(name, value(name, shape))
    for odd, value in ODD_VALUES.items()
}
"""Odd things in place of a dataset of a shape or of a group."""

Edit = tuple[Any, ...]
"""For bytes: position, inserted bytes, and number of bytes replaced. For JSON and HDF5: number of the value, and its replacement."""

_WORDS = st.sampled_from([b"\0" * 8, b"\xff" * 4, b"\xff" * 8, b"-", b"9", b"{"])
_BYTES = st.builds(
    lambda place, new, room: (place, new, len(new) if room is None else room),
    # The description of the pixels is usually at the start, after the signature.
    st.one_of(st.integers(4, 63), st.integers(8, 400), st.integers(8, 2000), st.integers(0, 2**14)),
    st.one_of(st.binary(min_size=1, max_size=4), _WORDS),
    st.sampled_from([None, None, None, None, 0, 4, 2**14]),
)
_HDF5 = st.tuples(st.integers(0, 2**10), st.sampled_from(sorted(ODD_HDF5)))


def is_json(file: Path) -> bool:
    """Return True for a Zarr metadata file."""
    return file.name == "zarr.json" or file.name.startswith(".z")


def edits(file: Path) -> st.SearchStrategy[list[Edit]]:
    """A few changes to one file."""
    some = st.lists(_BYTES, min_size=1, max_size=2)
    values = (
        st.tuples(st.integers(0, 2**14), _ODD) if is_json(file) else _HDF5 if file.suffix in (".cxi", ".ptyd") else None
    )
    return some if values is None else st.lists(values, min_size=1, max_size=2) | some


def edited_hdf5(content: bytes, place: int, odd: str) -> bytes:
    """Put something odd in place of a value or a group."""
    memory = io.BytesIO(content)
    with h5py.File(memory, "r+") as file:
        names = list(file)
        file.visit(names.append)
        names = sorted(set(names))
        name = names[place % len(names)] if names else "data"
        is_hard = isinstance(file.get(name, getlink=True), h5py.HardLink)
        shape = (file[name].shape or ()) if (is_hard and isinstance(file[name], h5py.Dataset)) else ()
        if names:
            del file[name]
        ODD_HDF5[odd](file, name, shape)
    return memory.getvalue()


def edited(content: bytes, changes: list[Edit]) -> bytes:
    """Apply changes to a file."""
    data = bytearray(content)
    for place, *change in changes:
        if len(change) == 2:
            at = place % len(content)
            data[at : at + change[1]] = change[0]
        elif isinstance(change[0], str) and change[0] in ODD_HDF5:
            data = bytearray(edited_hdf5(bytes(data), place, change[0]))
        else:
            document = json.loads(bytes(data))
            places = list(_places(document))
            if places:
                holder, key = places[place % len(places)]
                holder[key] = change[0]
                if change[0] == _TAKEN_OUT:
                    del holder[key]
            data = bytearray(json.dumps(document).encode())
    return bytes(data)


def _places(value: Any) -> Any:
    """The container and key of every value in a JSON document."""
    keys = dict(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def try_file(path: Path, read: Callable[[Path], Any]) -> None:
    """Open a file as a job does, and read from it; raise whatever a format may not raise, and what its library does not give."""
    try:
        source = open_source(path)
        assert json.dumps(source.fingerprint())
        shape = tuple(min(n, 64) for n in source.shape)
        # Larger arrays are refused by a plan because of their memory.
        small = max(map(math.prod, (shape, source.chunks))) <= (2**16)
        pixels = source.read(Region((0,) * len(shape), shape)) if small else None
    except (InputError, MissingPackage) as error:
        refuse_fault(error)
        return
    if pixels is None or any(n > 64 for n in source.shape):
        return
    try:
        expected = read(path)
    except Exception:  # it may refuse files that halotile can read
        return
    if expected.shape == pixels.shape:
        assert expected.astype(pixels.dtype, copy=False).tobytes() == pixels.tobytes()


def refuse_fault(error: BaseException) -> None:
    """Raise an unintended error that arose in halotile's own code rather than in a library."""
    cause = error.__cause__
    if cause is None or isinstance(cause, (HalotileError, OSError)):
        return
    *_, last = traceback.extract_tb(cause.__traceback__)
    if Path(last.filename).is_relative_to(Path(halotile.__file__).parent):
        raise cause


SCANS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "cxi": (lambda folder: write_cxi(folder / "a.cxi"), try_scan),
    "ptyd": (lambda folder: write_ptyd(folder / "a.ptyd"), try_scan),
    "scan-zarr": (_write_scan_zarr, try_scan_zarr),
    "result": (lambda folder: write_result(folder / "a.cxi"), try_result),
}

FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    **{name: (write, partial(try_file, read=read)) for name, (write, read) in IMAGES.items()},
    **SCANS,
}
"""How files of a format are written, and tried."""


def main(name: str, examples: int, last: Path) -> None:
    """Try a number of changed files of a format."""
    write, attempt = FORMATS[name]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    logging.disable()
    faulthandler.enable()
    with TemporaryDirectory() as folder:
        write(Path(folder))
        roots = sorted(Path(folder).iterdir())
        files = {root: sorted(f for f in root.rglob("*") if f.is_file()) or [root] for root in roots}

        @seed(0)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def check(data: st.DataObject) -> None:
            root = data.draw(st.sampled_from(roots), "root")
            meta = [file for file in files[root] if is_json(file)] or files[root]
            file = data.draw(st.sampled_from(meta) | st.sampled_from(files[root]), "file")
            content, changes = file.read_bytes(), data.draw(edits(file), "changes")
            last.write_text(f"{file.relative_to(folder)}: {changes}")
            try:
                file.write_bytes(edited(content, changes))
                attempt(root)
            finally:
                file.write_bytes(content)

        check()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
