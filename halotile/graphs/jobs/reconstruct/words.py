"""A reconstruction job and its plan as text."""

from __future__ import annotations

from collections import Counter

from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.plans.rows import cost_rows, device_text, output_rows, probe_rows, tiles_text
from halotile.graphs.units import shape_text

SHOWN = 8
"""Number of operators that are listed one by one; `--json` has all."""


def title(job: Reconstruction) -> str:
    """Describe a job in a few words."""
    return f"{job.solver.name} with {counted(len(job.operators), 'operator')} to {job.output.path}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return the figures of ``Plan.summary()`` as rows, in the order of the questions they answer."""
    return [
        *_operator_rows(figures),
        ("output", str(figures["output"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}"),
        ("fidelity", str(figures["fidelity"])),
        ("form", str(figures["form"])),
        ("prior", _prior(figures)),
        ("solver", _solver(figures)),
        ("", ""),
        *output_rows(figures),
        *([("tiles", tiles_text(figures))] if "tile" in figures else []),
        ("halo", f"{figures['halo']} pixels, {figures['read_amplification']:.2f} × the image is read"),
        ("iteration", traffic_text(figures)),
        ("", ""),
        *cost_rows(figures),
        *probe_rows(figures),
    ]


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    operators, workers = counted(len(figures["operators"]), "operator"), counted(figures["workers"], "worker")
    form = str(figures["form"]).partition(",")[0]
    per_pass = figures["per_pass"]
    passes = "of" if per_pass == 1 else f"in passes of {per_pass} over"
    return (
        f"{figures['solver']}: {shape_text(figures['shape'])} {figures['dtype']} from {operators} ({form} form), "
        f"prior {prior_text(figures)}; {counted(figures['iterations'], 'iteration')} {passes} "
        f"{counted(figures['blocks'], 'block')}, {workers}"
    )


def _operator_rows(figures: Figures) -> list[Row]:
    pairs = list(zip(figures["operators"], figures["data"], strict=True))
    lines = [f"{name} of {data}" for name, data in pairs[:SHOWN]]
    if unlisted := Counter(name for name, _ in pairs[SHOWN:]):
        lines.append("and " + ", ".join(f"{count:,} × {name}" for name, count in unlisted.items()))
    return [("" if number else "operators", line) for number, line in enumerate(lines)]


def prior_text(figures: Figures) -> str:
    """Describe the prior in a word or two.

    Examples
    --------
    >>> prior_text({"prior": "pnp", "denoiser": "dncnn"}), prior_text({"prior": "tv", "denoiser": None})
    ('pnp with dncnn', 'tv')
    """
    return f"{figures['prior']} with {figures['denoiser']}" if figures["denoiser"] else str(figures["prior"])


def _prior(figures: Figures) -> str:
    """Describe the prior, and the device that computes it."""
    return f"{prior_text(figures)}, {device_text(figures)}" if "tile" in figures else prior_text(figures)


def _solver(figures: Figures) -> str:
    iterations = f"{figures['solver']}, {counted(figures['iterations'], 'iteration')} at most"
    before = figures["passes_before"]
    if not before:
        return iterations
    return (
        f"{iterations}, after {'one pass' if before == 1 else f'at most {before} passes'} that prepare them"
    )


def traffic_text(figures: Figures) -> str:
    """Describe the bytes that an iteration moves, in its number of passes, compared with the other number.

    Examples
    --------
    >>> one = {"passes": 1, "iteration_bytes": 3 * 2**20, "iteration_bytes_fused": 3 * 2**20, "computed_twice": 0.06}
    >>> one["per_pass"] = 1
    >>> traffic_text(one | {"iteration_bytes_unfused": 5 * 2**20})
    '3 MiB read and written in one pass, which computes 6 % of the gradient twice; in two, 5 MiB'
    >>> traffic_text(one | {"iteration_bytes_unfused": None})
    '3 MiB read and written in one pass'
    >>> traffic_text(one | {"iteration_bytes_unfused": None, "per_pass": 2})
    '3 MiB read and written for each of 2 in one pass, which computes 6 % of the gradient twice'
    """
    moved = f"{bytes_text(figures['iteration_bytes'])} read and written"
    twice = f"{figures['computed_twice']:.0%} of the gradient twice".replace("%", " %")
    if figures["per_pass"] > 1:
        return f"{moved} for each of {figures['per_pass']} in one pass, which computes {twice}"
    if figures["iteration_bytes_unfused"] is None:
        return f"{moved} in one pass"
    if figures["passes"] == 1:
        other_bytes = bytes_text(figures["iteration_bytes_unfused"])
        return f"{moved} in one pass, which computes {twice}; in two, {other_bytes}"
    other_bytes = bytes_text(figures["iteration_bytes_fused"])
    return f"{moved} in two passes; in one, {other_bytes}, but {twice}"
