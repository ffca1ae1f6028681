"""Vocabularies: one model's rules for turning text into token ids and back.

They do not know requests, sampling or devices, and load neither torch nor transformers.
"""
