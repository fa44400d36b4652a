"""One simulated run from its scenario to its run folder.

Imports every room but calibrate, cluster, plan and cli; cluster, plan and cli import it.
"""
