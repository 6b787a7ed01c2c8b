"""Checks all rows of one version in this process: ``python -m tools.trainers.worker FRAMEWORK VERSION FILE [ONLY]``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tools.trainers.frameworks import FRAMEWORKS
from tools.trainers.rows import run_rows


def main(name: str, version: str, output: Path, only: str = "") -> None:
    """Write a JSON line for each row. Frameworks may print anything on stdout."""
    with output.open("w", encoding="utf-8") as file:
        for result in run_rows(FRAMEWORKS[name], version, only):
            print(json.dumps(asdict(result)), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
