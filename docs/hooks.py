"""MkDocs hook: pages outside docs/, such as README.md and the examples, become pages of the site.

Links in all pages are those of the repository, so that they work there too. Here they are turned into links of the site, where the
folder docs/ is the root.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples")
ROLE = re.compile(r":(?:class|data|func|meth|mod):<code>(~[\w.]*\.)?")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/."""
    for place in OUTSIDE:
        path = ROOT / place
        for found in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if found.is_file() and "__pycache__" not in found.parts:
                name = found.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(found)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site."""
    name = page.file.src_uri
    in_site = posixpath.dirname(name) or "."
    in_repository = posixpath.dirname(name if (ROOT / name).exists() else f"docs/{name}") or "."

    def turned(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, link[1]))
        return posixpath.relpath(target.removeprefix("docs/"), in_site)

    return LINK.sub(turned, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn reStructuredText of docstrings, which mkdocstrings leaves as it is, into HTML: roles, and ``::`` before a literal block."""
    return ROLE.sub("<code>", html).replace("<p>::</p>", "")
