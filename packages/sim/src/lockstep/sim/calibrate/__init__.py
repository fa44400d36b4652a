"""Calibrations: cost models fitted to requests, serving points, timed batches and operator tables.

Imports cost, catalogue, workload, metrics, host, scenario, results and run; cli and tools import it.
"""
