"""Calibrations: cost models fitted to published serving points, to timed batches and to operator tables.

Imports cost and run; cli and tools import it.
"""
