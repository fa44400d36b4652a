"""Errors in answers to clients: one shape, usual status codes, and a sentence with cause and remedy.

{"error": {"message": "...", "type": "BadRequestError", "param": "max_tokens", "code": 400}}
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import ceil
from typing import Any

from lockstep.api.processes.wire import SampleEnded

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CLIENT_LEFT = 499
"""Status of a request whose client left. It occurs in the log and in metrics only."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the invalid field, if the error is about a field.
        retry_after_s: seconds after which a retry makes sense, if known.
    """

    def __init__(self, status: int, message: str, param: str | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the error as a JSON object of OpenAI's API."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def anthropic(self) -> dict[str, Any]:
        """Return the error as a JSON object of Anthropic's API."""
        kind = ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer: Retry-After for statuses 429 and 503."""
        return {"Retry-After": str(max(1, ceil(self.retry_after_s)))} if self.status in (429, 503) else {}


REJECTED = {
    "queue_full": 503,
    "draining": 503,
    "deadline": 504,
    "too_long": 400,
    "bad_request": 400,
    "unsupported": 400,
    "session_closed": 400,
    "grammar": 400,
    "media": 400,
}
"""Reason of a rejection by the core -> status."""

FAILED = {
    "engine": 503,
    "timeout": 504,
    "error": 500,
    "invalid": 500,
    "transfer": 500,
    "out_of_kv": 500,
}
"""Reason of the failure of an answer -> status."""

SENTENCES = {
    "timeout": "the request ran out of time",
    "error": "the model failed",
    "invalid": "the model's logits were not finite, or no token was allowed",
    "out_of_kv": "the request does not fit into the engine's memory",
    "transfer": "a transfer between engines failed",
}


def failure(ended: SampleEnded) -> ApiError | None:
    """Return the error of an answer that ended; None if it did not fail."""
    status = REJECTED.get(ended.reason, 400) if ended.rejected else FAILED.get(ended.reason)
    if status is None:
        return None
    return ApiError(status, for_clients(ended.error or SENTENCES.get(ended.reason, ended.reason)))


# ------------------------------------------------------------------------------------------------------------- sessions

TENANT_MARK = re.compile(r"(?<=['\"])[0-9a-f]{16} ")


def session_name(tenant: str, given: str) -> str:
    """Return the engine's name of a session. Sessions of different tenants with the same name are distinct."""
    return f"{sha256(tenant.encode('utf-8', 'surrogatepass')).hexdigest()[:16]} {given}"


def for_clients(message: str) -> str:
    """Return a message of the engine with the session names of clients."""
    return TENANT_MARK.sub("", message)
