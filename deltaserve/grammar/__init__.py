"""Grammars that answers are held to: their text, whether one can be used, and which tokens may come next.

Without torch, so that the edge can check what a client sends and the runner can enforce it by the same rules.
"""
