"""Ranks and exchange between them; no model words."""
