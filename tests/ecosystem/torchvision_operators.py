"""Lets torchvision be imported beside a torch for CPU where its own build is for CUDA, of which the kernels do not load.

timm and transformers import it for what needs none of them.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
