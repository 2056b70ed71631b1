"""The job ``denoise`` as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from halotile.graphs.kinds.sections import DenoiserChoice, Input, TiledJob


@dataclass(frozen=True, kw_only=True)
class Denoising(TiledJob):
    """A denoising job."""

    kind: ClassVar[str] = "denoise"

    input: Input
    denoiser: DenoiserChoice | Any
    """A :class:`DenoiserChoice`, or the denoiser itself where a script passes one."""
