"""The GPU host of `lockstep.core`: the same scheduler as in the simulator, whose commands are kernels on a stream.

Nothing is decided here. A host (`host.py`) takes in facts and performs commands; an executor (`executor.py`) folds each
plan into the device's tables and runs it. docs/runtime.md shows how the parts fit together.
"""
