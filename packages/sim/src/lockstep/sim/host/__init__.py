"""The simulated host of one engine: its CPU lane, its device, its memory tiers and its encoders, in virtual time.

Imports workload, cost and catalogue. Cluster, run and fast path import it.
"""
