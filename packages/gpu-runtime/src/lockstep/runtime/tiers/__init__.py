"""Host memory and storage below the KV cache of one rank: the content of a page, its copies, its names in storage.

page_parts.py   the tensors of which a page, a window or a state has a part: KV, of a drafter, tokens, states and tags
mover.py        carries out moves: copies between device and host memory, reads and writes of storage
identity.py     the model and the layout of stored pages, so that engines share them only if they agree in all of it
below.py        makes them by the options of an engine
lead.py         orders each move on every rank of a tensor-parallel group
"""
