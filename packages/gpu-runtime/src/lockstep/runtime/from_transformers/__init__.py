"""A model backend that runs transformers' own modelling code with our attention, KV pool and batches.

A decoder of transformers computes everything except attention token by token, and calls one function for attention
(its attention interface). Here that function writes the new keys and values to the pages of the pool and attends over
them. So the flattened batch of a pass, new tokens of all rows end to end with their positions, is one sequence for the
library's code, and no row sees another.

    settings    config.json by the library's config class; everything that cannot run so is refused with its reason
    attending   the function behind the attention interface
    split       tensor parallel by the plan of the library's model, and the matrices that adapters may change
    tensors     names of tensors in checkpoints, by the library's conversions
    trial       one small pass: what each layer requires of attention, and that tokens mix nowhere else
    decoder     the model
    mtp         the layer of a model's checkpoint that drafts

Only this package imports transformers, and only when a model needs it.
"""
