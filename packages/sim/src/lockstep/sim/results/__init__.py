"""Results of runs: tables and files of a run folder, stored runs read back, comparisons, traces for Perfetto.

Imports cost, workload, metrics and host; report, run, calibrate, cluster, plan and cli import it.
"""
