"""Several simulated engines: behind a router, handing requests over, or running every pass together.

Imports run and the rooms below it, except the catalogue; plan and cli import it.
"""
