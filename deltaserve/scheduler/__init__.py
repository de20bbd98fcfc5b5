"""Decides what each step computes; the runner obeys. No torch."""
