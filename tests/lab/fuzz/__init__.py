"""Attacks with random input: each takes a seed and says what is wrong, '' if nothing is.

The default run tries a few fixed seeds, `pytest -m slow` many fresh ones, which it prints.
"""
