"""What stored pages are of. Two engines with the same identity, given the same tokens in the same namespace, would
compute the same KV in the same layout; with another identity they share nothing.

The content of checkpoints is sampled, because reading hundreds of gigabytes at every start takes minutes: the header of
each safetensors file, which has names, types, shapes and places of its tensors, and SAMPLE_BYTES at the beginning, in
the middle and at the end of each tensor. Training changes nearly every number of a tensor.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.host.weights import Folder, Source

SAMPLE_BYTES = 256


def weights_digest(folder: Path) -> bytes:
    """Return a digest of a folder's config.json and tensors. Raises ConfigError if they cannot be read."""
    digest = sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(path.name.encode())
            _add_samples(digest, path)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"`storage`: the weights in {folder} cannot be read, which name the pages: {error}\n"
            "hint: leave storage out, or give a folder with safetensors"
        ) from error
    return digest.digest()


def _add_samples(digest: Any, path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        header = os.pread(file, length, 8)
        digest.update(header)
        for name, about in msgspec.json.decode(header).items():
            if name == "__metadata__":
                continue
            start, stop = about["data_offsets"]
            for at in (start, (start + stop) // 2, max(start, stop - SAMPLE_BYTES)):
                digest.update(os.pread(file, min(SAMPLE_BYTES, stop - at), 8 + length + at))
    finally:
        os.close(file)


def random_weights_digest(folder: Path, seed: int) -> bytes:
    """Return a digest of random weights: of config.json and the seed."""
    return sha256(b"random %d " % seed + (folder / "config.json").read_bytes()).digest()


def digest_of_source(source: Source) -> bytes:
    """Return a digest of weights from an update. Weights that come from no folder are those of this engine alone."""
    return weights_digest(Path(source.path)) if isinstance(source, Folder) else secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the stored pages of one rank are of.

    Args:
        weights: digest of the weights.
        computed: all else that the bytes of a page depend on.
    """

    weights: bytes
    computed: tuple[object, ...] = ()

    def digest(self) -> bytes:
        """Return 32 bytes that differ for any other identity."""
        return sha256(self.weights + repr(self.computed).encode()).digest()
