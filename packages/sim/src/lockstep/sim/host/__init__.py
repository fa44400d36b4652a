"""The simulated host of one engine: its CPU lane, its device, its cache tiers and its encoders, in virtual time.

Imports cost, workload, metrics and scenario. Fast, results, run, calibrate, cluster and plan import it.
"""
