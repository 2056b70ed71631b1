"""Commands as Python functions: each returns a value and prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.cli import comparing
from halotile.cli.arguments import ExportRequest, Flags, PreviewRequest, TryRequest
from halotile.cli.config.loading import load_job, read_config, saved_job_of
from halotile.cli.config.sections import check_config
from halotile.cli.config.yaml_source import ConfigProblem
from halotile.cli.export import export as write
from halotile.cli.export import preview as draw
from halotile.cli.info import describe
from halotile.cli.status import RunStatus, find_run, output_of, read_status
from halotile.cli.viewing import ImageServer, panels_of
from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Job

if TYPE_CHECKING:
    from halotile.graphs.jobs.denoise.comparison import Comparison
    from halotile.graphs.plans.plan import Plan
    from halotile.graphs.runs.verify import Verdict
    from halotile.graphs.watching.progress import Observer


def validate(path: str | Path, overrides: Iterable[str] = ()) -> tuple[ConfigProblem, ...]:
    """Check a job file; nothing is started.

    Parameters
    ----------
    path : path
        The YAML file.
    overrides : iterable of str
        Values that override it, such as ``"tile.size=256"``.

    Returns
    -------
    tuple of Problem
        Every mistake with its place and what to write instead; empty where the job is correct.

    Raises
    ------
    ConfigError
        When the file cannot be read.

    Examples
    --------
    >>> import halotile, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "job.yaml")
    >>> _ = file.write_text("version: 1\\njob: denoyse\\n")
    >>> halotile.validate(file)[-1].message
    'no job is called "denoyse"; did you mean denoise?'
    """
    file = Path(path)
    _, problems = check_config(read_config(file, tuple(overrides)), file.parent)
    return tuple(problems)


def plan(
    job: str | Path | Job, overrides: Iterable[str] = (), *, fresh: bool = False, allow_import: bool = False
) -> Plan:
    """Decide every size of a job and check that it fits; nothing is started or written.

    Parameters
    ----------
    job : path or Job
        A job file, or a job built by a script.
    overrides : iterable of str
        Values that override a file, such as ``"tile.size=256"``.
    fresh : bool
        Plan from scratch, even where an unfinished run can be resumed.
    allow_import : bool
        Allow a job file to import code of your own.

    Returns
    -------
    Plan
        Its figures are in ``summary()``: blocks, memory, disk, notes.

    Raises
    ------
    ConfigError, InputError
        When the job cannot be run as it is written.
    MemoryRefused, DiskRefused
        When it does not fit.

    Examples
    --------
    >>> import halotile
    >>> halotile.plan("job.yaml").summary()["blocks"]  # doctest: +SKIP
    400
    """
    from halotile.graphs.plans.plan import make_plan

    if not isinstance(job, Job):
        job = load_job(Path(job), tuple(overrides), Flags(allow_import=allow_import))
    return make_plan(job, fresh=fresh)


def info(path: str | Path, *, level: int = 0, dataset: str | None = None) -> dict[str, Any]:
    """Describe an image without reading its pixels.

    Parameters
    ----------
    path : path
        Zarr, OME-Zarr, TIFF, ``.npy``, HDF5, PNG, JPEG or a microscope's file; of a pattern or folder, the first image.
    level : int
        Resolution level; 0 is the finest.
    dataset : str, optional
        Dataset inside an HDF5 file, image or array inside a Zarr, or scene of a microscope's file.

    Returns
    -------
    dict
        ``shape`` in pixels, ``axes``, ``dtype``, ``chunks``, ``scale`` and ``units`` for each axis, ``georeference``, ``levels``,
        and ``config``, a job file to start from.

    Raises
    ------
    InputError
        When it cannot be read.

    Examples
    --------
    >>> import halotile, numpy, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "scan.npy")
    >>> numpy.save(file, numpy.zeros((40, 30), "uint16"))
    >>> facts = halotile.info(file)
    >>> facts["shape"], facts["axes"], facts["dtype"]
    ([40, 30], 'yx', 'uint16')
    """
    return describe(os.fspath(path), level=level, dataset=dataset)


def view(*paths: str | Path, against: str | Path | None = None, dataset: str | None = None) -> ImageServer:
    """Show images in a browser, or in a notebook: they pan and zoom together.

    Parameters
    ----------
    *paths : path
        Images in any format, side by side.
    against : path, optional
        The image before. It is the first panel, and its difference from the first of ``paths`` the last.
    dataset : str, optional
        Dataset inside HDF5 files, image or array inside Zarrs, or scene of microscope's files.

    Returns
    -------
    ImageServer
        Its ``address`` shows the images until ``close()`` is called. A notebook shows it as a frame.

    Raises
    ------
    ConfigError, InputError
        When an image cannot be read, or images that are compared have different shapes.
    MissingPackage
        Without neuroglancer.

    Examples
    --------
    >>> import halotile
    >>> halotile.view("clean.zarr", against="noisy.zarr")  # doctest: +SKIP
    """
    return ImageServer(
        panels_of([os.fspath(path) for path in paths], None if against is None else os.fspath(against), dataset)
    )


def preview(
    path: str | Path,
    file: str | Path,
    *,
    size: int | None = None,
    region: str | None = None,
    plane: str | None = None,
    against: str | Path | None = None,
    values: tuple[float, float] | None = None,
    level: int = 0,
    dataset: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Draw an image of any size as a small PNG, or a part of it pixel by pixel.

    Parameters
    ----------
    path : path
        The image.
    file : path
        File to write; its name ends in ``.png``.
    size : int, optional
        Longest side of a PNG in pixels; 1024 by default.
    region : str, optional
        Rows and columns, such as ``"0:500,100:600"``, shown pixel by pixel.
    plane : str, optional
        The plane to show, such as ``"t=0,c=1"``.
    against : path, optional
        A second image, drawn on the right of a PNG.
    values : (float, float), optional
        Values that are black and white in a PNG.
    level : int
        Resolution level; 0 is the finest.
    dataset : str, optional
        Dataset inside an HDF5 file, image or array inside a Zarr, or scene of a microscope's file.
    overwrite : bool
        Replace an existing file.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError, InputError
        When an argument is not valid, or the image cannot be read.

    Examples
    --------
    >>> import halotile
    >>> halotile.preview("clean.zarr", "clean.png", against="noisy.zarr")  # doctest: +SKIP
    PosixPath('clean.png')
    """
    request = PreviewRequest(
        **_fields_of(path, file, region=region, plane=plane, level=level, dataset=dataset, overwrite=overwrite),
        size=size,
        against=os.fspath(against) if against is not None else None,
        values=values,
    )
    draw(request, quiet=True)
    return request.file


