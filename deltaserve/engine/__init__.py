"""The loop that serves requests, the process it runs in, and both ways to reach it: Client (async) and LLM (offline).

    LLM ------------------------> loop.Engine -> scheduler, runner
    Client --> zmq --> process --^

`client`, `launch`, `messages`, `text`, `tokenizer` and `admission` never import torch: a server process uses them.
"""
