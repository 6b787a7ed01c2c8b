"""The folder of findings."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from equivcheck.campaign.findings import finding as finding_module
from equivcheck.campaign.findings import store as store_module
from equivcheck.campaign.findings.finding import BrokenFinding, load_finding, write_versions
from equivcheck.campaign.findings.fingerprint import fingerprint
from equivcheck.campaign.findings.size import size_of
from equivcheck.campaign.findings.store import FindingStore, Kept, StoreFailed
from equivcheck.campaign.findings.versions import Method, ShownIn, VersionAnswer
from equivcheck.errors import UsageError
from equivcheck.oracle.known_issues.showing import Showing, Shows
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.scenario.file_format.codec import from_json
from unit.campaign.fakes import diverged, scenario
from unit.campaign.findings.writer import keep_all

FILES = {"README.md", "environment.json", "scenario.json", "verdict.json"}


@pytest.fixture
def store(tmp_path: Path) -> FindingStore:
    """An empty store."""
    return FindingStore(tmp_path / "deep" / "findings")


def visible(store: FindingStore) -> set[str]:
    """What is in the store's folder but its lock."""
    return {entry.name for entry in store.path.iterdir() if entry.name != ".lock"}


def test_a_finding_reads_back(store: FindingStore) -> None:
    """What was kept is loaded again, equal, by any prefix of its fingerprint and from its folder."""
    verdict = diverged(scenario(width=3))
    assert store.keep(verdict) is Kept.NEW
    finding = store.load(fingerprint(verdict)[:4])
    assert finding.verdict == verdict
    assert load_finding(finding.path).verdict == verdict
    assert {entry.name for entry in finding.path.iterdir()} == FILES


def test_a_cause_is_kept_by_its_name() -> None:
    """Findings hold these values, so a renaming in code must not change them."""
    assert all(cause.value == cause.name.lower() for cause in Cause)


def test_files_serve_people_and_other_programs(store: FindingStore) -> None:
    """The scenario can be checked as it lies, the environment names versions, and the text says how to see it again."""
    verdict = diverged(scenario(width=3))
    store.keep(verdict)
    folder = store.folder(fingerprint(verdict))
    assert from_json((folder / "scenario.json").read_text()) == verdict.scenario
    assert json.loads((folder / "environment.json").read_text())["torch"]
    text = (folder / "README.md").read_text()
    assert f"equivcheck replay {fingerprint(verdict)}" in text
    assert "layers.0.linear.weight differs" in text


def test_a_finding_kept_under_old_names_reads_back(store: FindingStore) -> None:
    """A verdict from before fields and parameters were renamed is that of the same fault, with the same fingerprint."""
    verdict = replace(diverged(scenario(width=3), tensor="layers.0.auxiliary.weight"), unmodelled="world gloo does not see calls")
    store.keep(verdict)
    file = store.folder(fingerprint(verdict)) / "verdict.json"
    file.write_text(file.read_text().replace('"unmodelled"', '"unforeseen"').replace(".auxiliary.weight", ".side.weight"))
    assert load_finding(file.parent).verdict == verdict
    assert load_finding(file.parent).fingerprint == fingerprint(verdict)


def test_equal_fingerprints_are_kept_once_and_the_smallest_stays(store: FindingStore) -> None:
    """A smaller scenario replaces the kept one, a larger one does not."""
    small, middle, large = (diverged(scenario(width=3, ranks=ranks)) for ranks in (1, 2, 4))
    assert [store.keep(verdict) for verdict in (middle, large, middle, small)] == [Kept.NEW, Kept.SEEN, Kept.SEEN, Kept.BETTER]
    assert store.fingerprints() == (fingerprint(small),)
    assert store.load(fingerprint(small)).verdict == small
    assert visible(store) == {fingerprint(small)}


