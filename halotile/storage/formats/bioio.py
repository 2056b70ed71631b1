"""Files of microscopes (CZI, ND2, LIF, VSI and others), decoded plane by plane by the readers of bioio."""

import inspect
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.registry import optional
from halotile.storage.formats import base
from halotile.storage.sharded.ome_metadata import OmeImage
from halotile.storage.spacing import in_known_unit
from halotile.storage.stored_array import StoredArray

_SUFFIXES = (".czi", ".nd2", ".lif", ".vsi", ".dv", ".r3d", ".sldy", ".oir", ".oib", ".zvi")
_ALWAYS_THERE = "TCZ"  # axes that bioio adds with length 1 where a file lacks them


def claims(path: Path) -> bool:
    """Return True for the suffix of a microscope's format; a VSI begins like a TIFF, but holds no pixels itself."""
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> base.Source:  # noqa: A001 - common to all formats
    """Open a scene of a microscope's file; ``dataset`` is its name or number, by default the first."""
    base.refuse_option("microscope's", "microscope files are read at full resolution", level=level)
    return StoredArray(path, "bioio", open_scene, scene=dataset, axes=axes)


def open_scene(path: str, *, scene: str | None, axes: str | None) -> base.Reader:
    """The reader of a scene, which has decoded nothing yet."""
    file = _opened(path)
    _choose_scene(file, scene)
    order = str(file.dims.order)
    # Axes that the file itself does not have are left out.
    kept = "".join(a for a in order if a not in _ALWAYS_THERE or getattr(file.dims, a) > 1)
    pixels = file.get_image_dask_data(kept)
    header = base.make_header(
        pixels.shape,
        pixels.dtype,
        requested=axes,
        named=list(kept if "C" in kept else kept.replace("S", "C")),
        chunks=pixels.chunksize,
        identity={"scene": str(file.current_scene), **base.file_identity(path, _other_files(path))},
        ome=OmeImage(name=str(file.current_scene)),
    )
    if "C" in kept:
        header = replace(header, channels=tuple({"label": str(name)} for name in file.channel_names))
    header = _with_sizes(replace(header, remarks=(*_remark_on_scenes(file), *header.remarks)), file)

    def decode(index: tuple[int, ...]) -> Any:
        return pixels.blocks[index].compute(scheduler="synchronous")

    return base.KeptChunkReader(header, decode, pixels.chunks)


def _opened(path: str) -> Any:
    """The file in bioio, with planes as the unit of decode where its plug-in lets one choose."""
    suffix = Path(path).suffix.lower()
    bioio, plugins, exceptions = (
        optional(f"a {suffix} file is read with bioio", module, '"halotile[bioio]"')
        for module in ("bioio", "bioio.plugins", "bioio_base.exceptions")
    )
    plug_ins = plugins.get_plugins(use_cache=True).get(suffix, [])
    if not plug_ins:
        raise MissingPackage(
            f"bioio has no plug-in for {suffix} here. Install one of its plug-ins that reads it, such as bioio-bioformats, or "
            "export the image as an OME-TIFF."
        )
    # What bioio logs of a file that it refuses is in the error below.
    if not (logger := logging.getLogger("bioio")).handlers:
        logger.addHandler(logging.NullHandler())
    for plug_in in plug_ins:
        reader = plug_in.metadata.get_reader()
        choosable = {"chunk_dims", "kwargs"} & inspect.signature(reader).parameters.keys()
        try:
            return bioio.BioImage(path, reader=reader, **({"chunk_dims": ["Y", "X"]} if choosable else {}))
        except exceptions.UnsupportedFileFormatError as error:
            refused = error
    reason = " ".join(str(refused).rpartition("Reader: ")[2].split()).rstrip(".")
    raise DamagedData(
        f"bioio cannot read it: {reason}. Copy it again from its origin, or, if its content is another format's, name it accordingly."
    ) from refused


def _choose_scene(file: Any, scene: str | None) -> None:
    """Make the scene of this name, or else of this number, the current one."""
    names = [str(name) for name in file.scenes]
    if scene is None:
        return
    if scene not in names and not (scene.isdecimal() and int(scene) < len(names)):
        raise InputError(f"dataset is {scene!r}, but the file has no such scene. Write one of {base.listed(names)}.")
    file.set_scene(names.index(scene) if scene in names else int(scene))


def _remark_on_scenes(file: Any) -> tuple[str, ...]:
    """A remark on a file of several scenes, which says what is read of it."""
    names = [str(name) for name in file.scenes]
    if len(names) < 2:
        return ()
    now = file.current_scene_index
    return (
        f"the file has {len(names)} scenes, {base.listed(names)}: this is {names[now]}. For another, write input.dataset: "
        f"{names[1 if now == 0 else 0]}",
    )


def _with_sizes(header: base.Header, file: Any) -> base.Header:
    """The header with physical sizes of pixels, in micrometers unless the plug-in names a unit, and time steps in seconds."""
    lengths, step = file.physical_pixel_sizes, file.time_interval
    sizes = {axis: (getattr(lengths, axis.upper(), None), _unit(file, axis)) for axis in "zyx"}
    sizes["t"] = (step.total_seconds() if isinstance(step, timedelta) else None, "second")
    given = {axis: size for axis, size in sizes.items() if size[0] and 0 < size[0] < np.inf}
    known = {axis: in_known_unit(float(size or 0), unit) for axis, (size, unit) in given.items()}
    scale, units = zip(*(known.get(axis, (1.0, None)) for axis in header.axes), strict=True)
    return replace(header, scale=scale, units=units)


def _unit(file: Any, axis: str) -> str:
    """The unit of a size along an axis; bioio's plug-ins that name none give micrometers."""
    unit = str(getattr(getattr(file.dimension_properties, axis.upper(), None), "unit", None))
    return unit if in_known_unit(1.0, unit)[1] else "micrometer"


def _other_files(path: str) -> list[str]:
    """The files with the pixels of a VSI, in a folder beside it."""
    folder = Path(path).parent / f"_{Path(path).stem}_"
    return sorted(map(str, folder.rglob("*.ets"))) if folder.is_dir() else []
