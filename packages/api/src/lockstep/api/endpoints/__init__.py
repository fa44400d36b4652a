"""HTTP of an API worker: the application, one module for each family of endpoints, and modules that these share.

`schemas` contains the request bodies, `generation` turns parameters into requests and results into answers, `errors`
contains every failure that a client can receive. Imports `processes` (the bridge), `text` and `observability`.
"""
