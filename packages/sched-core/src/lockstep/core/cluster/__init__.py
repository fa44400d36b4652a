"""Decisions about several engines: routing, the router's queue, autoscaling, and the placement of experts.

Imports the contract only. Simulated clusters and the server's router import it; the scheduler does not.
"""
