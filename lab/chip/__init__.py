"""Chip day: what a machine with a Trainium settles, and rehearsals of it.

Nothing here decides whether a chip is there: a `Device` compiles, runs and times; one stands for
the chip, one for a simulator whose coefficients nobody has seen.
"""
