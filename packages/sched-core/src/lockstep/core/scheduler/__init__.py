"""The scheduler: state and verbs, planners for prefill and decode, results, and `Engine.step`.

Imports every room below: contract, requests, KV memory, features and admin. The journal and the hosts import it.
"""
