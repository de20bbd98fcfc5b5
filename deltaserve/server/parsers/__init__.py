"""Splitting what a model writes: one small module per format, fed text in pieces of any size."""
