"""The store: a folder with one finding for each fingerprint."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from equivcheck.campaign.findings.example import adds_information, is_better_example
from equivcheck.campaign.findings.finding import BrokenFinding, Finding, StoreFailed, load_finding, write_finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.folder import DEFAULT_STORE
from equivcheck.campaign.findings.versions import ShownIn
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.system.choice import PrintableEnum

_LOCK, _NEW, _OLD = ".lock", ".new-", ".old-"
_LOCK_SECONDS = 30.0
"""Seconds to wait for another writer. Each writer holds the lock for a few milliseconds."""
_PROBED_BYTES = 2**16
"""Bytes written to test for free space. No finding is larger."""


class Kept(PrintableEnum):
    """How the store treated a verdict or a finding that it was asked to keep."""

    NEW = "new"
    BETTER = "better"
    SEEN = "seen"
    UNKEPT = "unkept"
    """The store could not be written."""


class FindingStore:
    """Findings on disk, in one folder for each fingerprint. Any number of processes may read and write at the same time."""

    def __init__(self, path: Path | str = DEFAULT_STORE) -> None:
        self.path = Path(path)

    def keep(self, verdict: CaseVerdict) -> Kept:
        """Write a failing verdict to the store, unless the store has a better example for the same fault.

        If the stored case is the same, a new diagnosis or a confirmation in another world is added to it. Raises `StoreFailed` if
        the files cannot be written.
        """
        assert verdict.outcome.is_finding, f"{verdict.outcome!r} is nothing to keep"
        with self._locked():
            return self._keep(verdict)

    def take(self, finding: Finding) -> Kept:
        """Copy a finding from another store, unless this store has a better example.

        Raises `StoreFailed` if it cannot be written.
        """
        mark = finding.fingerprint
        with self._locked():
            kept = self._kept(mark)
            if kept is not None and not is_better_example(finding.verdict, kept.verdict):
                return Kept.SEEN
            with self._new_folder() as new:
                shutil.copytree(finding.path, new, dirs_exist_ok=True)
                self._swap_in(new, mark)
            return Kept.NEW if kept is None else Kept.BETTER

    def require_writable(self) -> None:
        """Raise `StoreFailed` if findings cannot be written to this store."""
        with self._locked(), self._new_folder() as folder:
            (folder / "probe").write_bytes(bytes(_PROBED_BYTES))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the store for one writer, after clearing up. Failures raise `StoreFailed`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / _LOCK, timeout=_LOCK_SECONDS):
                self._repair()
                yield
        except (OSError, TimeoutError, NotImplementedError) as error:
            raise StoreFailed(f"findings cannot be kept in {self.path}: {getattr(error, 'strerror', '') or error}") from error

    def folder(self, mark: str) -> Path:
        """Return the folder for the fingerprint `mark`, whether or not it exists."""
        return self.path / mark

    def fingerprints(self) -> tuple[str, ...]:
        """Return all findings' fingerprints, sorted."""
        if not self.path.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self.path.iterdir() if entry.is_dir() and not entry.name.startswith(".")))

    def load(self, prefix: str) -> Finding:
        """Load the finding whose fingerprint begins with `prefix`. Raises `UsageError` if there is none, or more than one."""
        matches = [mark for mark in self.fingerprints() if prefix and mark.startswith(prefix)]
        if len(matches) == 1:
            return load_finding(self.folder(matches[0]))
        if matches:
            why = f"{len(matches)} fingerprints in {self.path} begin with it"
            raise UsageError(f"fingerprint {prefix!r} is not valid: {why}. Expected one of {', '.join(matches)}")
        there = ", ".join(self.fingerprints())
        expected = f"one of {there}" if there else "another store, because this one is empty"
        raise UsageError(f"finding {prefix!r} is not valid: it is not in {self.path}. Expected {expected}")

    def _keep(self, verdict: CaseVerdict) -> Kept:
        mark = fingerprint(verdict)
        kept = self._kept(mark)
        if kept is not None and adds_information(verdict, kept.verdict):
            self._write(verdict, mark, kept.shown_in)
            return Kept.SEEN
        if kept is not None and not is_better_example(verdict, kept.verdict):
            return Kept.SEEN
        self._write(verdict, mark)
        return Kept.NEW if kept is None else Kept.BETTER

    def _write(self, verdict: CaseVerdict, mark: str, shown_in: ShownIn | None = None) -> None:
        with self._new_folder() as new:
            write_finding(new, verdict, shown_in)
            self._swap_in(new, mark)

    @contextlib.contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """Create a new folder. It is removed at the end unless it was renamed."""
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.path))
        try:
            new.chmod(0o755)
            yield new
        finally:
            _remove(new)

    def _kept(self, mark: str) -> Finding | None:
        """The finding in the store. An unreadable folder counts as missing, and is replaced."""
        with contextlib.suppress(BrokenFinding):
            return load_finding(self.folder(mark))
        return None

    def _swap_in(self, new: Path, mark: str) -> None:
        """Swap a new folder in.

        A folder cannot be renamed over another, so the old folder is renamed first. `_repair` undoes half a swap.
        """
        old = self.path / f"{_OLD}{mark}"
        if self.folder(mark).exists():
            os.rename(self.folder(mark), old)
        os.rename(new, self.folder(mark))
        _remove(old)

    def _repair(self) -> None:
        """Clear up after a killed writer. Requires the lock."""
        for old in self.path.glob(f"{_OLD}*"):
            mark = old.name.removeprefix(_OLD)
            if self.folder(mark).exists():
                _remove(old)
            else:
                os.rename(old, self.folder(mark))
        for new in self.path.glob(f"{_NEW}*"):
            _remove(new)


def _remove(path: Path) -> None:
    # A file may lie in the folder's place. It stays if it cannot be removed.
    with contextlib.suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
