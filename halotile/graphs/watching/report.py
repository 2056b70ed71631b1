"""The report of a finished run, on the page that is kept: before and after, figures, the job, and commands to go on with."""

import base64
import json
import math
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds.base import InspectedPlace, Inspection, OutputArray, Row
from halotile.graphs.plans.plan import Plan
from halotile.graphs.watching.progress import Progress, pixel_rows
from halotile.graphs.words import counted, html_table
from halotile.storage.arrays import open_array
from halotile.storage.grid import Region
from halotile.storage.images.planes import ServedImage
from halotile.storage.images.png import contrast, encode_png, grey, side_by_side
from halotile.storage.sharded.layout import Layout

REDUCED, MOST_REDUCED = 400, 4  # edge of a reduced image in pixels, and number of these
LATEST = 256  # edge of a picture of the latest block in pixels
MOST_DECODED = 64 * 2**20  # bytes of a chunk that is decoded for it at most
MOST_SHOWN = 300  # reports with a picture in an index
RESIDUAL_LEVELS = 3.0  # residual in noise levels that is drawn as black or white


def report_of(plan: Plan, inspection: Inspection, progress: Progress, digests: Sequence[str]) -> dict[str, Any]:
    """Return the report as JSON: images, tables, and the job with every size decided; ``digests``: of the blocks of each output."""
    code = plan.identity.get("code", {})
    tables: dict[str, list[Row]] = {
        "Result": [*pixel_rows(progress), *inspection.rows, *(("warning", warning) for warning in inspection.warnings)],
        "Plan": plan.kind.rows(plan.summary() | {"resumed_blocks": 0}),
        "Noise of each plane": plan.figures.get("noise_by_plane", []),
        "Commands": _commands(plan),
        "Digests": [
            ("job and input", plan.fingerprint),
            *(
                ("output", f"{digest}, {output.path.name}")
                for digest, output in zip(digests, plan.outputs, strict=False)
            ),
        ],
        "Versions": [
            *((name, str(version)) for name, version in code.items()),
            ("machine", f"{platform.platform()}, {cores_here()} cores"),
        ],
    }
    shown = {title: [row for row in rows if row[1]] for title, rows in tables.items()}
    places = [{"title": place.title, "images": [*_images(*place[1:])]} for place in inspection.places]
    if not places and (reduced := [*_reduced(plan)]):
        places = [{"title": "Result, in a reduced size", "images": reduced}]
    return {
        "places": places,
        "tables": [[title, rows] for title, rows in shown.items() if rows],
        "job": json.dumps(plan.documents.resolved, indent=2),
    }


def _images(before: NDArray[Any], after: NDArray[Any], residual: NDArray[Any]) -> Iterator[list[str]]:
    """Yield the name of each image, and its PNG in base64."""
    low, high = contrast([before, after])
    yield ["before", _encoded(grey(before, low, high))]
    yield ["after", _encoded(grey(after, low, high))]
    yield ["residual", _encoded(grey(residual, -RESIDUAL_LEVELS, RESIDUAL_LEVELS, hole=128))]


def _reduced(plan: Plan) -> Iterator[list[str]]:
    """Yield the name and the PNG of each image that was written, such as a mean and its standard deviation; of many the first ones."""
    for output in plan.outputs[:MOST_REDUCED]:
        if isinstance(output, OutputArray) and len(output.layout.shape) > 1:
            image = ServedImage.open(str(output.path)).sample(REDUCED)
            drawn = grey(image, *contrast([image]))
            yield [output.layout.attributes.get("long_name") or output.path.name, _encoded(drawn)]


def can_be_drawn(plan: Plan) -> bool:
    """Return True where a region of the input is that of the output, and little is decoded for it in the driver."""
    source, layout = next(iter(plan.sources), None), plan.outputs[0].layout
    if source is None or not isinstance(layout, Layout) or source.shape != layout.shape:
        return False
    decoded = 0 if source.mapped else math.prod(source.chunks) * source.dtype.itemsize
    return max(decoded, math.prod(layout.chunk) * np.dtype(layout.dtype).itemsize) <= MOST_DECODED


