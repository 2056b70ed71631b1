"""Claim of an output in an object store by one run directory on any machine: file locks do not work there."""

import json
import os
import secrets
import shlex
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from halotile.errors import DamagedData, HalotileError, InputError, OutputInUse, OutputRefused, ResumeRefused
from halotile.storage.disk.object_path import SCHEMES, ObjectPath, OutputPath, store_errors
from halotile.storage.disk.place import ZARR_JSON
from halotile.storage.run_directory.directory import CLAIM, FINISHED, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import FILE_MODE, read_object
from halotile.storage.sharded.ownership import is_marked, stored_digest

_TEXTS = ("token", "directory", "host")


@dataclass(frozen=True)
class ObjectClaim:
    """The claim on an output: an object beside it, such as ``clean.zarr.run/claim.json``, and the same in the run directory.

    The token in it is what counts: a run directory may be moved, or be seen from several machines.
    """

    output: ObjectPath
    run: RunDirectory  # run directory that claims it, or is about to

    @property
    def place(self) -> ObjectPath:
        return self.output.with_name(f"{self.output.name}.run") / CLAIM

    def holder(self) -> dict[str, Any] | None:
        """The claim in the store; None where there is none. Raises OSError where the store does not answer."""
        try:
            holder = json.loads(self.place.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            holder = None
        if isinstance(holder, dict) and holder.keys() >= set(_TEXTS):
            return holder
        return dict.fromkeys(_TEXTS, "unknown")

    def check(self, *, may_replace: bool) -> dict[str, Any] | None:
        """Return the claim that is there, and refuse an output that another run directory has claimed."""
        try:
            holder = self.holder()
        except OSError as error:
            raise OutputRefused(
                f"{self.place} cannot be read: {error.strerror}. Write an output.path that you may read."
            ) from error
        if holder is not None and not may_replace and not self._is_own(holder):
            raise OutputRefused(
                f"{self.output} belongs to {words_of(holder)}, by {self.place}. Run there to go on; or run with --fresh and output.overwrite: true "
                "to start over from here, once nothing runs there any more."
            )
        return holder

    def take(self, *, may_replace: bool) -> None:
        """Claim the output for the run directory, which is locked; durable on return."""
        before = self._facts()  # those of a claim that is put after this are others
        holder = self.check(may_replace=may_replace)
        if holder is not None and self._is_own(holder):
            return
        claim = {
            "token": secrets.token_hex(16),
            "output": str(self.output),
            "directory": str(self.run.path),
            "host": socket.gethostname(),
            "user": os.geteuid(),
            "claimed": time.time(),
        }
        content = json.dumps(claim, indent=2).encode()
        self.run.disk.write_file(self.run.path / CLAIM, [content], mode=FILE_MODE)
        try:
            with suppress(FileExistsError):
                self._put(content, replaced=before)
            is_there = self.place.read_bytes() == content
        except OSError as error:
            raise OutputRefused(
                f"{self.place} cannot be written: {error.strerror}. Write an output.path that you may write to."
            ) from error
        if not is_there:
            raise OutputInUse(f"{self.output} was claimed by another run at this moment. Run again to see by which.")

    def change(self) -> str:
        """Describe what happened to the output since it was claimed; empty where it is as it was."""
        holder = self.holder()
        if holder is None or not self._is_own(holder):
            return f"now belongs to {words_of(holder)}" if holder else "has lost its claim"
        (self.output / ZARR_JSON).facts()
        return ""

    def mark(self, *, is_finished: bool) -> None:
        """Record whether every block of the output is done, for those who read it."""
        import obstore

        place = self.place.with_name(FINISHED)
        with store_errors(place):
            if is_finished:
                obstore.put(place.store, place.key, b"")
            else:
                with suppress(FileNotFoundError):
                    obstore.delete(place.store, place.key)

    def _is_own(self, holder: dict[str, Any]) -> bool:
        try:
            own = read_object(self.run.path / CLAIM, "")
        except DamagedData:
            return False
        return own is not None and own.get("token") == holder["token"]

    def _facts(self) -> Any:
        """Facts of the claim that is there; None where there is none, or where the check says why it cannot be read."""
        with suppress(OSError):
            return self.place.facts()
        return None

    def _put(self, content: bytes, replaced: Any) -> None:
        """Put the claim where there is none, or in place of the one with these facts, in one step."""
        import obstore

        named = {key: replaced[key] for key in ("e_tag", "version") if replaced[key]} if replaced else {}
        with store_errors(self.place):
            obstore.put(self.place.store, self.place.key, content, mode=named or "create")


def words_of(holder: dict[str, Any]) -> str:
    """Describe the run directory of a claim."""
    return f"the run in {holder['directory']} on {holder['host']}, of user {holder.get('user')}"


def elsewhere(output: OutputPath) -> str:
    """Describe the run directory of an output in a store, as further sentences; empty for other outputs."""
    if not isinstance(output, ObjectPath):
        return ""
    run, owner = RunDirectory.beside(output), ""
    with suppress(OSError, HalotileError):
        if holder := ObjectClaim(output, run).holder():
            owner = f" It belongs to {words_of(holder)}."
    return f" Of an output in a store that is {run.path.name} in the working directory.{owner}"


def check_finished(output: OutputPath) -> bytes:
    """Refuse an output that a run has not finished, or that has lost a shard since; return the digest of its shards, if it has one."""
    directory = RunDirectory.beside(output)
    if isinstance(output, ObjectPath):
        if not output.key or output.scheme not in SCHEMES:
            return b""
        claim = ObjectClaim(output, directory)
        with suppress(OSError):  # said where it is opened
            if (holder := claim.holder()) and not claim.place.with_name(FINISHED).exists():
                raise InputError(
                    f"{output} is the output of {words_of(holder)}, which has not finished it. Run there to go on; or remove "
                    f"{claim.place} to read it as it is."
                )
        return b""
    if not (has_journal := directory.journal_path.is_file()) and not is_marked(output):
        return b""
    with suppress(DamagedData, ResumeRefused, FileNotFoundError):  # of another version: its state is unknown
        journal = Journal.open_any(directory.journal_path) if has_journal else None
        if journal and (left := journal.total - len(journal.done)):
            raise InputError(
                f"{output} is the output of a run that has {left:,} of {journal.total:,} block{'s' * (journal.total > 1)} left to do. "
                f"`recon-cli resume {shlex.quote(str(output))}` finishes it; move {directory.path} away to read it as it is."
            )
    return stored_digest(output)
