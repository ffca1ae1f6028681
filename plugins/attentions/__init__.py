"""In-tree plugins: attentions."""
