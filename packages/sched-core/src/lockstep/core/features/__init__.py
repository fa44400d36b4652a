"""Features that take part in scheduling where a configuration asks for them, one module each.

Imports contract, requests and KV memory; the scheduler calls the features and never the other way round.
"""
