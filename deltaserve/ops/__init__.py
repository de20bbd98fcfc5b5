"""Maths on tensors, one folder per op: `reference.py` first, kernels beside it, `__init__.py` chooses.

Ops know tensors and row layouts; no config, no mesh, no request.
"""
