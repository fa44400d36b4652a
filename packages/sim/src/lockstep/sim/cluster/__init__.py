"""Several simulated engines: behind a router, handing requests over, or running every pass together.

Imports host, metrics and run; plan and cli import it.
"""
