"""Requests: their lifecycle, validation on arrival, prerequisites, and the columns of those that run.

Imports the contract. The scheduler, the features and the KV memory may import it.
"""
