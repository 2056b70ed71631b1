"""Networks over rows that are cut among ranks: the output and the gradients of the whole image."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from halotile import DistributedContext, torch_group
from halotile.errors import ConfigError, RankFailed
from halotile.tasks.denoisers.common.layers import BlindUNet
from tests.benchmarks.unets import PlainUNet
from tests.cases import thorough
from tests.graphs import unet_on_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


Gaps = dict[str, float]


def check_small(found: list[Gaps], most: float = 1e-9) -> None:
    """Assert that no rank has a gap."""
    for gaps in found:
        named = gaps if isinstance(gaps, dict) else dict(enumerate(gaps))
        assert {name: gap for name, gap in named.items() if gap > most} == {}


@pytest.mark.parametrize("ranks", [1, 2, thorough(3), thorough(4)])
@pytest.mark.parametrize(
    ("rows", "padding_mode", "training"),
    [(40, "zeros", True), (36, "circular", False), thorough(32, "reflect", True), thorough(44, "replicate", False)],
)
def test_a_cut_image_gives_the_numbers_of_the_whole(
    four: DistributedContext, ranks: int, rows: int, padding_mode: str, training: bool
) -> None:
    check_small(four.run_torch(unet_on_ranks.compared, rows, padding_mode, training, ranks=ranks))


PARTS: dict[str, tuple[tuple[Any, ...], int]] = {
    **{
        f"{make.func.__name__}, training: {training}": ((unet_on_ranks.network_gaps, make, 42, 4, training), 3)
        for make in (partial(BlindUNet, 1, 8, 2), partial(PlainUNet, (8, 16, 32)))
        for training in (False, True)
    },  # networks that pad their image and take that off again
    **{f"transposed convolutions, {ranks} ranks": ((unet_on_ranks.transposed,), ranks) for ranks in (1, 2, 3)},
    **{f"computed again, {way}": ((unet_on_ranks.checkpointed_gaps, way), 3) for way in (False, True)},
    "pools": ((unet_on_ranks.pools,), 3),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_networks_may_be_cut(four: DistributedContext, name: str) -> None:
    call, ranks = PARTS[name]
    most = {"Unet": 1e-9, "pools": 0.0}.get("Unet" if "training" in name else name, 1e-12)
    check_small(four.run_torch(*call, ranks=ranks), most)


def test_arguments_may_have_names_and_other_ways_of_mixing_rows_are_refused(four: DistributedContext) -> None:
    for found in four.run_torch(unet_on_ranks.accepted, ranks=2):
        assert found == dict.fromkeys(unet_on_ranks.ACCEPTED, True)
    for found in four.run_torch(unet_on_ranks.refusals, ranks=2):
        assert set(found) == {*unet_on_ranks.REFUSED, "script", "trace"}
        assert all(text.startswith("ConfigError: the network ") for text in found.values()), found
        for name in ("dropout1d", "dropout2d", "feature_dropout"):
            assert f"calls {name} in training" in found[name]
        assert "calls flip," in found["flip(input=)"]
        assert "calls randn," in found["randn"]
        words = "reflects 4 rows at the edge of an image of 8, and the ranks there have too few ([4, 4])"
        assert words in found["as many rows as are reflected"]


def test_a_rank_without_rows_is_refused_on_all_ranks_whatever_layer_comes_first(four: DistributedContext) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="a rank has no rows of an image of 4 rows"):
        four.run_torch(unet_on_ranks.compared, 4, "zeros", False, ranks=2)
    assert time.monotonic() - began < 20
    words = "a rank has no rows of an image of 44 rows here ([4, 0, 32, 8]). Take fewer ranks, or a larger image."
    assert four.run_torch(unet_on_ranks.said_of_parts, [4, 0, 32, 8], ranks=4) == [[words] * 4] * 4
    assert torch_group.aligned_sizes(9, 3, 4) == [4, 4, 1]
    with pytest.raises(ConfigError, match=r"8 rows that is cut at multiples of 4 among 4 ranks\. Take 2 at most"):
        torch_group.aligned_sizes(8, 4, 4)