def before_and_after(plan: Plan, block: Region) -> str:
    """Return the middle of a block of the first output, before and after, as a PNG in base64."""
    layout = plan.layout
    names = layout.axes or ()
    rows, columns = (names.index("y"), names.index("x")) if {"y", "x"} <= {*names} else (-2, -1)
    middle = [(start + stop) // 2 for start, stop in zip(block.start, block.stop, strict=True)]
    spans = [(place, place + 1) for place in middle]
    for axis in (rows, columns):
        start, stop = block.start[axis], block.stop[axis]
        first = max(start, middle[axis] - LATEST // 2)
        spans[axis] = first, min(stop, first + LATEST)
    region = Region(*zip(*spans, strict=True))
    sources = plan.sources[0], open_array(str(plan.output))
    planes = []
    for source in sources:
        image = np.moveaxis(source.read(region), (rows, columns), (-2, -1)).astype(np.float64)
        planes.append(np.where(image == getattr(source, "nodata", None), np.nan, image).reshape(1, *image.shape[-2:]))
    limits = contrast(planes)
    return _encoded(side_by_side([grey(plane, *limits) for plane in planes]))


def _encoded(drawn: NDArray[np.uint8]) -> str:
    return base64.b64encode(b"".join(encode_png(drawn))).decode()


def as_html(rows: Sequence[Row], places: Sequence[InspectedPlace] = ()) -> str:
    """Return a table for a notebook, under images before and after."""
    shown = "".join(
        f'<figure style="display: inline-block"><img src="data:image/png;base64,{png}"><figcaption>{name}, {escape(place.title)}</figcaption></figure>'
        for place in places
        for name, png in _images(*place[1:])
    )
    return shown + html_table(rows)


INDEX = "<!doctype html><!-- reports of halotile -->"  # beginning of an index


def index_of(pages: Mapping[str, Path], folder: Path) -> str:
    """Return a page for ``folder`` that links the reports of several runs, each under a picture of its result; ``pages``: by names."""
    shown: list[str] = []
    for name, page in pages.items():
        image = ""
        if len(shown) < MOST_SHOWN:
            with suppress(
                ValueError, KeyError, IndexError, TypeError
            ):  # a page without a report, or of another version
                _, _, found = page.read_text("utf-8").partition("\nconst found = ")
                images = dict(json.JSONDecoder().raw_decode(found)[0]["places"][0]["images"])
                png = escape(str(images.get("after") or next(iter(images.values()))))
                image = f'<img alt="" src="data:image/png;base64,{png}">'
        link = quote(os.path.relpath(page, folder))
        shown.append(f'<a href="{escape(link)}">{image}<br>{escape(name)}</a>')
    style = (
        ":root { color-scheme: light dark } body { font-family: sans-serif; display: flex; flex-wrap: wrap; gap: 16px; margin: 24px } "
        "a { width: 260px; overflow-wrap: anywhere; color: inherit } img { width: 100%; border-radius: 4px }"
    )
    head = f'<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{counted(len(pages), "report")}</title>'
    return f"{INDEX}{head}<style>{style}</style>{''.join(shown)}</html>\n"


def _commands(plan: Plan) -> list[Row]:
    output, directory = (shlex.quote(str(path)) for path in (plan.output, plan.run_directory))
    rows = [("repeat", f"recon-cli run {directory}/config.json --fresh"), ("resume", f"recon-cli resume {directory}")]
    if not isinstance(plan.outputs[0].layout, Layout):
        return rows
    given, source, against = getattr(plan.job, "input", None), next(iter(plan.sources), None), ""
    if source and given and source.shape == plan.layout.shape and not (given.dataset or given.level or given.channels):
        against = f" --against {shlex.quote(source.path)}"
    return [("view", f"recon-cli view {output}{against}"), ("verify", f"recon-cli verify {output}"), *rows]
