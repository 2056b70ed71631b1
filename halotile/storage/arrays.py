"""Opening of the array at a path in any supported format, and search for the OME-Zarr image in a Zarr, such as a plate."""

import difflib
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from halotile import registry
from halotile.errors import ConfigError, DamagedData, HalotileError, InputError, InputUnreadable
from halotile.storage.disk.place import ZARR_FILES, broken_link, is_array
from halotile.storage.formats.base import Source, listed
from halotile.storage.rim import Readable
from halotile.storage.stored_array import StoredArray, read_error

__all__ = ["Source", "open_array", "open_source", "planes_last"]

_SUPPORTED = (
    "Zarr v2 and v3 arrays, OME-Zarr 0.1 to 0.5 groups, TIFF, BigTIFF and OME-TIFF, .npy, "
    'HDF5 (with pip install "halotile[hdf5]"), PNG and JPEG ("halotile[images]"), and CZI, ND2, LIF and VSI ("halotile[bioio]")'
)


def open_source(
    path: str | os.PathLike[str],
    *,
    level: int = 0,
    dataset: str | int | None = None,
    axes: str | None = None,
    complex_pixels: bool = False,
) -> Source:
    """Open the array at ``path`` for reading region by region.

    Parameters
    ----------
    path : str or path
        A Zarr or OME-Zarr directory or .zip, a TIFF, .npy, HDF5, PNG, JPEG or microscope's file, or the URL of a Zarr, such as
        ``s3://bucket/image.zarr``.
    level : int
        Resolution level of an OME-Zarr or of a pyramidal TIFF; 0 is the finest.
    dataset : str or int, optional
        The array of a Zarr group or HDF5 file, or the image or level of an OME-Zarr in a Zarr; the series (a number) of a TIFF; the scene of
        a microscope's file.
    axes : str, optional
        One letter for each axis, such as ``"tcyx"``; overrides the axes named in the file.
    complex_pixels : bool
        Accept an image of complex numbers.

    Returns
    -------
    Source
        It has ``shape``, ``dtype``, ``axes``, ``chunks``, ``scale``, ``units`` and ``read(region)``, and is
        indexed with integers and slices.

    Raises
    ------
    InputError
        When nothing exists there, no format recognizes it, or it cannot be used: complex pixels, an axis
        of length 0, a level that does not exist.
    DamagedData
        When a file is truncated, or violates its format.
    InputUnreadable
        When the system cannot read it.
    MissingPackage
        When an optional package is needed.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.arange(12, dtype="uint16").reshape(3, 4))
    ...     source = open_source(f"{folder}/a.npy")
    ...     source.axes, source[1:, 1:3].tolist()
    (('y', 'x'), [[5, 6], [9, 10]])
    """
    text = os.path.expanduser(os.fspath(path))
    dataset = None if dataset is None else str(dataset)
    if level < 0:
        raise InputError(f"level is {level}: levels count from 0, the finest. Write 0 or more.")
    try:
        module, text, options = _format_of(text, dataset)
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        # Metadata that no library can parse, or a file that the system cannot read.
        raise read_error(f"{text}: its format cannot be determined", error) from error
    source: Source = module.open(text, level=level, axes=axes, **options)
    if source.dtype.kind == "c" and not complex_pixels:
        raise InputError(
            f"{text}: the pixels are of type {source.dtype}, and an image to compute with is real. Write its real and imaginary "
            "parts, or magnitude and phase, as channels."
        )
    if source.format == "zarr" and isinstance(source, StoredArray) and is_array(Path(text)):
        source.remarks += note_of_level(text)
    return source


def planes_last(source: Source) -> Source:
    """The same array with rows and columns as its last two axes: colours that are stored last come before them.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/rgb.npy", np.zeros((40, 50, 3)))
    ...     planes_last(open_source(f"{folder}/rgb.npy")).shape
    (3, 40, 50)
    """
    axes = "".join(getattr(source, "axes", ()))
    if ("x" in axes[-2:] and "y" in axes[-2:]) or not ("x" in axes and "y" in axes):
        return source
    return source.in_order(sorted(range(len(axes)), key=lambda axis: "yx".find(axes[axis])))


