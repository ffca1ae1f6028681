"""In-tree plugins: evictions."""
