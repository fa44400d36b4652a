"""Features that take part in scheduling where a configuration has them, one module each.

Imports contract, requests and KV memory. Features take a `SchedulerView` (view.py) and never import the scheduler.
"""
