"""States of layers that keep no KV, on the device: linear attention, state space layers, short convolutions.

    pool     the tensors of all layers, by slot
    view     which states a pass begins with, and where it stores those that it leaves
    slots    the slots of each row, as a fold over plans

The scheduler decides which row has which slot, and where checkpoints are kept (`core/kv/state_pool.py`).
"""
