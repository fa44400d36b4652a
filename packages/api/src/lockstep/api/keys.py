"""Who may ask: a TOML file of keys, each with the tenant that it stands for.

    [[keys]]
    tenant = "alice"
    key = "sk-..."

    [[keys]]
    tenant = "operator"
    key = "..."
    admin = true            # opens the operator's routes, and those of users as well

Prefixes in the radix cache are not shared between tenants, unless `isolate_tenants` of the scheduler is set to false.
"""

from __future__ import annotations

import hmac
import tomllib
from hashlib import sha256
from pathlib import Path

import msgspec

from lockstep.core.errors import ConfigError

KEY_CHARACTERS_MIN = 16


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key."""

    tenant: str
    key: str
    admin: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


class Keys:
    """The keys of a file. Only their digests are kept."""

    def __init__(self, keys: list[Key]) -> None:
        self._known = [(_digest(one.key), one.tenant, one.admin) for one in keys]

    def tenant_of(self, authorization: str | None, *, admin: bool = False) -> str | None:
        """Whom an Authorization header stands for; None for nobody, or nobody who may do this.

        All keys are compared, each in the same time, whatever is given.
        """
        scheme, _, given = (authorization or "").partition(" ")
        digest, found = _digest(given.strip()), None
        for known, tenant, may_all in self._known:
            if hmac.compare_digest(known, digest) and (may_all or not admin):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> Keys:
    """The keys of a file. Raises ConfigError, which never shows a key."""
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
    return Keys(file.keys)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
