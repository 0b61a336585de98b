"""What a user makes once and passes to each call: positions, norms, caches, conversions."""
