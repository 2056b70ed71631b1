"""Results in a browser: images by a server on loopback, with the state of neuroglancer, whose client comes with its wheel; and reports."""

from __future__ import annotations

import json
import math
import mimetypes
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import numpy as np

from halotile.cli.status import find_run
from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Job, jobs_of
from halotile.registry import optional
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.object_path import OutputPath, full_path
from halotile.storage.run_directory.directory import PAGE, RunDirectory

if TYPE_CHECKING:
    from halotile.storage.images.planes import ServedImage

HOME, OPEN = "127.0.0.1", "open"
SAMPLED = 1024  # longest edge of the level by which the contrast is chosen
RESIDUAL = "residual"
# Seconds between signs of life, and without a request until a connection ends; chunks that are computed at once.
ALIVE_SECONDS, IDLE_SECONDS, AT_ONCE = 10.0, 60.0, 2
RGB = ("FF0000", "00FF00", "0000FF", "000000")
BACKGROUND = "#203040"
"""Colour of holes, and around the image."""
GREY = """#uicontrol invlerp shown(range=[{low:.17g}, {high:.17g}])
void main() {{
  float value = float(toRaw(getDataValue()));
  if ({hole}) emitTransparent(); else emitGrayscale(shown());
}}"""
COLOUR = """{controls}
void main() {{
  vec3 mixed = vec3({middle});
  {sums}
  if ({hole}) emitTransparent(); else emitRGB(mixed);
}}"""


Contrast = Sequence[tuple[float, float]]  # the values that are black and white, of each channel


@dataclass(frozen=True)
class Panel:
    """One panel of the view."""

    name: str
    image: ServedImage
    shader: str


