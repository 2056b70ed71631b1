"""A local server of S3 that counts what it is asked and can be told to fail, and a watched job that writes there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from halotile.storage.disk.object_path import ObjectPath, store_at
from halotile.storage.run_directory.directory import RunDirectory
from tests.faults import Scene

BUCKET = "scans"
SECRET = "not-to-be-written-anywhere"
DENIED = "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
BUSY = "503 Slow Down", b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


@dataclass
class ObjectServer:
    """The server, with the requests that came, each as method and name of the object."""

    app: Any
    requests: list[tuple[str, str]] = field(default_factory=list)
    trouble: Callable[[str, str], tuple[str, bytes] | None] = lambda *_: None
    """Status and text of the answer to a request that is to fail."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, name = environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        self.requests.append((method, name))
        if fault := self.trouble(method, name):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(fault[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(fault[1])))])
            return [fault[1]]
        return self.app(environ, start_response)


def failing(
    times: int, answer: tuple[str, bytes], method: str, part: str
) -> Callable[[str, str], tuple[str, bytes] | None]:
    """Trouble with so many of the requests for objects whose names contain ``part``."""
    left = [times]

    def trouble(asked: str, name: str) -> tuple[str, bytes] | None:
        if asked != method or part not in name or not left[0]:
            return None
        left[0] -= 1
        return answer

    return trouble


@contextmanager
def serving() -> Iterator[tuple[ObjectServer, str]]:
    """The server with an empty bucket, and its address."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    werkzeug = pytest.importorskip("werkzeug.serving")

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ObjectServer(moto.DomainDispatcherApplication(moto.create_backend_app))
    listening = werkzeug.make_server("127.0.0.1", 0, server, threaded=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_port}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": SECRET}
    boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys).create_bucket(Bucket=BUCKET)
    yield server, address
    listening.shutdown()


@contextmanager
def told_by_environment(address: str) -> Iterator[None]:
    """The environment names the server."""
    values = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}
    values |= {"ALLOW_HTTP": "true", "ENDPOINT_URL": address}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"AWS_{name}", value)
        store_at.cache_clear()
        yield
    store_at.cache_clear()


def put(place: ObjectPath, content: bytes) -> None:
    """Put an object as another program would."""
    import obstore

    obstore.put(place.store, place.key, content)


def delete(place: ObjectPath) -> None:
    """Delete an object."""
    import obstore

    obstore.delete(place.store, place.key)


def contents(place: ObjectPath) -> dict[str, bytes]:
    """Every object below a place."""
    return {name: (place / name).read_bytes() for name in sorted(place.objects())}


@dataclass(frozen=True)
class StoreScene(Scene):
    """A watched job that writes to the store; its place is the working directory, in which its run directory lies."""

    @property
    def output(self) -> ObjectPath:  # type: ignore[override]
        return ObjectPath(f"s3://{BUCKET}/{self.folder.name}/clean.zarr")

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.cwd / f"{self.output.as_name}.run")

    @property
    def cwd(self) -> Path:
        return self.place

    def files(self) -> dict[str, bytes]:
        """Every object of the output."""
        return contents(self.output)
