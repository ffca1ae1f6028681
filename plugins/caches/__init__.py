"""In-tree plugins: caches."""
