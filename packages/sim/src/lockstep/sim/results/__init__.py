"""Results of runs: tables and files of a run folder, stored runs read back, comparisons, traces for Perfetto.

Imports metrics; report, run, plan and cli import it.
"""
