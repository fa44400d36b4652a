"""A host of `lockstep.core` in real time, for any executor: a GPU, a CPU, or a clock.

`loop` drives an engine and a `batches.BatchExecutor`, writes the journal, and sends tokens and ends to the sink of each
request. `text` has the tokenizer, the chat template and stop texts of a model; it needs tokenizers and jinja2, which
`lockstep-core[text]` installs. No module of this package imports torch.
"""
