"""What a client is told when something is wrong: one shape, the field's status codes, a sentence that helps.

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
"""In the log and in metrics only: there is nobody to tell."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field that is wrong, if it is one.
        retry_after_s: when to come again, where that is known.
    """

    def __init__(self, status: int, message: str, param: str | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def anthropic(self) -> dict[str, Any]:
        """As clients of Anthropic's API read it."""
        kind = ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """What goes with it: when to come again."""
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
"""Status by the core's reason to reject."""

FAILED = {
    "engine": 503,
    "timeout": 504,
    "error": 500,
    "invalid": 500,
    "transfer": 500,
    "out_of_kv": 500,
}
"""Status by the reason with which an answer ended that is no answer."""

SENTENCES = {
    "timeout": "the request ran out of time",
    "error": "the model failed",
    "invalid": "the model's logits were no numbers, or nothing was allowed to be said",
    "out_of_kv": "the request does not fit into the engine's memory",
    "transfer": "a transfer between engines failed",
}


def failure(ended: SampleEnded) -> ApiError | None:
    """What is wrong with an answer that ended like this; None if nothing is."""
    status = REJECTED.get(ended.reason, 400) if ended.rejected else FAILED.get(ended.reason)
    if status is None:
        return None
    return ApiError(status, for_clients(ended.error or SENTENCES.get(ended.reason, ended.reason)))


# ------------------------------------------------------------------------------------------------------------- sessions

TENANT_MARK = re.compile(r"(?<=['\"])[0-9a-f]{16} ")


def session_name(tenant: str, given: str) -> str:
    """What the engine calls a tenant's session: another tenant's of the same name is another one."""
    return f"{sha256(tenant.encode('utf-8', 'surrogatepass')).hexdigest()[:16]} {given}"


def for_clients(message: str) -> str:
    """A message of the engine, with sessions as clients call them."""
    return TENANT_MARK.sub("", message)
