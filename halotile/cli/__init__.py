"""Who asks: the command line, its configuration, its words. The only room that knows typer and pydantic."""

from __future__ import annotations

import sys

from halotile.errors import WINDOWS

# Here, before a module is imported that Windows lacks.
if sys.platform == "win32":
    print(f"error: {WINDOWS}", file=sys.stderr)
    raise SystemExit(2)
