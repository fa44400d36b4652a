"""One simulated run from its scenario to its run folder.

Imports every room but calibrate, cluster, plan and cli, which import it.
"""
