"""In-tree plugins: quantizations of keys and values."""
