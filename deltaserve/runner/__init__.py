"""Obeys: turns a plan into tensors, runs the model, chooses tokens."""
