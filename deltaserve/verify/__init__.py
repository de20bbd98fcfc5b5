"""`deltaserve verify`: the gates that any user can run against a server or a model directory.

    command -> run -> gates/* -> lab -> a target (engine in this process, or a server's URL)
                         `-> book -> report (table, JSON, exit code)

A gate asks the same thing in two ways that must give one answer. It also counts the event that it is about (a hit, an
eviction, a preemption): where that did not happen, equal answers prove nothing, and the gate fails.
"""
