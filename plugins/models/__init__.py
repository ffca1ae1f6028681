"""In-tree plugins: models."""
