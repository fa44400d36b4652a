"""The HTTP side of an API worker: the application, one module for each family of endpoints, and what they share.

`schemas` holds the request bodies, `generation` the way from parameters to an engine's answers, `errors` every failure
that a client can receive. Imports `processes` (the bridge), `text` and `observability`.
"""
