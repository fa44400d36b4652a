"""LoRA: matrices of low rank that are added to a model's, a different pair for each request of a batch.

    y = W x + scaling * up (down x)          down [rank, inputs], up [outputs, rank]

| file | what it is |
|---|---|
| `slots.py` | where adapters lie on the device, which token runs on which, and the product in torch |
| `kernels.py` | the same product in Triton |
| `peft.py` | an adapter's folder: settings, tensors, everything that is wrong with them in one error |
| `shelf.py` | adapters in host memory, and their way into slots beside what runs |
"""
