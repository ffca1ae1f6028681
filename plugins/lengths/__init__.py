"""In-tree plugins: lengths."""
