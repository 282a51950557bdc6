"""Slurm's compressed lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import ConfigError
from rankmesh.membership.nodelist import expand_counts, expand_nodes, first_node


@pytest.mark.parametrize(
    "text, nodes",
    [
        ("node7", ["node7"]),
        ("node[01-04,7],gpu3", ["node01", "node02", "node03", "node04", "node7", "gpu3"]),
        ("a,b.example.org,c-1", ["a", "b.example.org", "c-1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]n[01,5]", ["rack1n01", "rack1n5", "rack2n01", "rack2n5"]),
        ("tux[0-1]-ib", ["tux0-ib", "tux1-ib"]),
    ],
)
def test_lists_expand_in_slurms_order(text: str, nodes: list[str]) -> None:
    assert list(expand_nodes(text)) == nodes
    assert first_node(text) == nodes[0]


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[1", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[a]", "n[1,,2]", "n[[1]]"],
)
def test_a_damaged_list_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST") as caught:
        first_node(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["n[0-99999999999]", "n[0-1023]x[0-1023]y[0-9]", "n[1-1048576,5]"])
def test_a_list_of_absurd_length_is_refused_before_it_is_expanded(text: str) -> None:
    with pytest.raises(ConfigError):
        first_node(text)


words = st.text("abcxyz.-", min_size=1, max_size=5)
groups = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=3)


@given(st.lists(st.tuples(words, groups, st.integers(1, 4)), min_size=1, max_size=4))
def test_what_is_compressed_is_expanded_again(names: list[tuple[str, list[tuple[int, int]], int]]) -> None:
    text, nodes = [], []
    for word, ranges, width in names:
        text.append(f"{word}[{','.join(f'{a:0{width}d}-{a + n:0{width}d}' for a, n in ranges)}]")
        nodes.append([f"{word}{number:0{width}d}" for a, n in ranges for number in range(a, a + n + 1)])
    assert list(expand_nodes(",".join(text))) == list(itertools.chain.from_iterable(nodes))


@pytest.mark.parametrize("text, counts", [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,3(x2)", [1, 2, 3, 3])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(3)", "1,,2", "1(x99999999)"])
def test_damaged_tasks_per_node(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        expand_counts(text)
