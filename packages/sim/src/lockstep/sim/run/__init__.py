"""One simulated run from its scenario to its run folder, and the interval around its answers.

Imports host, cost, workload, metrics and results; cluster, plan and cli import it.
"""