def _format_of(text: str, dataset: str | None) -> tuple[Any, str, dict[str, str | None]]:
    """The format module for a path or URL, with the path of the image in a Zarr, and options: its dataset, and the path of an image in a .zip."""
    path, is_url = Path(text), "://" in text
    if not is_url and not path.exists():
        raise InputError(_missing_path_message(path))
    modules = (registry.find("formats", name) for name in (["zarr"] if is_url else registry.names("formats")))
    module = next((module for module in modules if is_url or module.claims(path)), None)
    if module is None:
        raise InputError(f"{path}: {_describe(path)}, which no format here reads. Readable: {_SUPPORTED}.")
    # By their names, because all formats come from the registry.
    name = getattr(module, "__name__", "").removeprefix("halotile.storage.formats.")
    is_known = name != "zarr" and (name != "ome" or dataset is None)
    if is_known or (not is_url and is_array(path)):
        return module, text, {"dataset": dataset}
    found = image_inside(text, dataset)
    if found is None:
        return registry.find("formats", "zarr"), text, {"dataset": dataset}
    module, (group, level) = registry.find("formats", "ome"), found
    if path.is_file():
        return module, text, {"dataset": level, "inside": group}
    return module, f"{text.rstrip('/')}/{group}" if group else text, {"dataset": level}


def open_array(path: str | os.PathLike[str]) -> Readable:
    """Open the array at ``path``; a Zarr or .npy need not hold an image: it may be complex or have a single axis."""
    try:
        return open_source(path)
    except (DamagedData, InputUnreadable):
        raise
    except InputError:
        text = os.path.expanduser(os.fspath(path))
        for name in ("zarr", "npy"):
            module = registry.find("formats", name)
            if "://" in text or module.claims(Path(text)):
                array: Readable = module.open_array(text)
                return array
        raise


def _missing_path_message(path: Path) -> str:
    """Error message for a path that does not exist, with the closest existing name."""
    if link := broken_link(path):
        return f"{path}: nothing is there, for {link}. Repair it, or write the path of an existing file or directory."
    parent, missing = path.parent, path
    while not parent.exists():
        parent, missing = parent.parent, parent
    if parent != path.parent:
        return (
            f"{path}: nothing is there, for there is no {missing.name} in {parent.absolute()}. Write an existing path."
        )
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"Did you mean {parent / near[0]}?" if near else "Write the path of an existing file or directory."
    return f"{path}: nothing is there. {hint}"


def _describe(path: Path) -> str:
    """Describe a file or directory that no format recognizes."""
    if not path.is_dir():
        with path.open("rb") as file:
            start = file.read(8)
        if start == b"SIMPLE  ":
            return f'a FITS file (store its image by numpy.save("{path.stem}.npy", astropy.io.fits.getdata("{path.name}")))'
        return f"a file that begins with {repr(start)[1:]}" if start else "an empty file"
    entries = sorted(path.iterdir())
    stores = [e.name for e in entries if any((e / name).exists() for name in ZARR_FILES)]
    if stores:
        shown = ", ".join(stores[:5])
        return f"a directory without Zarr metadata of its own (inside it: {shown}; name one of these)"
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    return f"a directory of {count} without Zarr metadata" if entries else "an empty directory"


_DEEPEST = 4  # groups between a Zarr and an image in it: row, column and field of a plate
_MOST_NAMED = 20


def find_image(path: str) -> Path | None:
    """The group of the image at a path on a disk, of the only image inside, or of the image whose level the path is; None where there is none."""
    from halotile.storage.formats import ome

    top = Path(os.path.realpath(os.path.expanduser(path)))
    if "://" in path or not any((top / name).is_file() for name in ZARR_FILES):
        return None
    if is_array(top):
        return next((folder for folder in (top.parent, top.parent.parent) if ome.claims(folder)), None)
    inside = image_inside(path, of_several=ConfigError)
    return None if inside is None else top / inside[0]


