"""Without a GPU, Triton kernels run in Triton's interpreter; it must be asked for before `triton` is imported."""

from __future__ import annotations

import os

try:
    import torch
except ModuleNotFoundError:  # the tests here skip, each saying so
    pass
else:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
