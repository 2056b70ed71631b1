"""Tiles of distributed images: cores fill the image once, weights add up to 1, joining undoes cutting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError
from halotile.tasks.distributed.tiling.tiles import BLENDINGS, Tiles, blend_axis, cut_axis, make_tiles

lengths, patches, overlaps = st.integers(1, 60), st.integers(1, 20), st.integers(0, 12)


@given(length=lengths, patch=patches, overlap=overlaps)
def test_cores_fill_an_axis_once_and_windows_are_equally_long(length: int, patch: int, overlap: int) -> None:
    cuts = cut_axis(length, patch, overlap)
    covered = [at for cut in cuts for at in range(*cut.core)]
    assert covered == list(range(length))
    assert len({cut.window[1] - cut.window[0] for cut in cuts}) == 1
    assert all(cut.inner[0] <= cut.core[0] < cut.core[1] <= cut.inner[1] for cut in cuts)


@pytest.mark.parametrize("kind", BLENDINGS)
@given(length=lengths, patch=patches, overlap=overlaps, scale=st.integers(1, 3))
def test_weights_add_up_to_1_everywhere(kind: str, length: int, patch: int, overlap: int, scale: int) -> None:
    cuts = cut_axis(length, patch, overlap)
    total = np.zeros(length * scale)
    for cut, weights in zip(cuts, blend_axis(cuts, length, overlap, kind, scale), strict=True):
        start, stop = max(0, cut.window[0]) * scale, min(length, cut.window[1]) * scale
        assert len(weights) == stop - start
        assert weights.min() >= 0
        total[start:stop] += weights
    np.testing.assert_allclose(total, 1, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9)),
    patch=st.integers(1, 9),
    overlap=st.integers(0, 12),
    blending=st.sampled_from([None, *BLENDINGS]),
)
def test_joining_undoes_cutting(
    shape: tuple[int, ...], patch: int, overlap: int, blending: str | None
) -> None:
    tiles = make_tiles((2, *shape), patch, overlap, (1, 2), blending)
    image = torch.rand(2, *shape, dtype=torch.float64)
    made = [tiles.trim(tiles.window(image, number)) for number in range(len(tiles))]
    torch.testing.assert_close(tiles.join(made), image)


def test_windows_are_mirrored_as_torch_pads() -> None:
    image = torch.rand(1, 1, 12, 10)
    tiles = Tiles((1, 1, 12, 10), (2, 3), (6, 5), (3, 3))
    padded = torch.nn.functional.pad(image, (3, 3, 3, 3), mode="reflect")
    assert torch.equal(tiles.window(image, 0), padded[..., :12, :11])
    assert torch.equal(tiles.window(image, len(tiles) - 1), padded[..., -12:, -11:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((8, 2, (2, 7), None), "tiling_dims is"),
        (((8, 8, 8), 2, (2, 3), None), "patch_size is"),
        ((0, 2, None, None), "patch_size is"),
        ((8, 2, None, "cubic"), "blending is 'cubic'"),
    ],
    ids=str,
)
def test_invalid_tiles_are_refused(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiles((1, 1, 16, 16), *options)  # type: ignore[arg-type]


def test_a_processor_that_changes_the_size_by_a_fraction_is_refused() -> None:
    tiles = make_tiles((1, 1, 16, 16), 8, 2, None, None)
    with pytest.raises(ConfigError, match="do not fit together"):
        tiles.trim(torch.zeros(1, 1, 9, 12))
