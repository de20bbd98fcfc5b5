"""What is remembered between steps.

`storage` holds the tensors; all else keeps the books and does not import torch. `manager` is the door: requests hold
pages and slots (`blocks`, sized by `layout`), and what they have computed is published under the names of its tokens
(`boundaries`, `publish`, `prefix`, `content`), found again (`lookup`), and evicted when room is needed (`retention`,
`offload`), by the chance that somebody comes back (`chances`).
"""
