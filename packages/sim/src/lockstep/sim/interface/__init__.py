"""The commands as functions for scripts and notebooks, under the names that the package `lockstep` exports.

No other package of the simulator imports this one; it imports the commands, whose parsers read its keywords.
"""
