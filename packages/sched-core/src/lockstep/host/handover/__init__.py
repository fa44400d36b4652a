"""Requests handed over from prefill to decode engines, in real hosts: their messages, and the state of each transfer.

wire.py       messages between the two hosts of a link, and their frames
link.py       a connection between two hosts, whose end ends every transfer on it
kv.py         the interface of the part that moves bytes: `lockstep.runtime.transfer`, or `lockstep.api.emulate`
results.py    results of the prompt, which go to the decode engine with its first token
prefill.py    the prefill engine's side
decode.py     the decode engine's side
"""
