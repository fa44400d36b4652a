"""Text of prompts and answers: token ids to text and back, the names of tokens, and the formats of chat models.

Imports only the messages of `processes.wire`; nothing here opens a socket or reads a request's body.
"""
