"""HTTP serving in front of an engine process. Not written yet: this package only reserves its name and dependencies.

It will hold the OpenAI-compatible endpoints and the messages between the API process and the engine process. No
scheduling policy belongs here.
"""
