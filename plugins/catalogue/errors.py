"""The errors of the catalogue, and who sees them."""


class CatalogueError(Exception):
    """Seen by the operator: a model path stands for nothing, or a named model cannot be fetched. Says what to do."""
