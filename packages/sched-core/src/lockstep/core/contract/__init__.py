"""The contract between core and host: observed events, decided events, commands, settings, digest, text form, errors.

Imports no other package of the core. Every other package of the core, every host and every tool may import it.
"""
