"""The processes of `lockstep serve`: launcher, supervisors, fork server, engine, router, and a worker's bridge to them.

Every message between two processes is declared in `wire` (ZMQ) or `engine_messages` (pipes of the fork server).
Imports settings and engines, and nothing of `endpoints`: these processes contain no HTTP.
"""