def test_what_was_shrunk_and_explained_gives_way_only_to_what_was_as_well(store: FindingStore) -> None:
    """A smaller scenario that another worker meets by chance says less of the fault than the one that was looked into."""
    tiny, small, middle, large = (diverged(scenario(width=3, ranks=ranks)) for ranks in (1, 2, 4, 8))
    diagnosis = Diagnosis(cause=Cause.SUMMED, sentence="twice as much", exact=True)
    assert [store.keep(verdict) for verdict in (middle, replace(large, diagnosis=diagnosis))] == [Kept.NEW, Kept.BETTER]
    assert store.keep(tiny) is Kept.SEEN
    assert store.keep(replace(small, diagnosis=diagnosis)) is Kept.BETTER
    assert store.load(fingerprint(small)).verdict == replace(small, diagnosis=diagnosis)


def test_a_write_that_fails_leaves_what_was_there(store: FindingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing a smaller scenario fails half-way, the kept one is whole, and the next write clears up."""
    kept, smaller = diverged(scenario(width=3, ranks=4)), diverged(scenario(width=3))
    store.keep(kept)

    def half(folder: Path, *_: object) -> None:
        (folder / "scenario.json").write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_finding", half)
        with pytest.raises(StoreFailed, match="disk full"):
            store.keep(smaller)
    assert store.load(fingerprint(kept)).verdict == kept
    assert store.keep(smaller) is Kept.BETTER
    assert visible(store) == {fingerprint(kept)}


def full(_file: Path, _text: str) -> None:
    """A disk with no space left."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing_half_written(store: FindingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be kept is cleared at once, as nobody may write here again, and the text says what is wrong in one line."""
    kept, smaller = diverged(scenario(width=3, ranks=4)), diverged(scenario(width=3))
    store.keep(kept)
    monkeypatch.setattr(finding_module, "replace_text", full)
    with pytest.raises(StoreFailed, match=f"cannot be kept in {store.path}: No space left on device"):
        store.keep(smaller)
    assert visible(store) == {fingerprint(kept)}


@pytest.mark.parametrize("name", [".new-abcdefgh", ".old-0123456789ab", ".old-"])
@pytest.mark.parametrize("folder", [True, False])
def test_leftovers_of_any_kind_stop_no_later_write(store: FindingStore, name: str, folder: bool) -> None:
    """Be it a folder or a file: it is cleared, or put back, and the finding is kept."""
    store.keep(diverged(scenario(), tensor="bias"))
    (store.path / name).mkdir() if folder else (store.path / name).touch()
    verdict = diverged(scenario(width=3))
    store.folder(fingerprint(verdict)).touch()
    assert store.keep(verdict) is Kept.NEW
    assert store.load(fingerprint(verdict)).verdict == verdict
    assert not {entry for entry in visible(store) if entry.startswith(".")}


def test_a_store_tells_before_anything_is_found_that_it_cannot_be_written(
    store: FindingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign of hours need not begin; where it can be written nothing is left of the attempt."""
    store.require_writable()
    assert visible(store) == set()
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match="findings cannot be kept in"):
        FindingStore(tmp_path / "file").require_writable()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreFailed, match="No space left on device"):
        store.require_writable()
    assert visible(store) == set()


def test_versions_that_cannot_be_written_leave_the_finding_whole(store: FindingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding is not cut short by a disk that fills up during a bisection."""
    verdict = diverged(scenario(width=3))
    store.keep(verdict)
    finding = store.load(fingerprint(verdict))
    shown_in = ShownIn(
        by=Method.SCRIPT, versions=("2.13.0",), measured=(VersionAnswer(torch="2.13.0", showing=Showing(shows=Shows.SHOWS)),)
    )
    write_versions(finding, shown_in)
    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(StoreFailed, match="No space left on device"):
        write_versions(finding, shown_in)
    assert load_finding(finding.path).shown_in == shown_in
    assert {entry.name for entry in finding.path.iterdir()} == FILES | {"versions.json"}


def half_written(file: Path, text: str, **_: object) -> None:
    """A disk that fills up on the way."""
    file.write_bytes(text[: len(text) // 2].encode())
    full(file, text)


def test_half_a_swap_is_undone(store: FindingStore) -> None:
    """A writer killed between its two renames loses nothing: the next one puts the old finding back."""
    kept = diverged(scenario(width=3))
    mark = fingerprint(kept)
    store.keep(kept)
    store.folder(mark).rename(store.path / f".old-{mark}")
    assert store.keep(diverged(scenario(width=3, ranks=8))) is Kept.SEEN
    assert store.load(mark).verdict == kept


def test_writers_do_not_disturb_each_other(store: FindingStore) -> None:
    """Several processes that keep at once leave one whole finding a fingerprint, the smallest of all."""
    writers = [multiprocessing.get_context("spawn").Process(target=keep_all, args=(store.path, first)) for first in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(store.fingerprints()) == 4
    assert visible(store) == set(store.fingerprints())
    for mark in store.fingerprints():
        assert store.load(mark).verdict.scenario.layout.mesh.num_ranks == 1


def damage_scenario(folder: Path) -> None:
    """Not JSON any more."""
    (folder / "scenario.json").write_text("{")


def damage_field(folder: Path) -> None:
    """A field out of its range."""
    path = folder / "scenario.json"
    path.write_text(path.read_text().replace('"steps": 1', '"steps": 99'))


def damage_verdict(folder: Path) -> None:
    """An outcome that does not exist."""
    (folder / "verdict.json").write_text('{"outcome": "fine", "world": "sim"}')


def damage_list(folder: Path) -> None:
    """A list instead of an object."""
    (folder / "verdict.json").write_text("[]")


def damage_bytes(folder: Path) -> None:
    """Not text."""
    (folder / "environment.json").write_bytes(b"\xff\xfe\x00")


def damage_file(folder: Path) -> None:
    """One file gone."""
    (folder / "verdict.json").unlink()


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (damage_scenario, "scenario.json"),
        (damage_field, "scenario.json"),
        (damage_verdict, "verdict.json"),
        (damage_list, "verdict.json"),
        (damage_bytes, "environment.json"),
        (damage_file, "verdict.json"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_broken_finding_is_one_clear_line(store: FindingStore, damage: object, file: str) -> None:
    """The error names the file and what is wrong in one line, and the next verdict of that fingerprint replaces the wreck."""
    verdict = diverged(scenario(width=3))
    store.keep(verdict)
    folder = store.folder(fingerprint(verdict))
    damage(folder)  # type: ignore[operator]
    with pytest.raises(BrokenFinding, match=file) as caught:
        load_finding(folder)
    assert "\n" not in str(caught.value)
    assert store.keep(verdict) is Kept.NEW
    assert load_finding(folder).verdict == verdict


def test_a_prefix_must_belong_to_one(store: FindingStore) -> None:
    """A prefix of none or of several is refused, and what there is is listed."""
    marks = []
    for tensor in ("weight", "bias"):
        verdict = diverged(scenario(), tensor=tensor)
        store.keep(verdict)
        marks.append(fingerprint(verdict))
    with pytest.raises(UsageError, match=marks[0]):
        store.load("zzz")
    with pytest.raises(UsageError, match=marks[1]):
        store.load("")


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """A file in the place of the folder is one clear error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="findings cannot be kept in"):
        FindingStore(tmp_path / "file").keep(diverged(scenario()))


def test_size_goes_by_ranks_before_anything_else() -> None:
    """Fewer ranks beat fewer layers, those fewer steps, those smaller widths."""
    order = [scenario(ranks=1, layers=5), scenario(width=9), scenario(width=1, steps=2), scenario(layers=2)]
    assert [size_of(small) < size_of(large) for small, large in pairwise(order)] == [True] * 3


def test_what_another_world_says_is_added_to_the_same_scenario(store: FindingStore) -> None:
    """A verdict no smaller replaces the one that is there if it alone says whether it was confirmed."""
    verdict = diverged(scenario(width=3))
    store.keep(verdict)
    confirmed = replace(verdict, confirmed="diverged on gloo too")
    assert store.keep(confirmed) is Kept.SEEN
    assert store.load(fingerprint(verdict)).verdict == confirmed
    store.keep(verdict)
    assert store.load(fingerprint(verdict)).verdict == confirmed
