"""Commands of the simulator: argument parsing, progress and printing only.

Imports every other room of the simulator; only the entry points of the package import it.
"""
