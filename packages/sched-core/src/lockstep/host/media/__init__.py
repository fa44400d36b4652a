"""Media of prompts: read within limits, prepared for the encoder of a model, and sent to the engine as plain arrays.

    URL ──source──> bytes ──images, audio, video──> pixels, samples, frames ──processor──> arrays of the encoder,
                                                                                  and the prompt with placeholders

    given       embeddings that a client gives in place of tokens
    content     what the encoder receives, under its digest; it never enters a journal
    source      bytes of a data URL, a file of an allowed folder, or an address, if that is allowed
    kinds       the kinds of media, and what each needs
    images      the bytes as an image, within limits of size
    audio       the bytes as samples of one channel, within limits of length
    video       the bytes as some of their frames, within limits of length and size
    frames      which frames those are, and Qwen-VL's patches of them without torchvision
    processor   the model's own processor: arrays, and the tokens that stand for a medium

Pillow, soundfile, soxr, PyAV and transformers are imported at first use. No torch.
"""
