"""The fast path: compiled simulation of runs with only arrivals, chunks, decodes and ends, equal to runs of the core.

Imports cost, workload, metrics and host; run and cluster import it.
"""
