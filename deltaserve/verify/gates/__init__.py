"""The gates, one family a file. Each is a function of the lab and of the book it writes into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltaserve.core.errors import ConfigError
from deltaserve.verify.book import Book
from deltaserve.verify.gates.batched import check_batched
from deltaserve.verify.gates.burst import check_burst
from deltaserve.verify.gates.cached import check_cached
from deltaserve.verify.gates.chunked import check_chunked
from deltaserve.verify.gates.drafts import check_drafts
from deltaserve.verify.gates.isolation import check_isolation
from deltaserve.verify.gates.memory import check_memory
from deltaserve.verify.gates.needles import check_needles
from deltaserve.verify.gates.offloaded import check_offloaded
from deltaserve.verify.gates.options import check_options
from deltaserve.verify.gates.parallel import check_parallel
from deltaserve.verify.gates.preempted import check_preempted
from deltaserve.verify.gates.residency import check_residency
from deltaserve.verify.lab import Lab


@dataclass(frozen=True, slots=True)
class Gate:
    """`claim` is what holds if it passes."""

    name: str
    claim: str
    run: Callable[[Lab, Book], None]


# Memory comes last: it looks at the whole run.
GATES = (
    Gate("chunked", "a prompt in chunks answers as in one piece", check_chunked),
    Gate("batched", "company in the batch changes nothing", check_batched),
    Gate("cached", "a cached prefix answers as a cold one", check_cached),
    Gate("preempted", "a preempted request answers as an undisturbed one", check_preempted),
    Gate("offloaded", "what went to host memory and back answers as if it had stayed", check_offloaded),
    Gate("drafts", "speculation changes no token", check_drafts),
    Gate("isolation", "nothing of one request reaches another, nothing is shared across salts", check_isolation),
    Gate("needles", "a word is found at any depth, cold and cached", check_needles),
    Gate("residency", "many contexts stay at once without preemption", check_residency),
    Gate("burst", "many requests at once are all answered, and leave nothing behind", check_burst),
    Gate("options", "sampling options take effect", check_options),
    Gate("parallel", "several ranks answer as one", check_parallel),
    Gate("memory", "free memory never fell below the floor", check_memory),
)


def choose(names: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Gate]:
    """All gates, or those named, less those left out. Raises ConfigError for a name that no gate has."""
    known = [gate.name for gate in GATES]
    for name in (*names, *without):
        if name not in known:
            raise ConfigError(f"there is no gate {name!r}; there are {', '.join(known)}")
    return [gate for gate in GATES if (not names or gate.name in names) and gate.name not in without]
