"""The errors of vocabularies, and who sees them.

Template failures are not here: ``TemplateError`` belongs to the tokenizer's contract.
"""


class VocabularyError(ValueError):
    """A model's files hold no usable vocabulary (seen by the operator at start), or a text cannot be encoded
    (seen by the caller as a refusal)."""
