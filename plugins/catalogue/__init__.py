"""The catalogue: models that a name stands for, fetched at first use from where they are published.

It does not know what is inside a model file.
"""
