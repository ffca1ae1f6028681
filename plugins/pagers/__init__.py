"""In-tree plugins: pagers."""
