"""Requests that workers submit again to the next generation of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.processes.claims import Claims, Lost
from lockstep.api.processes.wire import OVER
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.journal.records import JournalError


class Expired:
    """A recovered journal whose part with the answers has expired."""

    def __init__(self) -> None:
        self.image = SimpleNamespace(strikes={})
        self.origins: dict[str, Any] = {}

    def find(self, origin: str, samples: Sequence[int]) -> int | None:
        raise JournalError(f"the answer of {origin} is in a part of the journal that has expired")


def test_a_request_starts_anew_where_the_client_has_nothing_of_an_answer_that_is_lost() -> None:
    """An engine that ended again before a request arrived had journaled a later one of the same worker."""
    keeper: Any = SimpleNamespace(recovered=Expired(), verdict=SimpleNamespace(guilty=()))
    host: Any = SimpleNamespace(engine=SimpleNamespace(requests={}))
    claims = Claims(host, keeper, "server", [0])
    request = RequestArrived(0, request_id=-1, prompt=TokenIds(b""), max_new_tokens=4, origin="server/0/7")
    assert claims.take(request, [0, 0], ()) is None
    for have in ([3], [0, OVER]):
        with pytest.raises(Lost, match="part of the journal that has expired"):
            claims.take(request, have, ())
