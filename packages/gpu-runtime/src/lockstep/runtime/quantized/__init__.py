"""Matrices in fewer bits: fp8 with scales of tensors, outputs or blocks, and 4 bits in groups, as in AWQ and GPTQ.

| file | content |
|---|---|
| `matrices.py` | this rank's part of a checkpoint's matrices, and the product in torch |
| `fp8.py`, `int4.py` | the two formats |
| `kernels.py` | the products in Triton: weights are widened when a tile is loaded |
| `activations.py` | whether rows are rounded to fp8, too |
| `fp8_kernels.py` | the rounding, and products of fp8 by fp8, in Triton |

`lockstep.host.quantization` reads their settings in config.json, and has the table of costs for the simulator.
"""
