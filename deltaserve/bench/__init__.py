"""Measurements: `deltaserve bench`. Every figure leaves with its hardware, shape, commit and command."""
