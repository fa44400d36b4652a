"""What to simulate: the options of one engine and of a cluster, declared once and read from command lines.

Imports cost, workload and metrics; host, run, cluster, plan and cli import it.
"""