class ImageServer:
    """Serves the panels at an address that nobody can guess, to this machine alone, until it is closed.

    It answers to GET, reads the images that were named and the client's own files, and nothing else.
    """

    def __init__(self, panels: Sequence[Panel]) -> None:
        self._over = threading.Event()
        self.token = secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer((HOME, 0), _handler(self.token, client_files(), panels, self._over))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="images", daemon=True).start()

    @property
    def address(self) -> str:
        """Address of the view."""
        return f"http://{HOME}:{self.port}/{OPEN}/{self.token}"

    def wait_for_ctrl_c(self) -> None:
        """Wait until it is closed, or Ctrl-C."""
        while not self._over.wait(ALIVE_SECONDS):
            pass

    def close(self) -> None:
        """Stop the server; pages that are open get nothing more."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.address}" width="100%" height="600"></iframe>'


def _handler(
    token: str, files: Mapping[str, Path], panels: Sequence[Panel], over: threading.Event
) -> type[BaseHTTPRequestHandler]:
    """Return the answers to requests: a page of another site has another host, and does not know the token."""
    at_once = threading.Semaphore(AT_ONCE)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            kind, given, name = [*self.path.partition("?")[0].split("/", 3)[1:], "", "", ""][:3]
            host = self.headers.get("Host", "").partition(":")[0]
            if over.is_set():
                self._answer(503, b"")
            elif host not in (HOME, "localhost") or not secrets.compare_digest(given.encode(), token.encode()):
                self._answer(403, b"")
            elif kind == OPEN:  # by the name and the port that a tunnel has on the other side
                root = f"http://{self.headers['Host']}/v/{token}"
                self._answer(302, b"", location=f"/v/{token}/#!{quote(json.dumps(state(panels, root)))}")
            elif kind == "events":
                self._wait()
            else:
                self._answer_file(name or "index.html")

        def _wait(self) -> None:
            """Keep the client from saying that it has lost its server, until it has."""
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with suppress(OSError):  # the page was closed
                while not over.wait(ALIVE_SECONDS):
                    self.wfile.write(b":\n\n")

        def _answer_file(self, name: str) -> None:
            try:
                content = self._content(name)
            except Exception as error:  # a chunk that cannot be read stays empty, and the viewer goes on
                self._answer(500, str(error).encode())
            else:
                kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
                self._answer(404 if content is None else 200, content or b"", kind)

        def _content(self, name: str) -> bytes | None:
            number, slash, rest = name.partition("/")
            if slash and number.isdecimal() and int(number) < len(panels):
                with at_once:
                    return panels[int(number)].image.file(rest)
            return files[name].read_bytes() if name in files else None

        def _answer(self, code: int, content: bytes, kind: str = "text/plain", location: str = "") -> None:
            self.close_connection = over.is_set()
            with suppress(OSError):  # the viewer asks for no more of what has left the screen
                self.send_response(code)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


def client_files() -> dict[str, Path]:
    """Return the files of the viewer by name."""
    viewer = optional("images are shown with neuroglancer", "neuroglancer", '"halotile[view]"')
    return {path.name: path for path in (Path(viewer.__file__).parent / "static" / "client").iterdir()}


def panels_of(paths: Sequence[str], against: str | None, dataset: str | None = None) -> list[Panel]:
    """Open the images: before the first the one that it is compared with, and behind all the difference of both."""
    from halotile.storage.images.planes import ServedImage

    client_files()
    if not paths:
        raise ConfigError("no image is named. Write the path of one or more.")
    named = [*([against] if against else []), *paths]
    shown, pair = [ServedImage.open(path, dataset) for path in named], 2 if against else 1
    residual = shown[0].minus(shown[1]) if against else None
    if residual and not residual.levels:
        sizes = [" × ".join(map(str, image.shape(0))) for image in shown]
        raise ConfigError(
            f"--against {against}: it has {sizes[0]} pixels, and {paths[0]} has {sizes[1]}. Name the image that it was computed from."
        )
    shown = _with_common_sizes(shown, pair)
    common = _windows(shown[:pair])
    panels = []
    for number, (path, image) in enumerate(zip(named, shown, strict=True)):
        window = common if number < pair and image.together == len(common) else _windows([image])
        window = common if _are_alike(window, common) else window
        panels.append(Panel(path.rstrip("/").rpartition("/")[2], image, _shader(image, window)))
    if residual:
        residual = replace(residual, sizes=shown[0].sizes, is_colour=shown[1].is_colour)
        ends = [max(map(abs, window)) or 1.0 for window in _percentiles([residual])]
        panels.append(Panel(RESIDUAL, residual, _shader(residual, [(-end, end) for end in ends], middle=0.5)))
    if len({panel.name for panel in panels}) < len(panels):
        panels = [replace(panel, name=f"{n} {panel.name}") for n, panel in enumerate(panels, 1)]
    return panels


def _with_common_sizes(images: Sequence[ServedImage], pair: int) -> list[ServedImage]:
    """Return the images with pixel sizes that align them: both of a pair have those that one of them knows; else none has any."""
    known = max((image.sizes for image in images[:pair]), key=lambda sizes: sum(size != 1 for size in sizes))
    sized = [replace(image, sizes=known) if n < pair else image for n, image in enumerate(images)]
    if len({tuple(size != 1 for size in image.sizes[-2:]) for image in sized}) == 1:
        return sized
    return [replace(image, sizes=(1.0,) * len(image.sizes)) for image in sized]


def _windows(images: Sequence[ServedImage]) -> Contrast:
    """Return the same values for all images: those of the first file, or percentiles of a coarse level."""
    from halotile.storage.images.planes import known_channels

    given: list[Any] = [channel.get("window") for channel in known_channels(images[0].source)]
    if len(given) == images[0].together and all(given):
        return [(each["start"], each["end"]) if isinstance(each, Mapping) else each for each in given]
    return _percentiles(images)


def _percentiles(images: Sequence[ServedImage]) -> Contrast:
    from halotile.storage.images.png import contrast

    means = [image.sample(SAMPLED)[:3] if image.is_colour else image.sample(SAMPLED) for image in images]
    if images[0].is_colour:
        return [contrast(means)] * images[0].together
    return [contrast([*of_channel]) for of_channel in zip(*means, strict=False)]


def _are_alike(one: Contrast, other: Contrast) -> bool:
    """Return True where values for black and white are near each other in all channels: an image and its standard deviation have others."""
    widths = [(b - a) / (d - c) if d > c else 0.0 for (a, b), (c, d) in zip(one, other, strict=False)]
    overlap = all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=False))
    return len(one) == len(other) and overlap and all(0.5 <= width <= 2 for width in widths)


def _shader(image: ServedImage, windows: Contrast, middle: float = 0.0) -> str:
    """Return the program that draws a pixel; ``middle``: brightness of the middle of each window."""
    from halotile.storage.images.planes import HOLE, choose_planes
    from halotile.storage.sharded.ome_metadata import shown_colours

    hole = f"value < {HOLE / 2:.1e}" if image.dtype.kind == "f" else "false"
    windows = [_possible(window, image.dtype) for window in windows]
    if image.together == 1:
        (low, high), *_ = windows
        return GREY.format(low=low, high=high, hole=hole)
    colours: Sequence[str] = RGB[: image.together]
    if not image.is_colour:
        colours = choose_planes(image.source, {}, None).blended().blend or shown_colours(({},) * image.together)
    controls = "\n".join(
        f"#uicontrol invlerp channel{n}(range=[{low:.17g}, {high:.17g}], channel={n})"
        for n, (low, high) in enumerate(windows)
    )
    mixed = np.array([[*bytes.fromhex(colour)] for colour in colours]) / 255
    if middle:  # in which all of them are grey
        mixed = mixed / np.maximum(mixed.sum(0), 1)
    rgb = [", ".join(f"{part:.3f}" for part in parts) for parts in mixed]
    sums = "\n  ".join(f"mixed += (channel{n}() - float({middle})) * vec3({each});" for n, each in enumerate(rgb))
    hole = " && ".join(f"({hole.replace('value', f'float(toRaw(getDataValue({n})))')})" for n in range(image.together))
    return COLOUR.format(controls=controls, sums=sums, hole=hole, middle=middle)


def _possible(window: tuple[float, float], dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return values for black and white that the viewer accepts: whole ones within the type, and never equal."""
    low, high = window
    if dtype.kind == "f":
        return low, high if high > low else low + 1
    ends = np.iinfo(dtype)
    low = max(int(ends.min), min(math.floor(low), int(ends.max) - 1))
    return low, min(int(ends.max), max(math.ceil(high), low + 1))


