"""A progress bar for scripts at a terminal, and for notebooks, that do not observe their run themselves."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.std import tqdm

from halotile.graphs.watching.progress import Observer, Progress


@contextmanager
def progress_shown(observer: Observer | None) -> Iterator[Observer | None]:
    """Yield the observer; without one a bar, at a terminal or in a notebook."""
    if observer is not None or not (_in_notebook() or sys.stderr.isatty()):
        yield observer
        return
    bar = _bar_class()(dynamic_ncols=True, smoothing=0)
    try:
        yield lambda progress: _show(bar, progress)
    finally:
        bar.close()


def _show(bar: tqdm, progress: Progress) -> None:
    if progress.message:
        bar.write(progress.message, file=sys.stderr)
    bar.total, bar.initial = progress.total, progress.resumed
    bar.unit = f" {progress.counted}s"
    bar.set_description(progress.phase, refresh=False)
    if progress.pixels_done:
        bar.set_postfix_str(f"{progress.megapixels_per_second:.3g} Mpix/s", refresh=False)
    bar.n = progress.done
    bar.refresh()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


def _bar_class() -> type[tqdm]:
    """A bar of widgets in notebooks that have them, of text elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing widgets
        from tqdm.auto import tqdm as kind
    return kind  # type: ignore[no-any-return]
