"""The fast path: runs of simple configurations as compiled code, equal to runs of the core.

Imports host, cost and metrics; run and cluster import it.
"""
