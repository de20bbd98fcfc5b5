"""What is remembered between steps.

`layout`, `blocks` and `manager` keep the books and do not import torch; `storage` holds the tensors.
"""
