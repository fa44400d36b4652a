"""Usage and limits of each tenant. All workers of a server count in the same files.

    FOLDER/<digest of the tenant>     one record, read and written under a lock; a few dozen microseconds

Rates are token buckets. `requests_per_minute` is size and refill per minute of a bucket from which each request takes
one. `tokens_per_minute` is that of a bucket of tokens: prompts are deducted on arrival, answers at their end, so it can
fall below zero; no request is accepted until it is above zero again. `tokens_per_day` counts from midnight, UTC.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.keys import Allowance

DAY_S = 86_400


class UsageRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Usage of one tenant."""

    filled_s: float = 0.0  # when the buckets were last filled, seconds since 1970
    minute_requests: float = 0.0  # left in the bucket of requests
    minute_tokens: float = 0.0  # left in the bucket of tokens
    day: int = 0  # days since 1970
    day_tokens: int = 0  # used on that day
    requests: int = 0  # total
    prompt_tokens: int = 0
    output_tokens: int = 0

    def refill(self, allowance: Allowance, now_s: float) -> None:
        """Fill the buckets for the time since the last call. A clock that was set back fills nothing."""
        share = max(0.0, now_s - self.filled_s) / 60.0
        self.filled_s = now_s
        requests, tokens = allowance.requests_per_minute, allowance.tokens_per_minute
        if requests is not None:
            self.minute_requests = min(max(1.0, requests), self.minute_requests + share * requests)
        if tokens is not None:
            self.minute_tokens = min(tokens, self.minute_tokens + share * tokens)
        day = int(now_s // DAY_S)
        if day != self.day:
            self.day, self.day_tokens = day, 0


class UsageCounter:
    """Counts and limits the usage of tenants in one worker.

    Args:
        folder: folder of the records; created if missing.
        now_s: returns seconds since 1970.
    """

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._now_s = folder, now_s
        self._open: Counter[str] = Counter()  # open answers of this worker, by tenant

    def admit(self, tenant: str, allowance: Allowance, prompt_tokens: int, answers: int) -> Callable[[int], object]:
        """Count a request, if the limits of its tenant allow it.

        Returns: a function to be called once, at the end, with the number of output tokens. Raises: ApiError, 429.
        """
        most = allowance.answers_max
        if most is not None and self._open[tenant] + answers > most:
            message = f"{self._open[tenant]} answers are open for this key, which has a limit of {most} open answers"
            raise ApiError(429, message)
        with self._changed(tenant) as record:
            now_s = self._now_s()
            record.refill(allowance, now_s)
            _refuse_too_much(record, allowance, now_s)
            record.minute_requests -= 1.0
            record.requests += 1
            record.prompt_tokens += prompt_tokens
            _take(record, prompt_tokens)
        self._open[tenant] += answers
        return partial(self._over, tenant, answers)

    def read(self, tenant: str, allowance: Allowance) -> UsageRecord:
        """Return the usage of a tenant so far."""
        with self._changed(tenant) as record:
            record.refill(allowance, self._now_s())
        return record

    def _over(self, tenant: str, answers: int, output_tokens: int) -> None:
        self._open[tenant] -= answers
        if not self._open[tenant]:
            del self._open[tenant]
        with self._changed(tenant) as record:
            record.output_tokens += output_tokens
            _take(record, output_tokens)

    @contextmanager
    def _changed(self, tenant: str) -> Iterator[UsageRecord]:
        """Yield a tenant's record under a lock, and write it afterwards, unless an exception ends the block."""
        path = self._folder / sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            written = os.pread(file, 4096, 0)
            record = msgspec.msgpack.decode(written, type=UsageRecord) if written else UsageRecord()
            yield record
            new = msgspec.msgpack.encode(record)
            os.pwrite(file, new, 0)
            if len(new) < len(written):
                os.ftruncate(file, len(new))
        finally:
            os.close(file)  # releases the lock as well


def _take(record: UsageRecord, tokens: int) -> None:
    record.minute_tokens -= tokens
    record.day_tokens += tokens


def _refuse_too_much(record: UsageRecord, allowance: Allowance, now_s: float) -> None:
    """Raise ApiError for a tenant that has reached its limits."""
    requests, tokens, day = allowance.requests_per_minute, allowance.tokens_per_minute, allowance.tokens_per_day
    if requests is not None and record.minute_requests < 1.0:
        wait_s = (1.0 - record.minute_requests) * 60.0 / requests
        raise ApiError(429, f"this key has a limit of {requests:g} requests a minute", retry_after_s=wait_s)
    if tokens is not None and record.minute_tokens <= 0.0:
        wait_s = (1.0 - record.minute_tokens) * 60.0 / tokens
        raise ApiError(429, f"this key has a limit of {tokens} tokens a minute", retry_after_s=wait_s)
    if day is not None and record.day_tokens >= day:
        wait_s = (record.day + 1) * DAY_S - now_s
        raise ApiError(429, f"this key has reached its limit of {day} tokens a day", retry_after_s=wait_s)
