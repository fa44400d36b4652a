"""vLLM and its dependencies emit warnings of their own: they are no failures of these tests."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest

from tests.vllm.support import HAVE_VLLM

HERE = Path(__file__).parent

if HAVE_VLLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("lockstep.vllm.scheduler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
