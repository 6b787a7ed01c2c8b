"""Takes the place of torchvision until it is imported, on ranks too, because they get the test's `sys.path`.

Defines the operators that a build for CUDA lacks next to a torch for CPU, and then imports torchvision itself.
"""

import importlib
import sys
from pathlib import Path

import torch

OWN_FOLDER = str(Path(__file__).parents[1])
sys.path.remove(OWN_FOLDER)
del sys.modules[__name__]
try:
    importlib.import_module(__name__)
except RuntimeError:
    for failed in [name for name in sys.modules if name.partition(".")[0] == __name__]:
        del sys.modules[failed]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module(__name__)
sys.path.insert(0, OWN_FOLDER)  # for ranks that start later
