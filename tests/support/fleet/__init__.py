"""Prefill and decode engines with tagged KV and a network between them: `fleet`, its wires, and random histories.

Used by tests of several engines and by the fleet swarm. Imports the core, the driver's drawing and the tagged devices.
"""
