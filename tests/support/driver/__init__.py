"""A driver of one engine under test: `driver` composes one piece per feature, `draw` draws settings and actions.

Used by the swarm, the properties and the tests of the core. Imports the core and the tagged devices beside it.
"""
