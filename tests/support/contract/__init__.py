"""The contract between core and host as machines of its own, with no line of core or host in them.

`machine` has what they share, `engine_machine` one engine with its journal, `transfer_machine` a room between a prefill
and a decode engine, `rank_machine` the rounds of data-parallel ranks. `worlds` has the bounds in which the explorer
goes through all of their states. `engine_host`, `transfer_host` and `rank_host` run the product and name each of its
steps, so that a machine can check that docs/contract.md allows it. `violations` breaks the contract on purpose.
"""
