"""Words everyone shares. No torch; imports nothing of ours."""
