"""The pages for users of deepinv.distributed, of physicsnemo.distributed and CDTools map every public name, and halotile's take every keyword."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import halotile

DOCS = Path(__file__).parents[2] / "docs"
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", (DOCS / "distribute.md").read_text()))))
PAGE = (DOCS / "torch.md").read_text()
# Those of version 2.2: functions, classes and their methods.
NAMES = """
AllGatherVAutograd DistributedIRFFT2 DistributedManager DistributedRFFT2 GatherVAutograd IndexedAllToAllVAutograd
PhysicsNeMoUndefinedGroupError PhysicsNeMoUninitializedDistributedManagerWarning ProcessGroupConfig ProcessGroupNode
ScatterVAutograd add_node all_gather_v all_gather_v_bwd_wrapper all_gather_v_wrapper broadcast_buffers cleanup
compute_split_shapes conj_pad_helper_2d copy_to_parallel_region create_group_from_node create_groups_from_config
create_orthogonal_process_group create_process_subgroup cuda device distributed distributed_transpose
find_unused_parameters fused_all_reduce gather_from_parallel_region gather_v gather_v_wrapper get_available_backend
get_memory_format get_mesh_group get_node global_mesh group group_name group_names group_rank group_size
indexed_all_to_all_v indexed_all_to_all_v_wrapper indexed_all_to_all_v_wrapper_bwd initialize initialize_env
initialize_mesh initialize_open_mpi initialize_slurm is_initialized leaf_groups local_rank mark_module_as_shared mesh
mesh_dims mesh_names mesh_sizes pad_helper rank reduce_from_parallel_region reduce_loss scatter_to_parallel_region
scatter_v scatter_v_wrapper set_leaf_group_sizes setup split_tensor_along_dim truncate_helper unmark_module_as_shared
update_parent_sizes world_size
"""


@pytest.fixture
def peer() -> Any:
    """Return deepinv.distributed, where it is installed."""
    return pytest.importorskip("deepinv.distributed")


def modules(peer: Any) -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(peer.__path__, f"{peer.__name__}."):
        yield importlib.import_module(module.name)


def public_names(peer: Any) -> set[str]:
    """Functions, classes and their methods."""
    names: set[str] = set()
    for module in modules(peer):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
                continue
            names.add(name)
            if inspect.isclass(value):
                names |= {method for method, member in vars(value).items() if callable(member)}
    return {name for name in names - {"backward", "Index"} if not name.startswith("_")}


def attributes(peer: Any) -> set[str]:
    """Return the attributes of a context that is not open."""
    return {name for name in vars(peer.DistributedContext()) if not name.startswith("_")}


def keywords(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def test_every_public_name_is_on_the_page(peer: Any) -> None:
    names = public_names(peer)
    assert {"distribute", "TilingStrategy", "map_reduce_gather", "A_vjp", "all_gather"} <= names
    assert sorted(names - NAMED) == []


def test_every_keyword_and_attribute_of_the_two_names_is_on_the_page(peer: Any) -> None:
    names = keywords(peer.distribute) | keywords(peer.DistributedContext) | attributes(peer)
    assert sorted(names - NAMED) == []


def test_the_two_names_take_every_keyword(peer: Any) -> None:
    from halotile.graphs.distributed.distribute import IGNORED_KEYWORDS

    assert keywords(peer.DistributedContext) <= keywords(halotile.DistributedContext)
    assert keywords(peer.distribute) <= keywords(halotile.distribute) | set(IGNORED_KEYWORDS)


def test_a_context_has_every_attribute_and_method(peer: Any) -> None:
    ours = halotile.DistributedContext(device_mode="cpu")
    methods = {name for name, value in vars(peer.DistributedContext).items() if callable(value)}
    expected = attributes(peer) | {name for name in methods if not name.startswith("_")}
    assert [name for name in sorted(expected) if not hasattr(ours, name)] == []


def test_new_keywords_are_on_the_page() -> None:
    ours = keywords(halotile.distribute) | keywords(halotile.DistributedContext)
    assert sorted(ours - NAMED) == []


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_public_name_is_in_the_first_column() -> None:
    cells = " ".join(first for first, *_ in rows("Coming from PhysicsNeMo"))
    shown = re.findall(r"\*?\w+", " ".join(re.findall(r"`([^`\n]+)`", cells)))
    assert sorted(name for name in NAMES.split() if not any(fnmatch(name, word) for word in shown)) == []


@pytest.mark.parametrize("title", ["Coming from PhysicsNeMo", "Coming from CDTools"])
def test_what_is_left_out_has_a_reason(title: str) -> None:
    table = rows(title)
    assert len(table) > 5
    left_out = [row for row in table if "–" in row[0] + row[1]]
    assert left_out
    assert [row for row in left_out if len(row) == 3 and not row[2]] == []
    assert [row for row in left_out if len(row) == 2 and not re.search(r"– : \w", row[1])] == []


def test_no_name_of_the_installed_version_is_missing_above() -> None:
    found = importlib.util.find_spec("physicsnemo")
    if found is None or found.origin is None:
        pytest.skip("physicsnemo is not installed")
    names: set[str] = set()
    for path in Path(found.origin).with_name("distributed").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                members = node.body if isinstance(node, ast.ClassDef) else []
                names |= {node.name, *(each.name for each in members if isinstance(each, ast.FunctionDef))}
    names -= {"forward", "backward"}
    assert sorted(name for name in names if not name.startswith("_")) == sorted(NAMES.split())
