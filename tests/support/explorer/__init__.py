"""Small worlds, explored whole: every interleaving of the events of a few requests on an engine with a few pages.

`world` has the moves of a small world, `canonical` tells its states apart, `copies` returns to a state, `search` goes
through all of them and checks liveness on the graph, `catalogue` has the worlds. Imports the driver and the core.
"""