def state(panels: Sequence[Panel], root: str) -> dict[str, Any]:
    """Return the state of the client: panels side by side, which move and zoom together, over the whole image."""
    rows, columns = panels[0].image.shape(0)[-2:]
    layers = [
        {
            "type": "image",
            "name": panel.name,
            "source": {"url": f"zarr2://{root}/{n}/", "transform": {"outputDimensions": _dimensions(panel.image)}},
            "shader": panel.shader,
            "opacity": 1,
        }
        for n, panel in enumerate(panels)
    ]
    children = [{"type": "viewer", "layers": [panel.name], "layout": "xy"} for panel in panels]
    dimensions = {name: size for panel in panels for name, size in _dimensions(panel.image).items() if name != "c^"}
    return {
        "dimensions": dict(sorted(dimensions.items(), key=lambda each: "xyzct".find(each[0]))),
        "displayDimensions": ["x", "y"],
        "layers": layers,
        "layout": {"type": "row", "children": children},
        "crossSectionScale": max(rows / 650, columns * len(panels) / 1300),
        "showAxisLines": False,
        "crossSectionBackgroundColor": BACKGROUND,
    }


def _dimensions(image: ServedImage) -> dict[str, tuple[float, str]]:
    """Return the pixel size along each axis; channels that are drawn together have a mark."""
    axes = zip(image.source.axes, image.sizes, strict=True)
    return {
        "c^" if axis == "c" and image.together > 1 else axis: (size, "m" if size != 1 else "") for axis, size in axes
    }


def report_page(place: str | OutputPath) -> Path:
    """Return the report of the run that a path refers to."""
    page = find_run(place) / PAGE
    if not page.is_file():
        raise ConfigError(f"{page} does not exist: it is written when a run ends, unless its dashboard was off.")
    return page


def report_index(job: Job) -> Path:
    """Write an index of the reports of many images into the folder of the first one's run; images without a report are left out."""
    from halotile.graphs.watching.report import INDEX, index_of

    runs = {path: RunDirectory.beside(full_path(one.place)).path for path, one in jobs_of(job).items()}
    pages = {PurePath(path).name: run / PAGE for path, run in runs.items() if (run / PAGE).is_file()}
    if not pages:
        raise ConfigError(
            "no image of this job has a report: it is written when a run ends, unless its dashboard was off."
        )
    index = next(iter(runs.values())).parent / "reports.html"
    if index.exists() and not index.read_bytes().startswith(INDEX.encode()):
        raise ConfigError(f"{index} exists, and is no index of reports. Move it.")
    DISK.write_file(index, [index_of(pages, index.parent).encode()])
    return index
