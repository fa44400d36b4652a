"""HTTP serving in front of an engine process: `lockstep serve`. docs/serving.md shows how the parts fit together.

Here is what is about text, sockets and clients. No scheduling policy belongs here.
"""
