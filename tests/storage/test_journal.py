"""The journal compared with a plain set, through crashes and damage; and power cuts at every moment of a job of 3×3 blocks.

A disk records its system calls. For every cut between two of them, several subsets of the calls that no fsync made
durable survive: none, all, each alone, all but one, one of them partly. The job resumes from the remaining tree;
no journalled block may be missing, and the result must equal that of an undisturbed run.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halotile.errors import ConfigError, DamagedData, HalotileError, ResumeRefused
from halotile.storage.disk.durable import Buffers, Disk, remove_partials
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import MOST_DIGESTS, VERSION, Journal
from halotile.storage.run_directory.json_files import with_checksum
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.sharded.output import Layout, ShardWriter, check_block, create_output
from halotile.storage.sharded.ownership import metadata_problems

TOTAL = 40


class JournalMachine(RuleBasedStateMachine):
    """The journal contains the blocks that were marked and not unmarked since, except marks lost in a crash."""

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp()) / "journal"
        self.journal = Journal.create(self.path, "print", TOTAL, images=2)
        self.done: dict[int, bytes] = {}
        self.history = [(self.path.stat().st_size, dict[int, bytes]())]
        self.synced = self.path.stat().st_size

    def record(self) -> None:
        self.history.append((self.path.stat().st_size, dict(self.done)))

    def open(self, **options: Any) -> Journal:
        return Journal.open(self.path, "print", TOTAL, images=2, **options)

    @rule(digests=st.dictionaries(st.integers(0, TOTAL - 1), st.binary(min_size=8, max_size=8), max_size=12))
    def mark(self, digests: dict[int, bytes]) -> None:
        self.journal.mark(digests)
        self.done |= digests
        self.record()

    @rule(numbers=st.lists(st.integers(0, TOTAL - 1), max_size=12))
    def unmark(self, numbers: list[int]) -> None:
        self.journal.unmark(numbers)
        self.done = {number: digest for number, digest in self.done.items() if number not in numbers}
        self.record()
        self.synced = self.path.stat().st_size if numbers else self.synced

    @rule()
    def sync(self) -> None:
        self.journal.sync()
        self.synced = self.path.stat().st_size

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = self.open()
        assert not self.journal.warning
        self.synced = self.path.stat().st_size

    @rule()
    def open_for_reading_while_it_is_written(self) -> None:
        before = self.path.read_bytes()
        assert (digests_in(self.open(read_only=True)), self.path.read_bytes()) == (self.done, before)

    @precondition(lambda self: self.path.stat().st_size > self.synced)
    @rule(data=st.data(), zeros=st.booleans())
    def crash_with_a_torn_tail(self, data: st.DataObject, zeros: bool) -> None:
        content = self.path.read_bytes()
        size = data.draw(st.integers(self.synced, len(content) - 1))
        self.path.write_bytes(content[:size] + bytes(len(content) - size if zeros else 0))
        self.history = [(s, done) for s, done in self.history if s <= size]
        self.done = dict(self.history[-1][1])
        assert digests_in(self.open(read_only=True)) == self.done
        self.journal = self.open()
        assert not self.journal.warning
        assert self.path.stat().st_size == self.history[-1][0]
        self.synced = self.path.stat().st_size

    @invariant()
    def it_contains_the_marked_blocks(self) -> None:
        if hasattr(self, "journal"):
            assert (digests_in(self.journal), len(self.journal.done)) == (self.done, len(self.done))


JournalMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=25)


test_the_journal_preserves_marks_through_crashes = JournalMachine.TestCase


def digests_in(journal: Journal) -> dict[int, bytes]:
    """The finished blocks, with both of their digests."""
    return {number: journal.digest(number, 0) + journal.digest(number, 1) for number in journal.done}


def marked(*numbers: int) -> dict[int, bytes]:
    """A digest for each block."""
    return {number: b"%04d" % number for number in numbers}


def journal_lines(path: Path, *steps: tuple[str, list[int]]) -> list[bytes]:
    with Journal.create(path, "print", TOTAL) as journal:
        for step, numbers in steps:
            getattr(journal, step)(marked(*numbers))
    return path.read_bytes().splitlines(keepends=True)


def opened(path: Path, **options: Any) -> Journal:
    return Journal.open(path, "print", TOTAL, **options)


def test_every_flipped_bit_of_a_mark_makes_its_block_undone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    header, line, last = journal_lines(path, ("mark", [1, 2]), ("mark", [9]))
    for bit in range(8 * (len(line) - 1)):
        bad = bytearray(line)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(header + bytes(bad) + last)
        assert list(opened(path, read_only=True).done) == []


def test_marks_after_a_damaged_line_are_ignored_but_removals_are_not(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = journal_lines(path, ("mark", [1, 2]), ("mark", [5]), ("mark", [6]), ("unmark", [2]))
    path.write_bytes(lines[0] + b"zzzz\n" + lines[2])
    assert not opened(path).done
    assert path.read_bytes() == lines[0]
    lines[2] = lines[2].replace(b"+5", b"+8")
    path.write_bytes(b"".join(lines))
    journal = opened(path)
    assert list(journal.done) == [1]
    assert "line 3 is damaged" in journal.warning
    journal.mark(marked(7))
    again = opened(path)
    assert [(number, again.digest(number)) for number in again.done] == [(1, b"0001"), (7, b"0007")]
    assert again.warning == ""


def test_what_a_journal_refuses_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with pytest.raises(ConfigError, match="has 134,217,729 blocks, and a run of more than 134,217,728 is"):
        Journal.create(path, "print", MOST_DIGESTS // 2 + 1, images=2)
    assert not path.exists()
    journal_lines(path, ("mark", [1]))
    before = path.read_bytes()
    for fingerprint, total in (("other", TOTAL), ("print", TOTAL + 1)):
        with pytest.raises(ResumeRefused, match="belongs to another job"):
            Journal.open(path, fingerprint, total)
    with pytest.raises(io.UnsupportedOperation):
        opened(path, read_only=True).mark(marked(2))
    with pytest.raises(IndexError, match="blocks 3,40 with 8 bytes of digests, in a journal of 40 blocks"):
        opened(path).mark(marked(3, TOTAL))
    found = Journal.open_any(path)
    assert (found.fingerprint, found.total, list(found.done)) == ("print", TOTAL, [1])
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o600)


def test_a_file_without_a_valid_first_line_is_damaged_and_an_old_version_is_named(tmp_path: Path) -> None:
    texts = [b"{}", b"[]", b"3", b"{", b'{"journal": 2, "fingerprint": 1, "total": -1}', b"[" * 100_000]
    for total, images in [(2**70, 1), (2**62, 1), (10**11, 1), (TOTAL, 2**62), (-1, 1), (TOTAL, 0)]:
        owner = {"journal": VERSION, "fingerprint": "print", "total": total, "images": images}
        texts.append(json.dumps(owner).encode())
    old = with_checksum(b'{"journal": 1, "fingerprint": "print", "total": 40}') + with_checksum(b"+1")
    said = r"another version of halotile \(journal 1, here 2\).*--fresh"
    for content in (b"", b"\n", b"not a journal\n", b"00000000 {}\n", *map(with_checksum, texts), old):
        (tmp_path / "journal").write_bytes(content)
        error, words = (ResumeRefused, said) if content is old else (DamagedData, "--fresh")
        for look in (opened, Journal.open_any):
            with pytest.raises(error, match=words):
                look(tmp_path / "journal")


def test_a_line_without_meaning_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = journal_lines(path, ("mark", [1]), ("mark", [2]), ("mark", [3]))
    odd = [b"+1", b"+1 AAAA", b"+1 MDA", b"+40 MDAwMQ==", b"+3-1 MDAwMQ==", b"+x MDAwMQ==", b"+0-9 \xff", b"*1"]
    odd += [sign + b"0-" + b"9" * digits for sign in (b"+", b"-") for digits in (12, 23, 5000)]
    for content in odd:
        path.write_bytes(b"".join([*lines[:2], with_checksum(content), *lines[3:]]))
        journal = opened(path)
        assert list(journal.done) == [1]
        assert "line 3 is damaged" in journal.warning


def test_a_partly_written_line_does_not_damage_the_next(tmp_path: Path) -> None:
    class FillsUp(Disk):
        full = False

        def _write(self, fd: int, buffers: Buffers) -> int:
            if not self.full:
                return super()._write(fd, buffers)
            super()._write(fd, [buffers[0][:4]])
            raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal.create(tmp_path / "journal", "print", TOTAL, disk := FillsUp())
    journal.mark(marked(1))
    disk.full = True
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            journal.mark(marked(2))
    assert list(journal.done) == [1]
    disk.full = False
    journal.mark(marked(3))
    again = opened(tmp_path / "journal")
    assert (list(again.done), again.warning) == ([1, 3], "")


def test_marks_wait_for_a_sync_but_removals_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "_fsync", sync := Mock())
    journal, counts = Journal.create(tmp_path / "journal", "print", TOTAL), [sync.call_count]
    mark, unmark = partial(journal.mark, marked(1)), partial(journal.unmark, [1])
    for step in (mark, mark, journal.sync, journal.sync, unmark, mark, journal.close):
        step()
        counts.append(sync.call_count)
    assert counts == [2, 2, 2, 3, 3, 4, 4, 5]


CHANGES = [*itertools.product(("overwritten", "replaced"), (False, True)), ("removed", False)]


@pytest.mark.parametrize(("change", "dirty"), CHANGES)
def test_a_file_that_another_process_changed_is_rewritten(tmp_path: Path, change: str, dirty: bool) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, "print", 9)
    journal.mark({3: b"wave", 5: b"dark"})
    journal.unmark([5])
    if change == "removed":
        path.unlink()
    elif change == "overwritten":
        path.write_bytes(b"garbage\n")
    else:  # by another file of the same size
        (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
        (tmp_path / "other").replace(path)
    if dirty:
        journal.mark({7: b"edge"})
    (journal.sync if dirty else journal.ensure_durable)()
    journal.mark({8: b"late"})
    again = Journal.open(path, "print", 9, read_only=True)
    assert set(again.done) == {3, 8} | ({7} if dirty else set())
    assert (again.warning, again.digest(3), again.digest(8)) == ("", b"wave", b"late")


MEMBERS = st.lists(st.integers(0, 60)) | st.builds(range, st.integers(0, 60), st.integers(0, 60))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.booleans(), MEMBERS)), st.integers(0, 80))
def test_numbers_are_those_of_a_set_and_come_back_from_text(steps: list[tuple[bool, Any]], total: int) -> None:
    runs, model = RangeSet(), set[int]()
    for adds, numbers in steps:
        (runs.add if adds else runs.discard)(numbers)
        model = model | set(numbers) if adds else model - set(numbers)
    assert (list(runs), len(runs)) == (sorted(model), len(model))
    assert [n in runs for n in range(-1, 63)] == [n in model for n in range(-1, 63)]
    ranges = list(runs.ranges())
    assert all(len(run) for run in ranges)
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
    assert list(runs.complement(total)) == [n for n in range(total) if n not in model]
    assert RangeSet.from_text(runs.to_text()) == runs


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


def recorded(root: Path, *, hasty: bool = False, loses: Callable[[Path], bool] = lambda p: False) -> RecordingDisk:
    root.mkdir()
    disk = RecordingDisk(root, loses=loses)
    drive(root, disk, hasty=hasty)
    return disk


def test_no_power_cut_loses_a_journalled_block_or_changes_the_result(tmp_path: Path, undisturbed: Tree) -> None:
    trees = after_every_cut(recorded(tmp_path / "job").log)
    assert len(trees) > 200
    assert failures(trees, tmp_path, undisturbed) == []
    # The check sees a run that marks blocks before it writes them.
    assert failures(after_every_cut(recorded(tmp_path / "hasty", hasty=True).log), tmp_path / "hasty", undisturbed)


def test_no_power_cut_while_starting_over_does_harm(tmp_path: Path, undisturbed: Tree) -> None:
    disk = recorded(root := tmp_path / "job")
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
    assert failures(after_every_cut(recorded(tmp_path / "job", loses=loses).log), tmp_path, undisturbed)
