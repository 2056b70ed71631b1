"""Networks over rows that are cut among ranks: the output and the gradients of the whole image."""

from __future__ import annotations

import time
from collections.abc import Callable
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


@pytest.mark.parametrize("ranks", [1, 2, thorough(3), thorough(4)])
@pytest.mark.parametrize(
    ("rows", "padding_mode", "training"),
    [(40, "zeros", True), (36, "circular", False), thorough(32, "reflect", True), thorough(44, "replicate", False)],
)
def test_a_cut_image_gives_the_numbers_of_the_whole(
    four: DistributedContext, ranks: int, rows: int, padding_mode: str, training: bool
) -> None:
    for gaps in four.run_torch(unet_on_ranks.compared, rows, padding_mode, training, ranks=ranks):
        assert {name: gap for name, gap in gaps.items() if gap > 1e-9} == {}


@pytest.mark.parametrize("make", [partial(BlindUNet, 1, 8, 2), partial(PlainUNet, (8, 16, 32))])
@pytest.mark.parametrize("training", [False, True])
def test_networks_that_pad_their_image_and_take_that_off_again_may_be_cut(
    four: DistributedContext, make: Callable[[], Any], training: bool
) -> None:
    for gaps in four.run_torch(unet_on_ranks.network_gaps, make, 42, 4, training, ranks=3):
        assert {name: gap for name, gap in gaps.items() if gap > 1e-9} == {}


def test_what_mixes_rows_in_another_way_is_refused(four: DistributedContext) -> None:
    for found in four.run_torch(unet_on_ranks.refusals, ranks=2):
        assert set(found) == {*unet_on_ranks.REFUSED, "script", "trace"}
        assert all(text.startswith("ConfigError: the network ") for text in found.values()), found
        for name in ("dropout1d", "dropout2d", "feature_dropout"):
            assert f"calls {name} in training" in found[name]
        assert "calls flip," in found["flip(input=)"]
        assert "calls randn," in found["randn"]
        assert (
            "reflects 4 rows at the edge of an image of 8, and the ranks there have too few ([4, 4])"
            in (found["as many rows as are reflected"])
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_transposed_convolutions_have_their_bias_once(four: DistributedContext, ranks: int) -> None:
    for gaps in four.run_torch(unet_on_ranks.transposed, ranks=ranks):
        assert max(gaps) < 1e-12, dict(enumerate(gaps))


def test_arguments_may_have_names_and_constants_no_image(four: DistributedContext) -> None:
    for found in four.run_torch(unet_on_ranks.accepted, ranks=2):
        assert found == dict.fromkeys(unet_on_ranks.ACCEPTED, True)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_blocks_may_be_computed_again_in_the_backward_pass(four: DistributedContext, is_reentrant: bool) -> None:
    for gaps in four.run_torch(unet_on_ranks.checkpointed_gaps, is_reentrant, ranks=3):
        assert max(gaps) < 1e-12


def test_pools_keep_their_options(four: DistributedContext) -> None:
    assert four.run_torch(unet_on_ranks.pools, ranks=3) == [[0.0] * 3] * 3


def test_an_image_of_too_few_rows_is_refused_on_all_ranks(four: DistributedContext) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="a rank has no rows of an image of 4 rows"):
        four.run_torch(unet_on_ranks.compared, 4, "zeros", False, ranks=2)
    assert time.monotonic() - began < 20


def test_a_rank_without_rows_is_refused_on_all_ranks_whatever_layer_comes_first(four: DistributedContext) -> None:
    words = "a rank has no rows of an image of 44 rows here ([4, 0, 32, 8]). Take fewer ranks, or a larger image."
    assert four.run_torch(unet_on_ranks.said_of_parts, [4, 0, 32, 8], ranks=4) == [[words] * 4] * 4


def test_rows_are_not_cut_so_that_a_rank_has_none() -> None:
    assert torch_group.aligned_sizes(9, 3, 4) == [4, 4, 1]
    with pytest.raises(ConfigError, match=r"8 rows that is cut at multiples of 4 among 4 ranks\. Take 2 at most"):
        torch_group.aligned_sizes(8, 4, 4)
