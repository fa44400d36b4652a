"""Measures of a run: folds over events and Steps, their compact columns, summaries, SLOs, intervals, balance.

Imports `lockstep.core` only; every room above workload may import it.
"""
