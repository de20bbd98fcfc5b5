"""Reading what a model writes: text in pieces of any size becomes thinking, answer and tool calls.

`message` puts the parts together: `reasoning` takes the thinking off, `calls` finds tool calls in the rest and hands
each to `xml_call` or `json_call`, and `sink` collects what they find. All of it is plain string work without an
engine. One rule holds everywhere: what comes out depends on the text alone, never on where it was cut; so text that
may yet become a mark waits, and waits no longer than that.
"""
