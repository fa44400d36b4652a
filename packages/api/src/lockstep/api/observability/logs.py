"""The log of a process: text lines, or with `log_format` json one object per line."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Literal

LogFormat = Literal["text", "json"]

EXTRA = "fields"
"""Attribute of a log record with further fields, a dict: `log.info(..., extra={EXTRA: {...}})`."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line: time, level, process, logger, message, further fields, exception text."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._role,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, EXTRA, {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def start_log(level: str, role: str, form: LogFormat = "text") -> None:
    """Set up logging to stderr. `role` is the name of the process in each line."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(f"%(asctime)s %(levelname)s {role}: %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(role) if form == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
