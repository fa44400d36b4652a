"""What a run was like: folds over events and Steps, and the compact columns that they keep.

Imports `lockstep.core` and workload; results, report, run and cluster import it.
"""
