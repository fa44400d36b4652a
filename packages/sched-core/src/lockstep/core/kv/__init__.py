"""KV memory: the page pool, the radix cache, window and state blocks, and the host and storage tiers below the device.

Imports the contract and the requests. The scheduler, the features and the journal may import it.
"""
