"""Requests: their lifecycle and validation, running batches, batches in flight, token budgets and delivery.

Imports the contract. KV memory, features and the scheduler import it.
"""
