"""The scheduler: `Engine.step`, and one module for each decision that it takes.

Imports contract, requests, KV memory and features. Only the journal and the hosts import it.
"""
