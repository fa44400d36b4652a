"""LoRA: low-rank matrices that are added to a model's matrices, a different pair for each request of a batch.

    y = W x + scaling * up (down x)          down [rank, inputs], up [outputs, rank]

| file | content |
|---|---|
| `slots.py` | the adapter slots on the device, and the product in torch |
| `batch.py` | the tokens of a pass by slot |
| `kernels.py` | the same product in Triton |
| `peft.py` | an adapter's folder: settings, tensors, all problems with them in one error |
| `host_cache.py` | adapters in host memory, and their copies into slots while batches run |
"""
