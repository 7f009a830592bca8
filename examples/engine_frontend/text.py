"""Texts as tokens: printable ASCII, a letter each, and a token that ends a text."""

from __future__ import annotations

import string
from collections.abc import Sequence

ALPHABET = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))
END = len(ALPHABET)
VOCABULARY = len(ALPHABET) + 1


def encode(text: str) -> list[int]:
    return [ALPHABET.find(letter if letter in ALPHABET else "?") for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens if token != END)
