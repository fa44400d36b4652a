"""The fp8 format e4m3 in torch, and the step of its products: shared by matrices and kernels of fp8."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
STEP_LEAST = 32  # least inputs that a GPU multiplies in fp8 at a time
