"""In-tree plugins: commands."""
