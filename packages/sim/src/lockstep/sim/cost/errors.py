"""Errors of the cost model. Each names what was expected, what was found, and what to try."""

from __future__ import annotations


class CatalogueError(ValueError):
    """A model or GPU that is unknown, malformed, or of a kind the cost model would get wrong."""


class CapacityError(ValueError):
    """A model that does not fit, or cannot be split as requested."""


class CalibrationError(ValueError):
    """A calibration that cannot be read, or points that none can be made of."""
