"""The journal: records on disk, replay of a recorded run, and snapshots of an engine's whole state.

Replay and snapshots import the scheduler; nothing in the core imports them. Hosts and tools may.
"""
