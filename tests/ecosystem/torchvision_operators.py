"""Lets torchvision be imported beside a torch for CPU where its own build is for CUDA, of which the kernels do not load.

timm, transformers and Lightning import it for what needs none of them, on ranks too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "first_on_path"))
