"""Texts of other programs, which go to other ranks."""

from __future__ import annotations


def encodable(text: str) -> str:
    """The text in a form that UTF-8 can hold: in Python, names that are none have surrogates."""
    return text.encode(errors="backslashreplace").decode()
