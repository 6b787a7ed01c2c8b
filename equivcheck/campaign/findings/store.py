"""The folder of findings: equal fingerprints kept once, the best example of each."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from equivcheck.campaign.findings.example import is_better, says_more
from equivcheck.campaign.findings.finding import BrokenFinding, Finding, StoreFailed, load_finding, write_finding
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.folder import DEFAULT_STORE
from equivcheck.campaign.findings.versions import ShownIn
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import CaseVerdict
from equivcheck.system.choice import Choice

_LOCK, _NEW, _OLD = ".lock", ".new-", ".old-"
_LOCK_SECONDS = 30.0
"""Limit for waiting for another writer; each holds the lock for a few milliseconds."""
_PROBED_BYTES = 2**16
"""More than a finding takes."""


class Kept(Choice):
    """What the store did with a verdict."""

    NEW = "new"
    BETTER = "better"
    SEEN = "seen"
    UNKEPT = "unkept"
    """Nothing: the store could not be written."""


class FindingStore:
    """Findings on disk, one folder a fingerprint; any number of processes may write and read it at once."""

    def __init__(self, path: Path | str = DEFAULT_STORE) -> None:
        self.path = Path(path)

    def keep(self, verdict: CaseVerdict) -> Kept:
        """Keep a failing verdict unless one with its fingerprint is there that is no worse an example; raises `StoreFailed`.

        Whether another world finds the same is added to one with the same case.
        """
        assert verdict.outcome.is_finding, f"{verdict.outcome!r} is nothing to keep"
        with self._locked():
            return self._keep(verdict)

    def take(self, finding: Finding) -> Kept:
        """Keep a copy of a finding of another store, with where it was found, by the same rule; raises `StoreFailed`."""
        mark = finding.fingerprint
        with self._locked():
            kept = self._kept(mark)
            if kept is not None and not is_better(finding.verdict, kept.verdict):
                return Kept.SEEN
            with self._new_folder() as new:
                shutil.copytree(finding.path, new, dirs_exist_ok=True)
                self._swap_in(new, mark)
            return Kept.NEW if kept is None else Kept.BETTER

    def require_writable(self) -> None:
        """Raise `StoreFailed` where findings could not be kept."""
        with self._locked(), self._new_folder() as folder:
            (folder / "probe").write_bytes(bytes(_PROBED_BYTES))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, after clearing up; what fails raises `StoreFailed`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / _LOCK, timeout=_LOCK_SECONDS):
                self._repair()
                yield
        except (OSError, TimeoutError, NotImplementedError) as error:
            raise StoreFailed(f"findings cannot be kept in {self.path}: {getattr(error, 'strerror', '') or error}") from error

    def folder(self, mark: str) -> Path:
        """The folder of a fingerprint, whether or not it is there."""
        return self.path / mark

    def fingerprints(self) -> tuple[str, ...]:
        """Of everything kept, sorted."""
        if not self.path.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self.path.iterdir() if entry.is_dir() and not entry.name.startswith(".")))

    def load(self, prefix: str) -> Finding:
        """The one finding whose fingerprint starts with `prefix`; raises `UsageError` if there is none or several."""
        matches = [mark for mark in self.fingerprints() if prefix and mark.startswith(prefix)]
        if len(matches) == 1:
            return load_finding(self.folder(matches[0]))
        if matches:
            raise UsageError(f"fingerprint {prefix!r} is that of {len(matches)} findings in {self.path}: {', '.join(matches)}")
        there = ", ".join(self.fingerprints()) or "nothing"
        raise UsageError(f"finding {prefix!r} does not exist in {self.path}; there is {there}")

    def _keep(self, verdict: CaseVerdict) -> Kept:
        mark = fingerprint(verdict)
        kept = self._kept(mark)
        if kept is not None and says_more(verdict, kept.verdict):
            self._write(verdict, mark, kept.shown_in)
            return Kept.SEEN
        if kept is not None and not is_better(verdict, kept.verdict):
            return Kept.SEEN
        self._write(verdict, mark)
        return Kept.NEW if kept is None else Kept.BETTER

    def _write(self, verdict: CaseVerdict, mark: str, shown_in: ShownIn | None = None) -> None:
        with self._new_folder() as new:
            write_finding(new, verdict, shown_in)
            self._swap_in(new, mark)

    @contextlib.contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """A folder to be filled, and renamed or else removed."""
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.path))
        try:
            new.chmod(0o755)
            yield new
        finally:
            _remove(new)

    def _kept(self, mark: str) -> Finding | None:
        """What is kept; a folder that cannot be read is as good as none, and is replaced."""
        with contextlib.suppress(BrokenFinding):
            return load_finding(self.folder(mark))
        return None

    def _swap_in(self, new: Path, mark: str) -> None:
        """A folder cannot be renamed over another, so the old one steps aside first; `_repair` undoes half a swap."""
        old = self.path / f"{_OLD}{mark}"
        if self.folder(mark).exists():
            os.rename(self.folder(mark), old)
        os.rename(new, self.folder(mark))
        _remove(old)

    def _repair(self) -> None:
        """Clear up after a writer that was killed; only with the lock held."""
        for old in self.path.glob(f"{_OLD}*"):
            mark = old.name.removeprefix(_OLD)
            if self.folder(mark).exists():
                _remove(old)
            else:
                os.rename(old, self.folder(mark))
        for new in self.path.glob(f"{_NEW}*"):
            _remove(new)


def _remove(path: Path) -> None:
    """Remove a folder, or what lies in its place; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
