"""Minimum free memory: what the machine had left at the worst moment of the whole run, against a floor."""

from __future__ import annotations

from deltaserve.verify.book import Book
from deltaserve.verify.lab import Lab, needs_engine

MIB = 1 << 20


def check_memory(lab: Lab, book: Book) -> None:
    """Judges what was seen so far, so it runs last."""
    needs_engine(lab, "a server's memory is not visible to its clients")
    assert lab.memory is not None, "the run watches the memory"
    floor_bytes, least_bytes = lab.options.min_free_bytes, lab.memory.least_bytes
    detail = f"at least {least_bytes // MIB:,} MiB were free; the floor is {floor_bytes // MIB:,} MiB"
    book.expect("free memory over the floor", least_bytes >= floor_bytes, detail)
    book.event("looks", lab.memory.num_looks)
    book.note(detail)
