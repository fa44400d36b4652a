"""Long runs against a live server: its guarantees, at a volume that exceeds the time of a test."""
