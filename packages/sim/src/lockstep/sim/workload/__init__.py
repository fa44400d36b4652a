"""Workloads: generated, recorded, fitted, mixed, or kept at a concurrency; all of them end as columns of turns.

Imports `lockstep.core` only. Every other room of the simulator may import it.
"""
