"""Power cuts at every moment of a job of 3×3 blocks; anything that was not fsynced may be lost.

A disk records its system calls. For every cut between two of them, several subsets of the calls that no fsync made
durable survive: none, all, each alone, all but one, one of them partly. The job resumes from the remaining tree;
no journalled block may be missing, and the result must equal that of an undisturbed run.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from halotile.errors import HalotileError
from halotile.storage.disk.durable import Buffers, Disk, remove_partials
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import Layout, ShardWriter, check_block, create_output
from halotile.storage.sharded.ownership import metadata_problems

LAYOUT = Layout((10, 10), "uint16", (4, 4), (2, 2), "lz4", ("y", "x"), (0.5, 0.5), ("micrometer",) * 2, True)
PIXELS = np.random.default_rng(1).integers(0, 2**16, LAYOUT.shape, "uint16")

Tree = dict[str, bytes | None]
"""Entries under a root: the contents of files, None for directories."""


@dataclass(frozen=True)
class Call:
    """A change to one node, a file or directory, durable once that node is fsynced."""

    kind: str
    node: int
    name: str = ""
    new_name: str = ""
    child: int = 0
    data: bytes = b""
    offset: int = 0


@dataclass(frozen=True)
class Sync:
    """An fsync of one node."""

    node: int


class RecordingDisk(Disk):
    """A disk that logs its operations by nodes, not names."""

    def __init__(self, root: Path, *, loses: Callable[[Path], bool] = lambda path: False) -> None:
        self.log: list[Call | Sync] = []
        self._loses = loses
        self._ids = {root: 0}
        self._fds: dict[int, Path] = {}
        self._lengths: dict[int, int] = {}
        self._counter = itertools.count(1)

    def _link(self, path: Path, kind: str) -> None:
        self._ids[path] = next(self._counter)
        self.log.append(Call(kind, self._ids[path.parent], path.name, child=self._ids[path]))

    def _open(self, path: Path, flags: int, mode: int) -> int:
        fd = super()._open(path, flags, mode)
        if flags & os.O_CREAT:
            self._link(path, "file")
            self._lengths[self._ids[path]] = 0
        self._fds[fd] = path
        return fd

    def _write(self, fd: int, buffers: Buffers) -> int:
        written, node = super()._write(fd, buffers), self._ids[self._fds[fd]]
        self.log.append(Call("write", node, data=b"".join(buffers)[:written], offset=self._lengths[node]))
        self._lengths[node] += written
        return written

    def _fsync(self, fd: int) -> None:
        if not self._loses(self._fds[fd]):
            self.log.append(Sync(self._ids[self._fds[fd]]))

    def _truncate(self, fd: int, size: int) -> None:
        super()._truncate(fd, size)
        node = self._ids[self._fds[fd]]
        self.log.append(Call("truncate", node, offset=size))
        self._lengths[node] = size

    def _replace(self, old: Path, new: Path) -> None:
        super()._replace(old, new)
        self._ids[new] = self._ids.pop(old)
        self.log.append(Call("move", self._ids[new.parent], old.name, new.name, self._ids[new]))

    def _mkdir(self, path: Path, mode: int) -> None:
        super()._mkdir(path, mode)
        self._link(path, "directory")

    def _unlink(self, path: Path) -> None:
        super()._unlink(path)
        self.log.append(Call("unlink", self._ids[path.parent], path.name))

    def _rmdir(self, path: Path) -> None:
        super()._rmdir(path)
        self.log.append(Call("unlink", self._ids[path.parent], path.name))


class QuickDisk(Disk):
    """A disk that skips fsync, for use when no further power cut is simulated."""

    def _fsync(self, fd: int) -> None:
        pass


class Nodes:
    """Files and directories by number; directory 0 is the root."""

    def __init__(self) -> None:
        self.files = defaultdict[int, bytearray](bytearray)
        self.folders = defaultdict[int, dict[str, int]](dict, {0: {}})

    def apply(self, call: Call) -> None:
        if call.kind in ("write", "truncate"):
            content = self.files[call.node]
            content.extend(bytes(max(0, call.offset - len(content))))
            content[call.offset : call.offset + len(call.data) if call.kind == "write" else None] = call.data
            return
        entries = self.folders[call.node]
        if call.kind in ("move", "unlink"):
            entries.pop(call.name, None)
        elif call.kind == "directory":
            self.folders[call.child].update()
        else:
            self.files[call.child].extend(b"")
        if call.kind != "unlink":
            entries[call.new_name or call.name] = call.child

    def tree(self, node: int = 0, prefix: str = "") -> Tree:
        tree: Tree = {}
        for name, child in self.folders[node].items():
            if child in self.folders:
                tree |= {prefix + name: None} | self.tree(child, f"{prefix}{name}/")
            else:
                tree[prefix + name] = bytes(self.files.get(child, b""))
        return tree


def after_cut(log: list[Call | Sync]) -> Iterator[Tree]:
    """Every tree that a power cut after these calls may leave."""
    last_sync = {entry.node: place for place, entry in enumerate(log) if isinstance(entry, Sync)}
    calls = [(place, entry) for place, entry in enumerate(log) if isinstance(entry, Call)]
    loose = {place for place, call in calls if place > last_sync.get(call.node, -1)}
    kept: list[dict[int, int | None]] = [{}, dict.fromkeys(loose)]
    for place in loose:
        kept += [{place: None}, dict.fromkeys(loose - {place})]
    for place, call in calls:
        if place in loose and call.kind == "write":
            kept += [dict.fromkeys(loose) | {place: n} for n in {1, len(call.data) // 2, len(call.data) - 1}]
    for survivors in kept:
        nodes = Nodes()
        for place, call in calls:
            if place not in loose:
                nodes.apply(call)
            elif place in survivors:
                nodes.apply(replace(call, data=call.data[: survivors[place]]))
        yield nodes.tree()


def after_every_cut(log: list[Call | Sync], first: int = 0) -> list[Tree]:
    """Every different tree that a power cut may leave after at least ``first`` calls."""
    trees = (tree for cut in range(first, len(log) + 1) for tree in after_cut(log[:cut]))
    return list({tuple(sorted(tree.items(), key=lambda item: item[0])): tree for tree in trees}.values())


def put(tree: Tree, root: Path) -> None:
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def tree_at(root: Path) -> Tree:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


class LostError(Exception):
    """Data reported as durable were lost."""


def drive(root: Path, disk: Disk, *, hasty: bool = False) -> None:
    """Start or resume the job, in the order of operations of a run."""
    output, directory = root / "a.zarr", RunDirectory(root / "a.zarr.run", disk)
    with directory.lock():
        plan = directory.read_plan()
        if plan is None:
            ours = directory.job_path.exists()
            if output.exists() and not ours:
                raise LostError("an output stands there that no job claims")
            directory.forget()
            directory.write_job({})
            create_output(output, LAYOUT, disk, overwrite=ours)
            Journal.create(directory.journal_path, "print", 9, disk).close()
            directory.write_plan({})
        elif metadata_problems(output, LAYOUT):
            raise LostError("the metadata is not what it was")
        remove_partials(output, disk)
        with Journal.open(directory.journal_path, "print", 9, disk) as journal:
            write_blocks(output, journal, disk, hasty)


def write_blocks(output: Path, journal: Journal, disk: Disk, hasty: bool) -> None:
    for number in journal.done:
        region = LAYOUT.grid.block_at(number).core
        for problem in check_block(output, LAYOUT, region, journal.digest(number)):
            raise LostError(problem)
    writer = ShardWriter(output, LAYOUT, disk)
    for number in journal.done.complement(9):
        region = LAYOUT.grid.block_at(number).core
        if hasty:
            journal.mark({number: b"soon"})
        journal.mark({number: writer.write(region, PIXELS[region.slices]).digest})
        if number % 4 == 2:
            journal.sync()


def failures(trees: list[Tree], tmp_path: Path, expected: Tree) -> list[str]:
    """The first three problems when the job resumes from these trees."""
    found: list[str] = []
    for number, tree in enumerate(trees):
        root = tmp_path / f"cut{number}"
        put(tree, root)
        try:
            drive(root, QuickDisk())
            if tree_at(root / "a.zarr") != expected:
                raise LostError("the output is not that of an undisturbed run")
        except (HalotileError, OSError, LostError) as error:
            found.append(f"{type(error).__name__}: {error}")
        if len(found) == 3:
            break
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    root = tmp_path_factory.mktemp("undisturbed")
    drive(root, QuickDisk())
    np.testing.assert_array_equal(zarr.open_array(root / "a.zarr" / "0", mode="r")[:], PIXELS)
    assert check_block(root / "a.zarr", LAYOUT, Region.whole(LAYOUT.shape)) == []
    return tree_at(root / "a.zarr")


def recorded(root: Path, *, hasty: bool = False, loses: Callable[[Path], bool] = lambda p: False) -> list[Call | Sync]:
    root.mkdir()
    disk = RecordingDisk(root, loses=loses)
    drive(root, disk, hasty=hasty)
    return disk.log


def test_no_power_cut_loses_a_journalled_block_or_changes_the_result(tmp_path: Path, undisturbed: Tree) -> None:
    trees = after_every_cut(recorded(tmp_path / "job"))
    assert len(trees) > 200
    assert failures(trees, tmp_path, undisturbed) == []
    # The check sees a run that marks blocks before it writes them.
    assert failures(after_every_cut(recorded(tmp_path / "hasty", hasty=True)), tmp_path / "hasty", undisturbed)


def test_no_power_cut_while_starting_over_does_harm(tmp_path: Path, undisturbed: Tree) -> None:
    root = tmp_path / "job"
    root.mkdir()
    disk = RecordingDisk(root)
    drive(root, disk)
    first = len(disk.log)
    RunDirectory(root / "a.zarr.run", disk).forget()
    drive(root, disk)
    places = [i for i, e in enumerate(disk.log) if isinstance(e, Call) and e.new_name == "plan.json"]
    assert failures(after_every_cut(disk.log[: places[-1] + 2], first), tmp_path, undisturbed) == []


LOSSES: dict[str, Callable[[Path], bool]] = {
    "fsync of shards": lambda p: "c" in p.parts and p.name.endswith(".partial"),
    "fsync of the shards' directories": lambda p: p.parent.name == "c" and p.is_dir(),
    "fsync of the directory of these": lambda p: p.name == "c",
    "fsync of the array's directory": lambda p: p.name == "0" and p.parent.name == "a.zarr",
    "fsync of the group's directory": lambda p: p.name == "a.zarr",
    "fsync of the metadata": lambda p: p.name.startswith("zarr.json"),
    "fsync of the plan": lambda p: p.name.startswith("plan.json"),
    "fsync of a new journal": lambda p: p.name.startswith("journal."),
    "fsync of directories": lambda p: p.is_dir(),
    "every fsync": lambda p: True,
}


@pytest.mark.parametrize("loses", LOSSES.values(), ids=LOSSES)
def test_a_missing_kind_of_fsync_is_caught(tmp_path: Path, undisturbed: Tree, loses: Callable[[Path], bool]) -> None:
    assert failures(after_every_cut(recorded(tmp_path / "job", loses=loses)), tmp_path, undisturbed)
