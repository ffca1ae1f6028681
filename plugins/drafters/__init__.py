"""In-tree plugins: drafters."""
