"""Fields of a body that are not served: one rule for all endpoints.

    field        | its value would change the answer   -> refused by name, 400
                 | it adds comfort only, or is unknown -> accepted, and named: in X-Ignored-Fields, and once in the log
                 | null, false, 0, empty               -> accepted

`Body.REFUSED` and `Body.COMFORT` list the known fields; no field is ignored silently.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.schemas import WHY, Body, NativeSampling, empty

log = logging.getLogger("lockstep.http")

HEADER = "X-Ignored-Fields"
"""Header with the names of the fields that were accepted without effect, separated by commas."""

IGNORED = "lockstep.ignored"
"""Key of the recorded fields in a request's scope."""

NAMED_MAX, NAME_CHARACTERS = 32, 80
"""Greatest number of names in the header, and length of each."""

LOGGED_MAX = 1024
"""Names that one process logs; clients choose the names, so their number must be bounded."""

_logged: set[str] = set()


def unserved_fields(body: Body, *, strict: bool, inside: str = "") -> list[str]:
    """Return the names of fields that are accepted without effect. Raises ApiError for a field that is refused."""
    ignored: list[str] = []
    if type(body).OPEN:
        return ignored
    for name, value in (body.model_extra or {}).items():
        known = type(body).REFUSED.get(name)
        where = f"{inside}{name[:60]}"
        if known is not None:
            if not _is_harmless(value, known):
                why = WHY.get(name, "is not supported by this server; leave it out")
                raise ApiError(400, f"`{where}` {why}", where)
        elif strict and name not in type(body).COMFORT:
            raise ApiError(400, f"`{where}` is not a field of this request, and the server is strict", where)
        elif not empty(value):
            ignored.append(where)
    for name in sorted(body.model_fields_set):  # defaults are no bodies
        value = getattr(body, name)
        if isinstance(value, Body):
            ignored += unserved_fields(value, strict=strict, inside=f"{inside}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], NativeSampling):
            found = (unserved_fields(one, strict=strict, inside=f"{inside}{name}.") for one in value)
            ignored += [one for one in dict.fromkeys(chain.from_iterable(found)) if one not in ignored]
    return ignored


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether a known field that is not served has a value that changes no answer; see Body.REFUSED."""
    if value is None or value in harmless:
        return True
    return empty(value) and harmless[:1] not in ((True,), (None,))


def ignore(request: Request, name: str) -> None:
    """Record that a field of a request is accepted without effect."""
    ignored = ignored_by(request)
    if name not in ignored:
        ignored.append(name)


def ignored_by(request: Request) -> list[str]:
    """Return the recorded fields of a request; the list may be changed."""
    found: list[str] = request.scope.setdefault(IGNORED, [])
    return found


def name_ignored(request: Request, response: Response) -> None:
    """Name the recorded fields in the header of a response, and each once in the log."""
    earlier = [one for one in response.headers.get(HEADER, "").split(", ") if one]  # of a kept answer
    recorded = ignored_by(request)
    if not earlier and not recorded:
        return
    names = list(dict.fromkeys([*earlier, *map(_printable, recorded)]))
    more = [f"and {len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else []
    response.headers[HEADER] = ", ".join(names[:NAMED_MAX] + more)
    path = str(request.scope["path"])[:60]
    for name in names[:NAMED_MAX]:
        if name not in _logged and len(_logged) < LOGGED_MAX:
            _logged.add(name)
            log.warning("the field `%s` of %s has no effect on this server; this is logged once", name, path)


def _printable(name: str) -> str:
    """Return a name for a header: printable ASCII without separators, and short."""
    return "".join(one if "!" <= one <= "~" and one not in ',"' else "?" for one in name[:NAME_CHARACTERS])
