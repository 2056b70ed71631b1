"""The files that tell a Zarr from any other directory."""

from __future__ import annotations

METADATA = "zarr.json"

MARKS = (METADATA, ".zgroup", ".zarray")
"""What a Zarr has at its top: one of these."""
