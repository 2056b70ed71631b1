"""The command line: its configuration, commands and output. The only package that imports typer and rich."""

import sys

from halotile.errors import WINDOWS

# Here, before any module that Windows lacks is imported.
if sys.platform == "win32":
    print(f"error: {WINDOWS}", file=sys.stderr)
    raise SystemExit(2)
