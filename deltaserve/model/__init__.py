"""The architecture and nothing else: no rank arithmetic, no cache policy."""
