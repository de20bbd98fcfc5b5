"""Names of blocks: what differs has another name. The index under random operations is in test_walk."""

from __future__ import annotations

import struct
from hashlib import blake2b

from deltaserve.cache.boundaries import BoundaryKind
from deltaserve.cache.prefix import PrefixIndex, Snapshot, extend_keys, root_key


def keys_of(root: bytes, token_ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, token_ids)
    return keys


def test_names_are_what_the_design_says() -> None:
    root = root_key("model", "", "salt")
    first = blake2b(root + struct.pack("<64i", *range(64)), digest_size=16).digest()
    second = blake2b(first + struct.pack("<64i", *range(64, 128)), digest_size=16).digest()
    assert keys_of(root, list(range(128))) == [first, second]


def test_piecewise_names_are_those_of_the_whole() -> None:
    root, ids = root_key("model"), list(range(256))
    keys = keys_of(root, ids[:64])
    extend_keys(keys, root, ids[64:192])
    extend_keys(keys, root, [])
    extend_keys(keys, root, ids[192:])
    assert keys == keys_of(root, ids)


def test_a_block_is_named_by_all_before_it() -> None:
    root = root_key("model")
    one, other = keys_of(root, [1] * 64 + [7] * 64), keys_of(root, [2] * 64 + [7] * 64)
    assert not set(one) & set(other)
    assert len(set(keys_of(root, [7] * 640))) == 10


def test_models_adapters_and_salts_never_meet() -> None:
    names = [("a", "", ""), ("b", "", ""), ("a", "x", ""), ("a", "", "x"), ("ax", "", ""), ("", "a", ""), ("", "", "a")]
    names += [("ab", "c", ""), ("a", "bc", ""), ("a", "b", "c"), ("abc", "", ""), ("a\0", "", ""), ("a", "\0", "")]
    assert len({root_key(*name) for name in names}) == len(names)
    assert root_key("a") != root_key("a", "")


def test_token_ids_do_not_run_together() -> None:
    root = root_key("model")
    assert keys_of(root, [1, 12] * 32) != keys_of(root, [11, 2] * 32)
    assert keys_of(root, [256] + [0] * 63) != keys_of(root, [0, 1] + [0] * 62)


def test_live_and_warm_follow_the_snapshots() -> None:
    index = PrefixIndex()
    stem = index.insert(index.root, b"1", 1)
    left, right = index.insert(stem, b"2", 2), index.insert(stem, b"3", 3)
    tail = index.insert(left, b"4", 4)
    at_tail, at_right = Snapshot(tail, BoundaryKind.TURN, 0), Snapshot(right, BoundaryKind.TURN, 0)
    assert index.add_snapshot(at_tail, 1) == [tail, left, stem]
    assert index.add_snapshot(at_right, 2) == [right]
    index.check()
    index.move_snapshot(at_tail, None, 1)
    assert (tail.num_warm, left.num_warm, stem.num_warm, stem.num_live) == (0, 0, 1, 2)
    assert index.remove_snapshot(at_tail) == [tail, left]
    assert index.remove_snapshot(at_right) == [right, stem]
    index.check()


def test_the_longest_resumable_way() -> None:
    index = PrefixIndex()
    nodes = [index.root]
    for depth in range(1, 6):
        nodes.append(index.insert(nodes[-1], bytes([depth]), depth))
    keys = [bytes([depth]) for depth in range(1, 9)]
    assert [index.walk(keys[:known] + [b"?"] * 3).depth for known in range(7)] == [0, 1, 2, 3, 4, 5, 5]
    assert index.walk(keys) is nodes[5]
    assert index.walk([b"?", b"!"]) is index.root
    assert index.resumable(nodes[5], 5) is index.root
    index.add_snapshot(Snapshot(nodes[2], BoundaryKind.TURN, 0), 1)
    index.add_snapshot(Snapshot(nodes[4], BoundaryKind.TURN, 0), 2)
    assert [index.resumable(nodes[5], most).depth for most in range(6)] == [0, 0, 2, 2, 4, 4]
    assert index.path(nodes[4]) == nodes[1:5]
