"""Requests to a dashboard: those under the name in its link, and under the names of loopback, are answered.

Dask's pages are imported for the first that nothing else answers: that takes half a second and 18 MB, and most runs are watched on
halotile's page alone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest, split_host_and_port
from tornado.routing import Matcher, Router, Rule, RuleRouter
from tornado.web import ErrorHandler

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
LEFT_OUT = {"sitemap.json", "exceptions", "individual-exceptions", "hardware"}
"""Dask's list of its pages, which fails on halotile's page; tracebacks, which name folders; and the page that has workers measure their disks."""


def answer_allowed_only(scheduler: Any, link: str | None) -> None:
    """Answer only requests to, and from pages under, the names of loopback and of the link; others get a 404.

    Any web page in the browser may reach a server on loopback: under a name of its own that leads here (DNS rebinding), or by
    a websocket, whose Origin names the page. Some of Dask's pages are left out for everybody.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        The scheduler that serves the dashboard.
    link : str, optional
        The address of the dashboard as it is reported to the user.
    """
    allowed = AllowedHosts((*LOOPBACK_NAMES, urlsplit(link or "").hostname))
    pages = LatePages(scheduler) if link else scheduler.http_application
    scheduler.http_server.request_callback = RuleRouter([Rule(allowed, pages)])


class AllowedHosts(Matcher):
    """Matches requests to and from some hosts.

    Parameters
    ----------
    names : tuple of str
        The hosts.
    """

    def __init__(self, names: tuple[str | None, ...]) -> None:
        self.names = names

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return no arguments for a request that is answered, None for others."""
        origin = request.headers.get("Origin", f"//{request.host}").partition("//")[2]
        hosts = {request.host_name, split_host_and_port(origin.lower())[0]}
        answered = hosts.issubset(self.names) and LEFT_OUT.isdisjoint(request.path.split("/"))
        return {} if answered else None


class LatePages(Router):
    """A scheduler's addresses; Dask's own pages are added at the first request that nothing else answers.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        A scheduler that was started without them.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.are_there = False

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> Any:
        """Return what answers a request."""
        application = self.scheduler.http_application
        handler = application.find_handler(request, **options)
        if self.are_there or (handler and not issubclass(handler.handler_class, ErrorHandler)):
            return handler
        self.are_there = True
        with suppress(ImportError):  # without a fitting bokeh, it has no such pages
            from distributed.dashboard.scheduler import connect

            connect(application, self.scheduler.http_server, self.scheduler)
        return application.find_handler(request, **options)
