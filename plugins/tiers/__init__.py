"""In-tree plugins: tiers."""
