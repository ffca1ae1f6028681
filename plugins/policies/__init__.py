"""In-tree plugins: policies."""
