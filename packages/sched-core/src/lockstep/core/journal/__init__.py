"""The journal: records on disk, replay of a recorded run, and snapshots of an engine's whole state.

Replay and snapshots import the scheduler. No other package of the core imports them; hosts and tools may.
"""
