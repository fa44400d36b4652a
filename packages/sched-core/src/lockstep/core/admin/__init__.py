"""Control requests, maintenance of the device, and the watchdog over an engine's statistics.

Imports contract, requests, KV memory and features. The scheduler imports it.
"""
