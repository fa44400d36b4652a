"""Access by keys: a TOML file of keys, each with its tenant.

    [[keys]]
    tenant = "alice"
    key = "sk-..."

    [[keys]]
    tenant = "operator"
    key = "..."
    admin = true            # grants access to the routes for operators as well as those for users

    [[keys]]
    tenant = "bob"
    key = "sk-..."
    requests_per_minute = 600     # each limit is optional, and holds for all keys of the tenant together
    tokens_per_minute = 1_000_000
    tokens_per_day = 50_000_000
    answers_max = 64              # open answers in one worker

The file is read again after a change. If that fails, the previous keys remain in use, and the failure is logged.
Prefixes in the radix cache are not shared between tenants, unless `isolate_tenants` of the scheduler is set to false.
"""

from __future__ import annotations

import hmac
import logging
import time
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from lockstep.core.contract.errors import ConfigError

log = logging.getLogger("lockstep.worker")

KEY_CHARACTERS_MIN = 16
LOOK_S = 1.0  # interval between checks of the file for changes


class Allowance(msgspec.Struct, frozen=True):
    """Limits of a tenant; None: unlimited."""

    requests_per_minute: float | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    answers_max: int | None = None


UNLIMITED = Allowance()


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of the file, with its tenant and limits."""

    tenant: str
    key: str
    admin: bool = False
    requests_per_minute: float | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    answers_max: int | None = None

    @property
    def allowance(self) -> Allowance:
        """The limits in the entry of the key."""
        return Allowance(*(getattr(self, name) for name in Allowance.__struct_fields__))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


class Keys:
    """The keys of a file. Only their digests are stored.

    Args:
        file: the file, read again after a change; None: the keys never change.
        stamp: state of the file when it was read.
        now_s: a monotonic clock, seconds.
    """

    def __init__(
        self,
        keys: list[Key],
        file: Path | None = None,
        stamp: tuple[int, ...] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._stamp, self._now_s = file, stamp, now_s
        self._looked_s = now_s()
        self._take(keys)

    def _take(self, keys: list[Key]) -> None:
        self._known = [(_digest(one.key), one.tenant, one.admin) for one in keys]
        self._allowed = {one.tenant: one.allowance for one in keys if one.allowance != UNLIMITED}

    @property
    def tenants(self) -> set[str]:
        """The tenants of all keys."""
        return {tenant for _, tenant, _ in self._known}

    def allowance(self, tenant: str) -> Allowance:
        """Return the limits of a tenant."""
        return self._allowed.get(tenant, UNLIMITED)

    def _look(self) -> None:
        """Read the file again if it changed."""
        if self._file is None or self._now_s() - self._looked_s < LOOK_S:
            return
        self._looked_s = self._now_s()
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(_read(self._file))
        except ConfigError as error:
            log.error("%s; the previous keys remain in use", error)
        else:
            log.info("the keys were read again: %d", len(self._known))

    def tenant_of(self, authorization: str | None, *, admin: bool = False) -> str | None:
        """Return the tenant of an Authorization header; None without a valid key. `admin` requires an operator's key.

        All keys are compared, each in constant time.
        """
        self._look()
        scheme, _, given = (authorization or "").partition(" ")
        digest, found = _digest(given.strip()), None
        for known, tenant, may_all in self._known:
            if hmac.compare_digest(known, digest) and (may_all or not admin):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> Keys:
    """Read the keys of a file, which is read again after changes. Raises ConfigError, which never contains a key."""
    stamp = _stamp(path)  # taken before the file is read, so that no change is missed
    return Keys(_read(path), path, stamp)


def _read(path: Path) -> list[Key]:
    try:
        file = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"`api_keys`: {path} cannot be read: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"`api_keys`: {path}: {error}\nhint: [[keys]] with tenant and key each") from None
    if not file.keys:
        raise ConfigError(f"`api_keys`: {path} holds no key")
    for number, one in enumerate(file.keys, 1):
        if len(one.key) < KEY_CHARACTERS_MIN:
            raise ConfigError(f"`api_keys`: key {number} of {path} has less than {KEY_CHARACTERS_MIN} characters")
        if not one.tenant or "\0" in one.tenant:
            raise ConfigError(f"`api_keys`: key {number} of {path} needs a tenant")
        for name in Allowance.__struct_fields__:
            value = getattr(one, name)
            if value is not None and not 0 < value < 1e15:
                raise ConfigError(f"`api_keys`: `{name}` of key {number} of {path} must be above 0, got `{value}`")
    limits: dict[str, Allowance] = {}
    for number, one in enumerate(file.keys, 1):
        if one.allowance != UNLIMITED and limits.setdefault(one.tenant, one.allowance) != one.allowance:
            raise ConfigError(
                f"`api_keys`: key {number} of {path} has other limits than an earlier key of its tenant\n"
                "hint: limits hold for the tenant; set them once"
            )
    return file.keys


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a value that changes with the file; empty if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
