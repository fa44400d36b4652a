"""KV pages from a prefill to a decode engine: out of one pool, through staging memory, into another.

transports.py     the interface of staging memory, and the transports by name
shared_memory.py  memory that both processes map
tcp.py            memory that its owner sends, to any machine
nixl.py           memory that the other side reads by NIXL
blocks.py         what is sent: full pages, pages of windows, states in pieces
slices.py         which heads of which ranks a rank needs, for any two tensor-parallel sizes
rank.py           one rank: pages into slots, slots into pages
lead.py           all ranks of an engine: `lockstep.host.handover.kv.KvTransport`
"""
