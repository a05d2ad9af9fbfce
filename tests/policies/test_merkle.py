"""The tree of RFC 6962: its known hashes, its proofs, and what a wrong proof comes to."""

from __future__ import annotations

import hashlib
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import merkle
from policies.merkle import Span

# The vectors that implementations of Certificate Transparency share: eight leaves, and the hash of the first n.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = (
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)
# (first, second): the hashes of RFC 6962 2.1.3's form, for some of them.
INCLUSION = {
    (0, 8): (
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ),
    (2, 3): ("fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",),
}
CONSISTENCY = {
    (6, 8): (
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ),
    (2, 5): (
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ),
}
SIZES = st.integers(1, 300)


@cache
def tree(start: int, end: int) -> bytes:
    """MTH as RFC 6962 2.1 defines it, word for word, of leaves that hold their number."""
    if end == start:
        return hashlib.sha256(b"").digest()
    if end - start == 1:
        return hashlib.sha256(b"\x00" + str(start).encode()).digest()
    k = 1
    while 2 * k < end - start:
        k *= 2
    return hashlib.sha256(b"\x01" + tree(start, start + k) + tree(start + k, end)).digest()


def leaves(size: int) -> list[bytes]:
    return [tree(at, at + 1) for at in range(size)]


def hashes(spans: list[Span]) -> list[bytes]:
    return [tree(*span) for span in spans]


def test_known_hashes_and_proofs() -> None:
    known = [merkle.leaf(each) for each in LEAVES]
    for size, expected in enumerate(ROOTS):
        assert merkle.root(known[:size]).hex() == expected
    for (index, size), proof in INCLUSION.items():
        made = [merkle.root(known[start:end]).hex() for start, end in merkle.inclusion(index, size)]
        assert tuple(made) == proof
    for (first, second), proof in CONSISTENCY.items():
        made = [merkle.root(known[start:end]).hex() for start, end in merkle.consistency(first, second)]
        assert tuple(made) == proof


@given(st.integers(0, 300))
def test_a_tree_is_joined_from_its_perfect_parts(size: int) -> None:
    assert merkle.root(leaves(size)) == tree(0, size)
    parts = merkle.perfect((0, size))
    spans = [(part.number << part.level, (part.number + 1) << part.level) for part in parts]
    assert [each for span in spans for each in range(*span)] == list(range(size))
    assert merkle.joined(hashes(spans)) == tree(0, size)


@given(SIZES, st.data())
def test_a_leaf_is_shown_and_no_other(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    path = hashes(merkle.inclusion(index, size))
    root, own = tree(0, size), tree(index, index + 1)
    assert merkle.includes(root, size, index, own, path)
    assert not merkle.includes(root, size, index, merkle.leaf(b"another"), path)
    assert not merkle.includes(merkle.leaf(b""), size, index, own, path)
    other = data.draw(st.integers(0, size + 3))
    assert other == index or not merkle.includes(root, size, other, own, path)
    assert not merkle.includes(root, size, index, own, [*path, own])
    assert not path or not merkle.includes(root, size, index, own, path[:-1])
    assert not path or not merkle.includes(root, size, index, own, [path[0][:-1], *path[1:]])


@given(SIZES, st.data())
def test_a_tree_is_shown_to_grow_and_only_from_what_it_was(second: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, second))
    spans = merkle.consistency(first, second)
    path = hashes(spans)
    before, after = tree(0, first), tree(0, second)
    assert merkle.grows(first, before, second, after, path)
    changed = merkle.leaf(b"changed")
    assert not merkle.grows(first, changed, second, after, path)
    assert first == 0 or not merkle.grows(first, before, second, changed, path)
    assert not merkle.grows(first, before, second, after, [*path, changed])
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        assert not merkle.grows(first, before, second, after, path[:at] + path[at + 1 :])
        assert not merkle.grows(first, before, second, after, [*path[:at], changed, *path[at + 1 :]])
        assert not merkle.grows(first, before, second, after, [*path[:at], path[at][:-1], *path[at + 1 :]])


@given(st.integers(2, 300), st.data())
def test_a_leaf_that_was_changed_or_dropped_is_no_growth(size: int, data: st.DataObject) -> None:
    """As an operator would who rewrites a verdict: the rewritten tree has no proof that holds against the old head."""
    at = data.draw(st.integers(0, size - 1))
    known = leaves(size)
    forged = data.draw(
        st.sampled_from([[*known[:at], merkle.leaf(b"forged"), *known[at + 1 :]], known[:at] + known[at + 1 :]])
    )
    old = data.draw(st.integers(at + 1, size))
    if len(forged) < old:
        forged = [*forged, *leaves(size + 1)[size:]]
    path = [merkle.root(forged[start:end]) for start, end in merkle.consistency(old, len(forged))]
    assert not merkle.grows(old, merkle.root(known[:old]), len(forged), merkle.root(forged), path)


@pytest.mark.parametrize(("index", "size"), [(0, 0), (5, 5), (-1, 3), (7, 3)])
def test_no_path_to_what_is_not_there(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no leaf"):
        merkle.inclusion(index, size)
    assert not merkle.includes(tree(0, 3), size, index, tree(0, 1), [])


@pytest.mark.parametrize(("first", "second"), [(4, 3), (-1, 3)])
def test_no_path_from_larger_to_smaller(first: int, second: int) -> None:
    with pytest.raises(ValueError, match="cannot begin"):
        merkle.consistency(first, second)
    assert not merkle.grows(first, tree(0, 4), second, tree(0, 3), [])


@given(st.integers(1, 70).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total - 1))), st.data())
def test_what_a_proof_says_of_the_tree_before(shape: tuple[int, int], data: st.DataObject) -> None:
    total, index = shape
    leaves = [merkle.leaf(bytes([number])) for number in range(total)]
    path = [merkle.root(leaves[start:end]) for start, end in merkle.inclusion(index, total)]
    size = data.draw(st.integers(0, total + 1))
    found = merkle.earlier(size, total, index, leaves[index], path)
    assert found in (None, merkle.root(leaves[:size]))
    for known in {index, index + 1, total} - {0}:
        assert merkle.earlier(known, total, index, leaves[index], path) == merkle.root(leaves[:known])
