"""Calibrations: cost models fitted to published serving points, to timed batches and to operator tables.

Imports cost, catalogue, workload, metrics, host and results; cli and tools import it.
"""
