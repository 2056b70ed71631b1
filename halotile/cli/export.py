"""Export of an image of any size as one TIFF with resolution levels."""

from __future__ import annotations

import math
from dataclasses import replace

from halotile.cli.arguments import ExportRequest
from halotile.cli.preview import opened_planes, progress
from halotile.errors import ConfigError
from halotile.graphs.amounts import bytes_text, counted, shape_text, size_text


def draw_sheet(request: ExportRequest) -> None:
    """Draw a ptychographic scan, or its result, as a PNG."""
    from halotile.cli.screens.scan_views import draw_result, draw_scan
    from halotile.storage.scans.export import read_result
    from halotile.storage.scans.scan import is_scan, open_scan, open_summary

    path = request.path
    request.check_file(request.file, [path])
    if is_scan(path):
        draw_scan(request.file, open_scan(path)[0], *open_summary(path))
    else:
        draw_result(request.file, read_result(path))


def export(request: ExportRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line."""
    from halotile.cli.screens.screen import complain
    from halotile.graphs.plans.inputs import check_whole
    from halotile.storage.formats.base import packing_text
    from halotile.storage.images.planes import known_channels
    from halotile.storage.images.tiff_export import level_shapes, write_tiff
    from halotile.storage.sharded.ome_metadata import is_photo

    if request.file.suffix.lower() not in (".tif", ".tiff"):
        raise ConfigError(
            f"{request.file}: what is written is a TIFF. Write a name that ends in .tif or .tiff."
        )
    request.check_file(request.file, [request.path])
    check_whole(request.path)
    planes = opened_planes(request)
    source = planes.source
    channels = known_channels(source)
    if not request.cog and any(channel.get("label") for channel in channels) and not is_photo(channels):
        planes = replace(planes, colour=False)  # samples of red, green and blue have no names in a TIFF
    if source.dtype.kind == "c":
        raise ConfigError(
            f"{request.file}: the pixels of {request.path} are complex, which few programs read from a TIFF. "
            "`recon-cli preview` shows modulus and phase in a PNG."
        )
    if request.cog and source.georeference is None:
        raise ConfigError(
            f"{request.spelled('cog')}: {request.path} says nothing of its place on Earth, which a Cloud Optimized GeoTIFF has. "
            f"Leave {request.spelled('cog')} out for a TIFF with levels."
        )
    if request.cog and sum(count > 1 for count in planes.counts) > 1:
        raise ConfigError(
            f"{request.spelled('cog')}: {request.path} has planes along {', '.join(planes.loops)}, and a GeoTIFF has one row of bands. "
            f"Write {request.spelled('plane')} {planes.loops[0]}=0, or another of them."
        )
    if packing := packing_text(source.attributes):
        complain(
            f"note: {request.path}: values are packed with {packing}. The TIFF has the stored numbers, and does not name the packing."
        )
    with progress(request.file.name, quiet) as tick:
        nbytes = write_tiff(request.file, planes, cog=request.cog, tick=tick)
    stack = f"{shape_text(planes.counts)} planes of " if math.prod(planes.counts) > 1 else ""
    levels = counted(len(level_shapes(planes.shape)), "level")
    return f"{request.file}: {stack}{size_text(planes.shape)}, {levels}, {bytes_text(nbytes)}"
