"""Images in a browser: a server on loopback, and the state of neuroglancer, whose client comes with its wheel."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from halotile.errors import ConfigError, HalotileError
from halotile.registry import optional
from halotile.storage.spacing import converted

if TYPE_CHECKING:
    from halotile.storage.images.served import ServedImage

HOME, OPEN = "127.0.0.1", "open"
SAMPLED = 1024
"""Longest edge of the level by which the contrast is chosen."""
RESIDUAL = "residual"
ALIVE_SECONDS = 10.0
BACKGROUND = "#203040"
"""Colour of holes, and around the image."""
GREY = """#uicontrol invlerp shown(range=[{low:.8g}, {high:.8g}])
void main() {{
  float value = float(toRaw(getDataValue()));
  if ({hole}) emitTransparent(); else emitGrayscale(shown());
}}"""
COLOUR = """{controls}
void main() {{
  vec3 mixed = vec3(0.0);
  {sums}
  if ({hole}) emitTransparent(); else emitRGB(mixed);
}}"""


Contrast = Sequence[tuple[float, float]]
"""The values that are black and white, of each channel."""


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
        client = Path(optional("images are shown with neuroglancer", "neuroglancer", '"halotile[view]"').__file__)
        self.panels = panels
        self._over = threading.Event()
        self.token = secrets.token_urlsafe(24)
        files = {path.name: path for path in (client.parent / "static" / "client").iterdir()}
        self._server = ThreadingHTTPServer((HOME, 0), _handler(self.token, files, panels, self._over))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="images", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address of the view."""
        return f"http://{HOME}:{self.port}/{OPEN}/{self.token}"

    def wait_for_ctrl_c(self) -> None:
        """Wait until it is closed, or Ctrl-C."""
        while not self._over.wait(ALIVE_SECONDS):
            pass

    def close(self) -> None:
        """Serve nothing any more."""
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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind, given, name = [*self.path.partition("?")[0].split("/", 3)[1:], "", "", ""][:3]
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (HOME, "localhost") or not secrets.compare_digest(given.encode(), token.encode()):
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
            except HalotileError as error:
                self._answer(500, str(error).encode())
            else:
                kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
                self._answer(404 if content is None else 200, content or b"", kind)

        def _content(self, name: str) -> bytes | None:
            number, slash, rest = name.partition("/")
            if slash and number.isdecimal() and int(number) < len(panels):
                return panels[int(number)].image.file(rest)
            return files[name].read_bytes() if name in files else None

        def _answer(self, code: int, content: bytes, kind: str = "text/plain", location: str = "") -> None:
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


def panels_of(paths: Sequence[str], against: str | None) -> list[Panel]:
    """Open the images: before the first the one that it is compared with, and behind all the difference of both."""
    from halotile.storage.images.served import ServedImage

    named = [*([against] if against else []), *paths]
    shown, pair = [ServedImage.open(path) for path in named], 2 if against else 1
    common = _windows(shown[:pair])
    panels = []
    for number, (path, image) in enumerate(zip(named, shown, strict=True)):
        window = common if number < pair else _windows([image])
        window = common if _are_alike(window, common) else window
        panels.append(Panel(path.rstrip("/").rpartition("/")[2], image, _shader(image, window)))
    if against:
        residual = shown[0].minus(shown[1])
        if not residual.levels:
            sizes = [" × ".join(map(str, image.shape(0))) for image in shown]
            raise ConfigError(
                f"--against {against}: it has {sizes[0]} pixels, and {paths[0]} has {sizes[1]}. Name an image of that shape."
            )
        ends = [max(map(abs, window)) for window in _windows([residual])]
        panels.append(Panel(RESIDUAL, residual, _shader(residual, [(-end, end) for end in ends])))
    if len({panel.name for panel in panels}) < len(panels):
        panels = [replace(panel, name=f"{n} {panel.name}") for n, panel in enumerate(panels, 1)]
    return panels


def _windows(images: Sequence[ServedImage]) -> Contrast:
    """Return the same values for all images: those of the first file, or percentiles of a coarse level."""
    from halotile.storage.images.planes import choose_planes
    from halotile.storage.images.png import contrast

    planes = choose_planes(images[0].source, {}, None)
    given = planes.blended().contrasts
    if given and all(given):
        return [window for window in given if window]
    means = [image.sample(SAMPLED) for image in images]
    parts = [[each] if planes.colour else [*each] for each in means]
    found = [contrast([*of_channel]) for of_channel in zip(*parts, strict=False)]
    return found * len(means[0]) if planes.colour else found


def _are_alike(one: Contrast, other: Contrast) -> bool:
    """Return True where values for black and white are near each other in all channels: an image and its standard deviation have others."""
    widths = [(b - a) / (d - c) if d > c else 0.0 for (a, b), (c, d) in zip(one, other, strict=False)]
    overlap = all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=False))
    return len(one) == len(other) and overlap and all(0.5 <= width <= 2 for width in widths)


def _shader(image: ServedImage, windows: Contrast) -> str:
    """Return the program that draws a pixel."""
    from halotile.storage.images.planes import choose_planes
    from halotile.storage.images.served import HOLE

    hole = "false"
    if image.dtype.kind == "f":
        hole = f"value < {HOLE / 2:.1e}"
    else:
        windows = [(math.floor(low), math.ceil(high)) for low, high in windows]
    if image.together == 1:
        (low, high), *_ = windows
        return GREY.format(low=low, high=high, hole=hole)
    planes = choose_planes(image.source, {}, None)
    colours = ("FF0000", "00FF00", "0000FF", "000000")[: image.together] if planes.colour else planes.blended().blend
    controls = "\n".join(
        f"#uicontrol invlerp channel{n}(range=[{low:.8g}, {high:.8g}], channel={n})"
        for n, (low, high) in enumerate(windows)
    )
    rgb = [", ".join(f"{part / 255:.3f}" for part in bytes.fromhex(colour)) for colour in colours]
    sums = "\n  ".join(f"mixed += channel{n}() * vec3({each});" for n, each in enumerate(rgb))
    hole = " && ".join(f"({hole.replace('value', f'float(toRaw(getDataValue({n})))')})" for n in range(image.together))
    return COLOUR.format(controls=controls, sums=sums, hole=hole)


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
    """Return the pixel size along each axis in metres, or 1 where it is unknown; channels that are drawn together have a mark."""
    source, found = image.source, {}
    for axis, size, unit in zip(source.axes, source.scale, source.units, strict=True):
        length = converted(size, unit, "meter") if axis in "zyx" else None
        name = "c^" if axis == "c" and image.together > 1 else axis
        found[name] = (length, "m") if length else (1.0, "")
    return found
