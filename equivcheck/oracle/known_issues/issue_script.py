"""Scripts that show known issues with torch only.

A file in the folder `scripts` holds an explanation and a function `main`. This module adds the code that all scripts share.
"""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from pathlib import Path

from equivcheck.oracle.known_issues.known import IssueKind, KnownIssue

SCRIPTS = Path(str(files("equivcheck.oracle.known_issues").joinpath("scripts")))
"""Folder with one script for each known issue, named after its id."""

_WIDTH = 128
_DIFFERENCE = """\
    difference = main()
    print(f"{rank}max difference {{difference}}")
"""
_GROUP = """
if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
{call}\
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit({result})
"""
_ONE_PROCESS = """
if __name__ == "__main__":
{call}\
    raise SystemExit({result})
"""


def issue_script(issue: KnownIssue) -> str:
    """Return the text of a script that exits with 1 if the installed torch has a known issue.

    If the issue gives wrong numbers, the script prints the difference. For other issues, it raises torch's error, or catches it
    and exits with 1.
    """
    text = (SCRIPTS / f"{issue.id}.py").read_text("utf-8")
    _, explanation, code = text.split('"""', maxsplit=2)
    code, is_wrong = code.lstrip(), issue.kind is IssueKind.WRONG_NUMBERS
    has_group = "torch.distributed" in code or "DistributedDataParallel" in code
    rank = "rank {dist.get_rank()}: " if has_group else ""
    call = _DIFFERENCE.format(rank=rank) if is_wrong else "    is_seen = main()\n"
    result = "not difference <= 1e-6" if is_wrong else "is_seen"  # negated, because a NaN compares as false
    frame = (_GROUP if has_group else _ONE_PROCESS).format(call=call, result=result)
    return f'"""{_docstring(issue, explanation)}"""\n\n{_with_imports(code) if has_group else code}\n{frame}'


def write_issue_script(issue: KnownIssue, folder: Path) -> Path:
    """Write the script of a known issue to a folder, and return its path."""
    path = folder / f"{issue.id}.py"
    path.write_text(issue_script(issue), encoding="utf-8")
    return path


def _docstring(issue: KnownIssue, explanation: str) -> str:
    reported = f"Reported as {issue.link}." if issue.link else "Not reported."
    paragraphs = [f"{issue.title}.", textwrap.fill(" ".join(explanation.split()), _WIDTH, break_on_hyphens=False), reported]
    paragraphs.append(f"    torchrun --standalone --nproc-per-node {issue.ranks} {issue.id}.py")
    shows = "the difference shows" if issue.kind is IssueKind.WRONG_NUMBERS else "it raises"
    paragraphs.append(f"Exit code 1 if {shows}. Seen on torch {issue.torch}, CPU.\n")
    return "\n\n".join(paragraphs)


def _with_imports(code: str) -> str:
    """Add the two imports of `_GROUP`, in the order that isort asks for."""
    if "import torch.distributed as dist" not in code:
        code = re.sub(r"^(?=from torch)", "import torch.distributed as dist\n", code, count=1, flags=re.MULTILINE)
    if code.startswith(("import torch", "from torch")):
        return f"from datetime import timedelta\n\n{code}"
    return re.sub(r"^(?=from [d-z]|\n)", "from datetime import timedelta\n", code, count=1, flags=re.MULTILINE)
