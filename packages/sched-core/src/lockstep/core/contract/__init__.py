"""The contract between core and host: observed events, decided events, commands, settings, digest, text form, errors.

Imports nothing else of the core. Every other room, every host and every tool may import it.
"""
