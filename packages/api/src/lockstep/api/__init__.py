"""HTTP serving in front of engine processes: `lockstep serve`. docs/serving.md shows how the parts fit together.

Everything here is about text, sockets and clients; no scheduling policy belongs here. Rooms: `processes` (launcher,
engine and router processes, and the messages between them), `endpoints` (HTTP), `text` (token ids and text) and
`observability` (metrics, logs, spans). `serve`, `settings`, `engines`, `emulate` and `worker` use all of them.
"""
