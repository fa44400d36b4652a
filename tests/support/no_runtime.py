"""A pytest plugin, `-p tests.support.no_runtime`: the GPU runtime and its requirements seem not to be installed."""

from __future__ import annotations

import sys
from typing import Any

for name in ("lockstep.runtime", "torch", "triton", "safetensors", "transformers"):
    absent: Any = None  # its import raises ModuleNotFoundError
    sys.modules[name] = absent
