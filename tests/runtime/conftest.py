"""Without a GPU, Triton kernels run in Triton's interpreter; it must be asked for before `triton` is imported.

Torch uses one thread: the models are tiny, and threads that wait for one another make a busy machine twice as slow.
"""

from __future__ import annotations

import os

try:
    import torch
except ModuleNotFoundError:  # the tests here are skipped, each with this reason
    pass
else:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