def note_of_level(path: str) -> tuple[str, ...]:
    """A note on the array at a path on a disk that is a level of an image; none for another array."""
    from halotile.storage.formats.zarr import open_node

    text = "it is read without the pixel sizes and channels of its OME-Zarr: for these, write "
    with suppress(InputError):
        if group := find_image(path):
            level = os.path.relpath(os.path.realpath(os.path.expanduser(path)), group)
            if _holder(open_node(str(group)), level):
                return (f"{text}input.path: {group} and input.dataset: {level}",)
    return ()


def image_inside(
    path: str, dataset: str | None = None, *, of_several: type[HalotileError] = InputError
) -> tuple[str, str | None] | None:
    """Find the image in a Zarr, at a path or URL, that a dataset names or is a level of; without one, the only image.

    Returns
    -------
    (str, str or None) or None
        The path of its group inside the Zarr, empty for the Zarr itself, and that of the dataset inside the group; None where there is no image.
    """
    from halotile.storage.formats.zarr import open_node

    try:
        top = open_node(os.path.expanduser(path))
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    if not hasattr(top, "members"):
        return None
    if dataset and (holder := _holder(top, dataset)):
        return holder
    node = top if dataset is None else _node(top, dataset)
    searched = top if node is None else node
    found = _images_in(searched, _DEEPEST) if hasattr(searched, "members") else iter(())
    names = list(itertools.islice(found, _MOST_NAMED + 1))
    if node is None and names not in ([], [""]):
        raise of_several(
            f"{path}: dataset is {dataset!r}, but no image or array there has this path. Write dataset: one of {listed(names)}."
        )
    if len(names) > 1:
        advice = f"the path of one, such as {os.path.join(path, names[0])}"
        advice = f"dataset: one of {listed(names)}" if os.path.isfile(path) else advice
        raise of_several(f"{path} contains several images: {listed(names)}. Write {advice}.")
    return (names[0], None) if names and node is not None else None


def _holder(top: Any, dataset: str) -> tuple[str, str | None] | None:
    """The path of the innermost group whose image a dataset is or belongs to, and the path of the dataset inside it."""
    from halotile.storage.formats import ome
    from halotile.storage.formats.zarr import ome_attributes

    parts = dataset.strip("/").split("/")
    for count in range(len(parts), -1, -1):
        group, inside = "/".join(parts[:count]), "/".join(parts[count:]) or None
        images = ome_attributes(getattr(_node(top, group), "attrs", {})).get("multiscales")
        if images and (inside is None or ome.named_image(images, inside)):
            return group, inside
    return None


def _node(top: Any, path: str) -> Any:
    """The array or group at a path inside a group; None where there is none."""
    with suppress(KeyError, ValueError):  # ValueError: zarr refuses names such as "../other"
        return top[path] if path else top
    return None


def _images_in(group: Any, depth: int) -> Iterator[str]:
    """Paths of the images in a Zarr group and its nested groups."""
    from halotile.storage.formats.zarr import ome_attributes

    attributes = ome_attributes(group.attrs)
    if attributes.get("multiscales"):
        yield group.path
    elif depth:
        for child in _groups_in(group, attributes):
            yield from _images_in(child, depth - 1)


def _groups_in(group: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """The groups in a group; none beside arrays, which are read instead."""
    names: list[str] = []
    # A web server lists nothing, so the metadata come first.
    for key, entries in (("plate", "wells"), ("well", "images")):
        with suppress(KeyError, TypeError):
            names += [entry["path"] for entry in attributes[key][entries]]
    if "bioformats2raw.layout" in attributes and not names:
        names += itertools.takewhile(group.__contains__, map(str, itertools.count()))
    if names:
        children = [group.get(name) for name in names]
    else:
        with warnings.catch_warnings():
            # zarr warns of unrelated files beside the groups.
            warnings.simplefilter("ignore")
            children = [child for _, child in sorted(group.members(), key=itemgetter(0))]
    found = [child for child in children if child is not None]
    yield from found if all(hasattr(child, "members") for child in found) else ()
