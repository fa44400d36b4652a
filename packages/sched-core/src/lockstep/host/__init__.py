"""A host of `lockstep.core` in real time, for whatever runs its batches: a GPU, a CPU, or a clock.

`loop` drives an engine and an executor that it is given (`batches.BatchExecutor`), journals, and tells each request's
sink what came of it. `text` is a tokenizer with its chat template and stop texts; it needs tokenizers and jinja2, which
come with `lockstep-core[text]`. Nothing here imports torch.
"""
