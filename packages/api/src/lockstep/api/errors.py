"""What a client is told when something is wrong: one shape, the field's status codes, a sentence that helps.

{"error": {"message": "...", "type": "BadRequestError", "param": "max_tokens", "code": 400}}
"""

from __future__ import annotations

from typing import Any

from lockstep.api.wire import Ended

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
CLIENT_LEFT = 499
"""In the log and in metrics only: there is nobody to tell."""

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field that is wrong, if it is one.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        """What goes with it: when to come again."""
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


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


def failure(ended: Ended) -> ApiError | None:
    """What is wrong with an answer that ended like this; None if nothing is."""
    status = REJECTED.get(ended.reason, 400) if ended.rejected else FAILED.get(ended.reason)
    if status is None:
        return None
    return ApiError(status, ended.error or SENTENCES.get(ended.reason, ended.reason))
