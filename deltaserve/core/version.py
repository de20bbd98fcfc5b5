"""The version, for whoever must not import the package's public surface (which leads to torch)."""

VERSION = "0.1.0"
