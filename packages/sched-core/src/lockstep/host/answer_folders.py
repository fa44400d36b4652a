"""Where a server stores answers: in the folder `answers` beside its journal, in a folder for each tenant."""

from __future__ import annotations

from hashlib import sha256

ANSWERS = "answers"


def tenant_folder(tenant: str) -> str:
    """Return the name of a tenant's folder."""
    return sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:24]
