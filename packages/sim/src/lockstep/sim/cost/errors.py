"""Errors of the cost model. Each names what was expected, what was found, and what to try."""

from __future__ import annotations


class CatalogueError(ValueError):
    """A model or GPU that is unknown, malformed, or of a kind that the cost model does not cover."""


class CapacityError(ValueError):
    """A model that does not fit, or cannot be split as requested."""


class CalibrationError(ValueError):
    """A calibration file that cannot be read, or measurements that cannot be fitted."""
