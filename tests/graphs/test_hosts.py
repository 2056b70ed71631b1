"""A dashboard answers under the names in its link, and to no other web page."""

from __future__ import annotations

from http.client import HTTPConnection
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from distributed.http.routing import RoutingApplication
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.web import RequestHandler

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common.security import LEFT_OUT, LatePages, answer_allowed_only
from halotile.graphs.watching.page import ADDRESS, Watch

WEBSOCKET = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
THEIRS = {"Host": "rebound.example"}, {"Origin": "http://rebound.example"}, {"Origin": "null"}
PAGES = ("/status", f"/{ADDRESS}", f"/{ADDRESS}.json", "/metrics", "/health", "/statics/css/base.css")


def status_of(cluster: RunningCluster, path: str, headers: dict[str, str]) -> int:
    """The status of the dashboard's answer."""
    place = urlsplit(cluster.dashboard or "")
    assert place.hostname
    connection = HTTPConnection(place.hostname, place.port or 80, timeout=30)
    try:
        # ``{port}``: as a browser says it.
        filled = {name: text.format(port=place.port) for name, text in headers.items()}
        connection.request("GET", path, headers=filled)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.cluster
def test_pages_are_for_those_who_were_told_of_them(cluster: RunningCluster) -> None:
    watch = Watch()
    watch.open(cluster)
    for page in PAGES:
        assert status_of(cluster, page, {}) == 200
        assert status_of(cluster, page, {"Host": "localhost:8000"}) == 200, "at the near end of a tunnel"
        assert [status_of(cluster, page, headers) for headers in THEIRS] == [404] * 3
    watch.close()


@pytest.mark.cluster
def test_a_websocket_is_for_pages_of_the_dashboard(cluster: RunningCluster) -> None:
    for origin in ("http://localhost:{port}", "http://127.0.0.1:{port}", "http://[::1]:{port}"):
        assert status_of(cluster, "/status/ws", WEBSOCKET | {"Origin": origin}) == 101
    assert [status_of(cluster, "/status/ws", WEBSOCKET | headers) for headers in THEIRS] == [404] * 3


@pytest.mark.cluster
@pytest.mark.parametrize("page", sorted(LEFT_OUT))
def test_pages_that_name_folders_or_fail_are_left_out(cluster: RunningCluster, page: str) -> None:
    assert status_of(cluster, f"/{page}", {}) == 404
    assert status_of(cluster, f"/{page}/ws", WEBSOCKET) == 404
    assert status_of(cluster, "/json/identity.json", {}) == 404


def test_dasks_pages_are_added_at_the_first_request_that_nothing_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[object] = []
    monkeypatch.setattr("distributed.dashboard.scheduler.connect", lambda *given: added.append(given))
    application = RoutingApplication([("/halotile", RequestHandler)])
    pages = LatePages(SimpleNamespace(http_application=application, http_server=None))

    def ask(path: str) -> None:
        line = RequestStartLine("GET", path, "HTTP/1.1")
        pages.find_handler(HTTPServerRequest(headers=HTTPHeaders(Host="here"), connection=Mock(), start_line=line))

    ask("/halotile")
    assert not added
    ask("/status")
    ask("/status")
    assert len(added) == 1


def test_what_dasks_configuration_links_to_was_told_too() -> None:
    """A dashboard behind the proxy of a notebook hub."""
    here = SimpleNamespace(http_server=SimpleNamespace(), http_application=lambda request: None)
    answer_allowed_only(here, "https://Hub.example/user/ada/proxy/40001/status")
    (rule,) = here.http_server.request_callback.rules

    def answered(host: str, origin: str) -> bool:
        headers = {"Host": host, "Origin": origin}
        request = SimpleNamespace(host=host, host_name=host.lower(), headers=headers, path="/status")
        return rule.matcher.match(request) is not None

    assert answered("hub.example", "https://hub.example")
    assert answered("127.0.0.1", "https://HUB.example:443")
    assert not answered("hub.example.rebound.example", "https://hub.example")
    assert not answered("hub.example", "https://hub.example.rebound.example")
    assert not answered("hub.example", "https://rebound.example/hub.example")
