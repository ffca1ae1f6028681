"""In-tree plugins: acceptances."""
