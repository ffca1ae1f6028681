"""In-tree plugins: backends."""
