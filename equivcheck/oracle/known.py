"""Upstream issues on file: failures of torch itself that a check meets again and again."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from equivcheck.choice import Choice
from equivcheck.oracle.verdict import Verdict


class Kind(Choice):
    """What an upstream issue does."""

    WRONG_NUMBERS = "wrong_numbers"
    CRASH = "crash"
    HANG = "hang"
    LIMITATION = "limitation"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One upstream issue, and how it is recognised."""

    id: str
    """Short name, unique."""
    link: str
    """Where it is reported, or the sentence that describes it when nobody has reported it."""
    torch: str
    """Version range in which it shows, as a PEP 440 specifier."""
    kind: Kind
    """What it does."""
    layouts: tuple[str, ...]
    """Tags of parallelisms in which it shows."""
    error: str
    """Regular expression that the verdict's reason or a rank's error must match."""
    needs: tuple[str, ...] = ()
    """Regular expressions that the scenario's repr must match, all of them."""


@cache
def known_issues() -> tuple[KnownIssue, ...]:
    """The issues on file that apply to the installed torch."""
    rows = tomllib.loads(files("equivcheck.oracle").joinpath("known.toml").read_text("utf-8"))["issue"]
    issues = (
        KnownIssue(**{**row, "kind": Kind(row["kind"]), "layouts": tuple(row["layouts"]), "needs": tuple(row.get("needs", ()))})
        for row in rows
    )
    return tuple(issue for issue in issues if Version(torch.__version__).base_version in SpecifierSet(issue.torch))


def known_issue(verdict: Verdict) -> KnownIssue | None:
    """The issue on file that explains a failing verdict, if there is one."""
    return next((issue for issue in known_issues() if _explains(issue, verdict)), None)


def _explains(issue: KnownIssue, verdict: Verdict) -> bool:
    tags = {parallelism.tag for parallelism in verdict.scenario.layout.parallelisms}
    errors = [verdict.reason, *(report.error for report in verdict.failure.reports)] if verdict.failure else [verdict.reason]
    text = repr(verdict.scenario)
    return (
        not tags.isdisjoint(issue.layouts)
        and any(re.search(issue.error, error) for error in errors)
        and all(re.search(pattern, text) for pattern in issue.needs)
    )
