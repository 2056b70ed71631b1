"""A real browser, for the tests marked so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1120,1100")
needs_browser = pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="chromium or chromedriver is not installed")


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """Headless Chromium, which records errors of its pages."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield opened
    finally:
        opened.quit()
