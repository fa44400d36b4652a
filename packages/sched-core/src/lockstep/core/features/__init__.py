"""Optional features of the scheduler, one module each. The configuration decides which of them an engine has.

Imports contract, requests and KV memory. Features receive a `SchedulerView` (view.py) and never import the scheduler.
"""
