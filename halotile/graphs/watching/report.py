"""The report of a finished run, which its kept page shows: before and after, figures, the job, and commands to go on with."""

from __future__ import annotations

import base64
import json
import platform
import shlex
from typing import Any

from numpy.typing import NDArray

from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds.base import Inspection, Row
from halotile.graphs.plans.plan import Plan
from halotile.storage.images.png import contrast, encode_png
from halotile.storage.images.sheet import grey

RESIDUAL_LEVELS = 3.0
"""Residual in noise levels that is drawn as black or white."""


def report_of(plan: Plan, inspection: Inspection) -> dict[str, Any]:
    """Return the report as JSON: images, tables, and the job as it was decided."""
    code = plan.identity.get("code", {})
    tables: dict[str, list[Row]] = {
        "Result": [*inspection.rows, *(("warning", warning) for warning in inspection.warnings)],
        "Plan": plan.kind.rows(plan.summary() | {"resumed_blocks": 0}),
        "Commands": _commands(plan),
        "Versions": [
            *((name, str(version)) for name, version in code.items()),
            ("machine", f"{platform.platform()}, {cores_here()} cores"),
        ],
    }
    shown = {title: [row for row in rows if row[1]] for title, rows in tables.items()}
    places = [
        {"title": place.title, "images": [*_pictures(place.before, place.after, place.residual)]}
        for place in inspection.places
    ]
    return {
        "places": places,
        "tables": [[title, rows] for title, rows in shown.items() if rows],
        "job": json.dumps(plan.documents.resolved, indent=2),
    }


def _pictures(before: NDArray[Any], after: NDArray[Any], residual: NDArray[Any]) -> list[list[str]]:
    low, high = contrast([before, after])
    drawn = [
        ("before", before, low, high),
        ("after", after, low, high),
        ("residual", residual, -RESIDUAL_LEVELS, RESIDUAL_LEVELS),
    ]
    return [
        [name, base64.b64encode(b"".join(encode_png(grey(image, black, white)))).decode()]
        for name, image, black, white in drawn
    ]


def _commands(plan: Plan) -> list[Row]:
    output, directory = (shlex.quote(str(path)) for path in (plan.output, plan.run_directory))
    source = next((source.path for source in plan.sources), None)
    against = f" --against {shlex.quote(source)}" if source and "input" in plan.summary() else ""
    return [
        ("view", f"recon-cli view {output}{against}"),
        ("verify", f"recon-cli verify {output}"),
        ("repeat", f"recon-cli run {directory}/config.json --fresh"),
        ("resume", f"recon-cli resume {directory}"),
    ]
