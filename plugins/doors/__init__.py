"""In-tree plugins: doors."""
