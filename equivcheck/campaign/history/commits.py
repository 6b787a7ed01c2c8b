"""Commits from which torch and the user's code were built."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from equivcheck.system.commands import run

_GIT_SECONDS = 10.0
_REVISIONS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT")
"""Variables with the commit in GitHub, GitLab and Jenkins."""
_TORCH_COMMIT = re.compile(r"^git_version\s*(?::.*?)?=\s*['\"](\w+)['\"]", re.MULTILINE)


def torch_commit() -> str:
    """Commit of the installed torch, read without importing it; empty if unknown."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        found = _TORCH_COMMIT.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def revision() -> str:
    """Commit of the working directory, from the CI service or git; empty if unknown."""
    for name in _REVISIONS:
        if value := os.environ.get(name, ""):
            return value
    git = shutil.which("git")
    if git is None:
        return ""
    ran = run([git, "rev-parse", "HEAD"], seconds=_GIT_SECONDS, environment=os.environ)
    return ran.printed.strip() if ran.code == 0 else ""
