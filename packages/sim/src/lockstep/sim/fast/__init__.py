"""The fast path: runs with nothing but arrivals, chunks, decodes and ends, as compiled code, equal to runs of the core.

Imports cost, workload, metrics and host; run and cluster import it.
"""
