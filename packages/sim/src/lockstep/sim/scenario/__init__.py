"""What to simulate: the options of one engine and of a cluster, declared once and read from command lines.

Imports core, host, cost and metrics; every other room of the simulator may import it.
"""
