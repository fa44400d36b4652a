"""Matrices in fewer bits: fp8 with scales of tensors, outputs or blocks, and 4 bits in groups, as AWQ and GPTQ do.

| file | what it is |
|---|---|
| `matrices.py` | what of a checkpoint goes where on this rank, and the product in torch |
| `fp8.py`, `int4.py` | the two ways of storing |
| `kernels.py` | the products in Triton: weights are widened on their way into a tile |
| `activations.py` | whether rows are rounded to fp8, too |
| `fp8_kernels.py` | the rounding, and products of fp8 by fp8, in Triton |

Their settings in config.json are read by `lockstep.host.quantization`, with the table by which the simulator prices
them.
"""
