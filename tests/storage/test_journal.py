"""The journal and its set of numbers compared with a plain set, through crashes and damage."""

from __future__ import annotations

import errno
import io
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halotile.errors import ConfigError, DamagedData, ResumeRefused
from halotile.storage.disk.durable import Buffers, Disk
from halotile.storage.run_directory.journal import MOST_DIGESTS, VERSION, Journal
from halotile.storage.run_directory.json_files import with_checksum
from halotile.storage.run_directory.number_ranges import RangeSet

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
        assert digests_in(self.open(read_only=True)) == self.done
        assert self.path.read_bytes() == before

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
            assert digests_in(self.journal) == self.done
            assert len(self.journal.done) == len(self.done)


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


def test_every_partial_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    *whole, last = journal_lines(path, ("mark", [1, 2]), ("mark", [5, 6, 9]))
    for length in range(len(last)):
        path.write_bytes(b"".join(whole) + last[:length])
        journal = opened(path)
        assert (list(journal.done), journal.warning) == ([1, 2], "")
        journal.mark(marked(7))
        assert list(opened(path).done) == [1, 2, 7]


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


def test_marks_wait_for_a_sync_but_removals_do_not(tmp_path: Path) -> None:
    class Counts(Disk):
        syncs = 0

        def _fsync(self, fd: int) -> None:
            self.syncs += 1

    journal, counts = Journal.create(tmp_path / "journal", "print", TOTAL, disk := Counts()), [disk.syncs]
    mark, unmark = partial(journal.mark, marked(1)), partial(journal.unmark, [1])
    for step in (mark, mark, journal.sync, journal.sync, unmark, mark, journal.close):
        step()
        counts.append(disk.syncs)
    assert counts == [2, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("change", ["overwritten", "replaced", "removed"])
def test_a_file_that_another_process_changed_is_rewritten(tmp_path: Path, change: str, dirty: bool) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, "print", 9)
    journal.mark({3: b"wave", 5: b"dark"})
    journal.unmark([5])
    if change != "overwritten":
        path.unlink()
    if change != "removed":
        path.write_bytes(b"garbage\n")
    if dirty:
        journal.mark({7: b"edge"})
    (journal.sync if dirty else journal.ensure_durable)()
    journal.mark({8: b"late"})
    again = Journal.open(path, "print", 9, read_only=True)
    assert set(again.done) == {3, 8} | ({7} if dirty else set())
    assert (again.warning, again.digest(3), again.digest(8)) == ("", b"wave", b"late")


MEMBERS = st.lists(st.integers(0, 60))


STEPS = st.lists(st.tuples(st.booleans(), MEMBERS | st.builds(range, st.integers(0, 60), st.integers(0, 60))))


@settings(deadline=None, max_examples=300)
@given(STEPS, st.integers(0, 80))
def test_numbers_are_those_of_a_set_and_come_back_from_text(steps: list[tuple[bool, Any]], total: int) -> None:
    runs, model = RangeSet(), set[int]()
    for adds, numbers in steps:
        (runs.add if adds else runs.discard)(numbers)
        model = model | set(numbers) if adds else model - set(numbers)
    assert list(runs) == sorted(model)
    assert len(runs) == len(model)
    assert [n in runs for n in range(-1, 63)] == [n in model for n in range(-1, 63)]
    ranges = list(runs.ranges())
    assert all(len(run) for run in ranges)
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
    assert list(runs.complement(total)) == [n for n in range(total) if n not in model]
    assert RangeSet.from_text(runs.to_text()) == runs
