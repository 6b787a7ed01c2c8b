"""Folders with one version each, over the environment's torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.trainers.rows import Framework

DONE = "installed"
"""File in the folder of a complete installation."""


def version_folder(folder: Path, framework: Framework, version: str) -> Path | None:
    """Return the folder with a version, which pip fills if it is new. None if the environment has this version.

    Dependencies come from the environment, so that all versions share one torch. Raises `CalledProcessError` if pip fails.
    """
    requirements = framework.versions[version]
    if not requirements:
        return None
    target = folder / f"{framework.name.lower().replace(' ', '-')}-{version}"
    if not (target / DONE).exists():
        # Source distributions such as DeepSpeed's import torch during their build.
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--upgrade", "--target", str(target))
        command = (sys.executable, "-I", "-m", "pip", "install", *options, *requirements)
        # Constraints name the environment's versions, and a folder has another version.
        environment = os.environ | dict(framework.environment) | {"PIP_CONSTRAINT": ""}
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        (target / DONE).touch()
    return target