def export(
    path: str | Path,
    file: str | Path,
    *,
    region: str | None = None,
    plane: str | None = None,
    level: int = 0,
    dataset: str | None = None,
    cog: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write an image of any size as one TIFF with every pixel and resolution levels, by means over 2 x 2 pixels without holes.

    Parameters
    ----------
    path : path
        The image.
    file : path
        File to write; its name ends in ``.tif`` or ``.tiff``.
    region : str, optional
        Rows and columns, such as ``"0:500,100:600"``, in pixels; all when left out.
    plane : str, optional
        The planes to write, such as ``"t=0,c=1"``; all when left out.
    level : int
        Resolution level of the image that becomes the finest; 0 is the finest of the image.
    dataset : str, optional
        Dataset inside an HDF5 file, image or array inside a Zarr, or scene of a microscope's file.
    cog : bool
        Write a Cloud Optimized GeoTIFF with planes as bands, not an OME-TIFF.
    overwrite : bool
        Replace an existing file.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError, InputError
        When an argument is not valid, or the image cannot be read, is complex, or has no georeference for a COG.

    Examples
    --------
    >>> import halotile, numpy, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> numpy.save(folder / "scan.npy", numpy.zeros((1500, 700), "uint16"))
    >>> halotile.info(halotile.export(folder / "scan.npy", folder / "scan.tif"))["levels"]
    [[1500, 700], [750, 350], [375, 175]]
    """
    asked = _fields_of(path, file, region=region, plane=plane, level=level, dataset=dataset, overwrite=overwrite)
    request = ExportRequest(**asked, cog=cog)
    write(request, quiet=True)
    return request.file


def _fields_of(path: str | Path, file: str | Path, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call as fields of a request."""
    return {"path": os.fspath(path), "file": Path(file), "is_call": True} | options


def try_settings(
    job: str | Path,
    settings: Mapping[str, Sequence[Any]],
    file: str | Path | None = None,
    *,
    region: str | None = None,
    plane: str | None = None,
    overwrite: bool = False,
    allow_import: bool = False,
) -> Comparison:
    """Denoise one crop of an image with several settings, as a run of the job would, and compare the results.

    Parameters
    ----------
    job : path
        The file of a job that denoises.
    settings : mapping of str to sequence
        Values of keys, such as ``{"denoiser.strength": [0.5, 1, 2]}``; of several keys every combination is tried.
    file : path, optional
        A PNG to draw the results on, side by side.
    region : str, optional
        Rows and columns of the crop, such as ``"0:512,1000:1512"``; by default 512 × 512 pixels with much structure.
    plane : str, optional
        The plane, such as ``"t=0,c=1"``.
    overwrite : bool
        Replace an existing file.
    allow_import : bool
        Allow the job to import code of your own.

    Returns
    -------
    Comparison
        ``best`` is the setting with the smallest estimated error; ``tried`` has ``denoised`` (shape (channels, rows, columns)),
        ``residual`` (in noise levels), its ``statistics``, and ``error`` of each; ``failed`` has why others could not be used. If an image has
        2 to 8 channels and ``plane`` names none, ``channels`` has the comparison of each by its name, ``missing`` why others could not be compared,
        and ``written`` what a job file has for them. ``suggested`` is the best setting, or one of an error that is equal: see ``docs/choosing.md``.

    Raises
    ------
    ConfigError, InputError
        When no setting can be used, an argument is not valid, or the image cannot be read or has no noise.
    MissingPackage
        When a file is to be drawn without Pillow.

    Examples
    --------
    >>> import halotile
    >>> halotile.try_settings("job.yaml", {"denoiser.strength": [0.5, 1, 2]}, "try.png").best.setting  # doctest: +SKIP
    ('denoiser.strength=1',)
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings is a {type(settings).__name__}. Write a mapping, such as {{'denoiser.strength': [0.5, 1, 2]}}."
        )
    values = [f"{key}={comparing.listed(values)}" for key, values in settings.items()]
    request = TryRequest(
        config=Path(job),
        overrides=values,
        file=Path(file) if file else None,
        region=region,
        plane=plane,
        overwrite=overwrite,
        allow_import=allow_import,
        is_call=True,
    )
    return comparing.try_settings(request)


def verify(
    output: str | Path, *, repair: bool = False, allow_import: bool = False, observer: Observer | None = None
) -> Verdict:
    """Check every stored block of an output against its checksums.

    Parameters
    ----------
    output : path
        A Zarr that a run wrote.
    repair : bool
        Redo the damaged blocks, and those that are not done.
    allow_import : bool
        Allow the repair to import code of your own, where the job does.
    observer : callable, optional
        Called with the progress of a repair.

    Returns
    -------
    Verdict
        ``sound`` is True where every block that was done is as it was written; ``problems`` has a line for
        each other one. Where ``repairable`` is False there is no run directory: then only checksums are
        checked, not whether each shard is in its place.

    Raises
    ------
    OutputRefused
        When there is no such output, or it cannot be repaired.

    Examples
    --------
    >>> import halotile
    >>> halotile.verify("clean.zarr").sound  # doctest: +SKIP
    True
    """
    from halotile.graphs.runs.verify import verify as check

    place = output_of(output)
    job = saved_job_of(place, allow_import=allow_import) if repair else None
    return check(place, job=job, repair=repair, observer=observer)


def status(path: str | Path) -> RunStatus:
    """Return the status of a run, from its directory alone.

    Parameters
    ----------
    path : path
        A run directory, or the output that it belongs to.

    Returns
    -------
    RunStatus
        ``state`` (``running``, ``finished``, ``stopped``, ``failed``, ``interrupted`` ...), ``reason``,
        ``progress``, ``bad_blocks``.

    Raises
    ------
    ConfigError
        When there has been no run.

    Examples
    --------
    >>> import halotile
    >>> halotile.status("clean.zarr").progress.done  # doctest: +SKIP
    400
    """
    return read_status(find_run(path))
