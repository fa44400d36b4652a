"""The inputs with which the peers were measured: `workloads.py` in the folder that LOCKSTEP_PEERS names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np


def load_workloads() -> ModuleType:
    """The peers' module of workloads. Raises SystemExit, saying so, when LOCKSTEP_PEERS does not lead to it."""
    folder = os.environ.get("LOCKSTEP_PEERS")
    if folder is None:
        raise SystemExit("LOCKSTEP_PEERS is not set: it names the folder with workloads.py")
    path = Path(folder, "workloads.py")
    if not path.is_file():
        raise SystemExit(f"LOCKSTEP_PEERS is {folder}, which has no workloads.py")
    spec = importlib.util.spec_from_file_location("peer_workloads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(tokens: list[int]) -> bytes:
    """Token ids as the engine takes them: int32, end to end."""
    return np.array(tokens, np.int32).tobytes()
