"""Requests about the engine itself: control requests, maintenance of weights and memory, statistics and health.

Imports contract, requests and KV memory; the scheduler and the hosts may import it.
"""
