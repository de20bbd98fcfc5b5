"""Request traces in Mooncake's format: one JSON object a line, text named by hash ids of 512 tokens each.

| field         | meaning                                                                                     |
| ------------- | ------------------------------------------------------------------------------------------- |
| input_length  | tokens of the prompt, at least 1 (`input_tokens` is read as the same)                       |
| output_length | tokens of the answer, at least 1                                                            |
| hash_ids      | one id per 512 tokens of the prompt, the last one of what is left; same id = same text      |
| timestamp     | optional, milliseconds since the trace began                                                |
| delay         | optional, milliseconds since the answer before it in its session                            |
| session_id    | optional, a label: each row holds its whole prompt, history included                        |

A row without hash ids has a text of its own. Other fields are passed over. What cannot be replayed as it is (a Git LFS
pointer, an empty file, a row that is not all of this) is refused with its line, field and remedy; nothing is skipped,
so the rows read are the lines of the file.

`RowTexts` turns rows into token ids, the same in every process: exactly `input_length`, equal for equal hash ids.
`HashIds` goes the other way, from token ids to hash ids.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from deltaserve.core.errors import ConfigError

HASH_TOKENS = 512
_LFS_HEAD = "version https://git-lfs"
_OTHER_PROMPTS = ("text_input", "messages", "payload")
_MAX_TEXTS_KEPT = 1 << 14


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; what is None or empty was not in the file."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    timestamp_ms: float | None = None
    delay_ms: float | None = None
    session_id: str | None = None


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """All rows of the file, in its order. ConfigError names the first line that is wrong."""
    try:
        lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give the path of a JSONL trace") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; unpack it first if it is compressed") from error
    if lines == [""]:
        raise ConfigError(f"{path} is empty; a trace has one JSON object a line")
    if lines[0].startswith(_LFS_HEAD):
        raise ConfigError(f"{path} is a Git LFS pointer, not the trace; fetch the data with `git lfs pull`")
    return tuple(_parse_row(line, f"{path.name} line {number}") for number, line in enumerate(lines, 1))


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """The inverse of `read_trace`."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            fields = {
                "timestamp": row.timestamp_ms,
                "delay": row.delay_ms,
                "session_id": row.session_id,
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": list(row.hash_ids) or None,
            }
            file.write(json.dumps({name: value for name, value in fields.items() if value is not None}) + "\n")


def num_hash_ids(input_length: int) -> int:
    return -(-input_length // HASH_TOKENS)


class RowTexts:
    """Token ids of rows, drawn from `low` <= id < `high`. The latest texts are kept: 16,384 of 512 tokens."""

    def __init__(self, low: int, high: int) -> None:
        assert 0 <= low < high, (low, high)
        self._ids = tuple(range(low, high))
        self._texts: dict[str, tuple[int, ...]] = {}

    def token_ids(self, row: TraceRow, row_number: int) -> tuple[int, ...]:
        """`row.input_length` ids. `row_number` tells rows without hash ids apart."""
        names = [f"hash {hash_id}" for hash_id in row.hash_ids]
        if not names:
            names = [f"row {row_number} part {part}" for part in range(num_hash_ids(row.input_length))]
        flat: list[int] = []
        for name in names:
            flat += self._text(name)
        return tuple(flat[: row.input_length])

    def answer_ids(self, row: TraceRow, row_number: int) -> tuple[int, ...]:
        """An answer of `row.output_length` ids that no other row has."""
        return tuple(random.Random(f"answer {row_number}").choices(self._ids, k=row.output_length))

    def _text(self, name: str) -> tuple[int, ...]:
        text = self._texts.pop(name, None)
        if text is None:
            text = tuple(random.Random(name).choices(self._ids, k=HASH_TOKENS))
            if len(self._texts) >= _MAX_TEXTS_KEPT:
                del self._texts[next(iter(self._texts))]
        self._texts[name] = text
        return text


class HashIds:
    """Gives prompts hash ids, counting up from 0; an id stands for a block and all that comes before it.

    A last block that is not full takes the id of what was there before if one of the two begins with the other, so that
    a conversation that grows keeps all of its common text.
    """

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._open: dict[bytes, tuple[int, bytes]] = {}  # parent's digest -> id and tokens of a block not full yet
        self._next = 0

    def of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """One id per 512 tokens; `token_ids` is a whole prompt."""
        raw = array("i", token_ids).tobytes()
        step = HASH_TOKENS * array("i").itemsize
        parent, found = b"", []
        for start in range(0, len(raw), step):
            block = raw[start : start + step]
            digest = blake2b(parent + block, digest_size=16).digest()
            found.append(self._id_of(parent, block, digest, is_full=len(block) == step))
            parent = digest
        return tuple(found)

    def _id_of(self, parent: bytes, block: bytes, digest: bytes, is_full: bool) -> int:
        if digest in self._ids:
            return self._ids[digest]
        open_id, open_block = self._open.get(parent, (None, b""))
        if open_id is not None and block.startswith(open_block):
            hash_id = open_id
            del self._open[parent]
        elif open_id is not None and open_block.startswith(block):
            return open_id
        else:
            hash_id = self._next
            self._next += 1
        if not is_full:
            self._open.setdefault(parent, (hash_id, block))
        self._ids[digest] = hash_id
        return hash_id


def _parse_row(line: str, where: str) -> TraceRow:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg}); each line must be one whole object") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is not a JSON object; each line must be one whole object")
    _refuse_other_kinds(fields, where)
    if "input_tokens" in fields and "input_length" not in fields:
        fields["input_length"] = fields["input_tokens"]
    row = TraceRow(
        input_length=_count(fields, "input_length", where),
        output_length=_count(fields, "output_length", where),
        hash_ids=_hash_ids(fields, where),
        timestamp_ms=_milliseconds(fields, "timestamp", where),
        delay_ms=_milliseconds(fields, "delay", where),
        session_id=_session_id(fields, where),
    )
    expected = num_hash_ids(row.input_length)
    if row.hash_ids and len(row.hash_ids) != expected:
        raise ConfigError(
            f"{where}: input_length {row.input_length} needs {expected} hash_ids of {HASH_TOKENS} tokens, not "
            f"{len(row.hash_ids)}; a trace of another block size has to be converted first"
        )
    return row


def _refuse_other_kinds(fields: Mapping[str, Any], where: str) -> None:
    if "schema" in fields:
        raise ConfigError(f"{where} is a header of schema {fields['schema']!r}; only plain Mooncake rows are read")
    for name in _OTHER_PROMPTS:
        if name in fields:
            raise ConfigError(f"{where}: {name} is not replayed; give input_length and hash_ids instead")


def _count(fields: Mapping[str, Any], name: str, where: str) -> int:
    value = fields.get(name)
    if value is None:
        raise ConfigError(f"{where}: {name} is missing; every row needs it")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _hash_ids(fields: Mapping[str, Any], where: str) -> tuple[int, ...]:
    value = fields.get("hash_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers, at least one, none negative")
    return tuple(value)


def _milliseconds(fields: Mapping[str, Any], name: str, where: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: {name} must be milliseconds, at least 0, not {value!r}")
    return value


def _session_id(fields: Mapping[str, Any], where: str) -> str | None:
    value = fields.get("session_id")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: session_id must be a string, not {value!r}")
    return value
