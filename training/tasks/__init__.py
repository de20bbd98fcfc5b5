"""What the model learns, one module for each skill.

An exchange is a user's turn and the answer, sometimes several; `Draw` makes it, and keeps training and held-out
material apart. `training.data` puts exchanges together to conversations and these to sequences.
"""
