"""An image of the page that shows a run: a real job on a real image, seen in a real browser when it is half done.

::

    python examples/dashboard.py --out demo --image docs/images/dashboard.png

Needs Chromium with its driver, and selenium. The job is ``examples/dashboard.yaml``; its denoiser takes longer where there is more to
see, and fails at some blocks, one of them for good, so that there is something to show.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]

CONFIG = Path(__file__).with_name("dashboard.yaml")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
SIZE = 3072
OFTEN, NEVER = 29, 401
"""One block in so many fails at first, and for good."""


def patient(pixels: Image, folder: str) -> Image:
    """Total variation, until nothing changes any more."""
    from skimage.restoration import denoise_tv_chambolle

    number = zlib.crc32(np.ascontiguousarray(pixels).tobytes())
    tried = Path(__file__).parent / folder / str(number)
    if pixels.shape[-1] >= 128 and tried.parent.is_dir():
        tries = int(tried.read_text()) if tried.exists() else 0
        if number % NEVER == 0 or (number % OFTEN == 0 and tries < 2):
            tried.write_text(str(tries + 1))
            raise ArithmeticError(f"a stumble, the {tries + 1}. time")
    return np.asarray(denoise_tv_chambolle(pixels, weight=0.1, eps=2e-5, max_num_iter=600), np.float32)


@contextmanager
def running() -> Iterator[str]:
    """The job, and the address of its page."""
    command = [sys.executable, "-m", "halotile", "run", str(CONFIG), "--allow-import", "--fresh"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        addresses = (re.search(r"dashboard: (\S+)", line) for line in job.stdout)
        yield next(found[1] for found in addresses if found)
        job.communicate()


def photograph(address: str, image: Path, *, width: int, height: int, share: float) -> None:
    """Save what a browser shows once so much is done, and a block is being tried again."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    for argument in (*ARGUMENTS, f"--window-size={width},{height}"):
        options.add_argument(argument)
    browser: Any = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get(address)
        ready = f"return Boolean(last && last.blocks && last.progress.done > {share} * last.progress.total && last.blocks.retried)"
        WebDriverWait(browser, 600, poll_frequency=0.1).until(lambda _: browser.execute_script(ready))
        time.sleep(0.7)  # until the bar has come to rest
        image.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(image))
    finally:
        browser.quit()


def main() -> None:
    """Make the input, run the job, look at it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/dashboard.png"))
    given = parser.parse_args()
    from retina import Retina

    Retina(SIZE, sigma=0.01).write(given.out)
    shutil.rmtree(given.out / "stumbles", ignore_errors=True)
    (given.out / "stumbles").mkdir()
    with running() as address:
        photograph(address, given.image, width=1120, height=1490, share=0.55)
    print(given.image)


if __name__ == "__main__":
    main()
