"""The GPU host of `lockstep.core`. Not written yet: this package only reserves its name and its dependencies.

It will hold the torch host: a loop like the simulator's, whose commands are kernels on a stream instead of timeouts,
and whose journal replays in the simulator decision for decision.
"""
