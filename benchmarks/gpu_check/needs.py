"""What a run needs beside this checkout. Only the standard library here: it comes before all other imports."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module

PACKAGES = {  # by the name to import, the name for pip; bounds are those of packages/*/pyproject.toml
    "torch": "torch>=2.11,<2.14",
    "numpy": "numpy>=2.2",
    "msgspec": "msgspec>=0.20",
    "safetensors": "safetensors>=0.6",
    "tokenizers": "tokenizers>=0.21",
    "jinja2": "jinja2>=3.1",
    "markupsafe": "markupsafe",  # of jinja2
    "greenlet": "greenlet>=3.1",
}
ON_A_GPU = {"triton": "triton"}  # torch for CUDA brings it
FOR_MORE = {  # what is skipped without them
    "flashinfer and its kernels": ("flashinfer", "tvm_ffi"),
    "the sections peer and families": ("transformers",),
    "pictures in the section families": ("PIL",),
    "the calibrations of the section tables": ("simpy", "click", "rich", "polars", "zstandard"),
}


def lacking(names: Iterable[str]) -> dict[str, str]:
    """Those that cannot be imported, with why: not there, or made for another Python."""
    found = {}
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # a library that a package loads may be missing as well
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def refusal(missing: Mapping[str, str]) -> str:
    """One message: what lacks, and how it comes to a machine with a network or without."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = {**PACKAGES, **ON_A_GPU}
    listed = " ".join(f"'{wanted[name]}'" for name in missing)
    platforms = " ".join(f"--platform {one}_{platform.machine()}" for one in ("manylinux2014", "manylinux_2_28"))
    wheels = f"--only-binary=:all: --python-version {python} {platforms}"
    return "\n".join(
        [
            f"Python {python} at {sys.executable} lacks what this run needs:",
            *(f"  {name}: {why}" for name, why in missing.items()),
            f"hint: {sys.executable} -m pip install {listed}",
            "without a network here: on a machine with one",
            f"  pip install --target carried {wheels} {listed}",
            "and run this again with that folder in front: PYTHONPATH=carried:$PYTHONPATH",
        ]
    )
