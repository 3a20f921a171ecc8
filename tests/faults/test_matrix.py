"""The page of the fault matrix names tests that are there, and leaves no row out."""

import ast
import re

from tests.faults.runs import ROOT

PAGE = (ROOT / "docs" / "fault_matrix.md").read_text()
ROWS = {"K": 8, "T": 3, "D": 6, "C": 14, "L": 3, "R": 6, "H": 4, "N": 3, "B": 5, "A": 3, "W": 4, "S": 3, "M": 1, "X": 1}


def test_every_row_is_there():
    found = set()
    for first, last in re.findall(r"^\| ([A-Z]\d+)(?:–[A-Z](\d+))? \|", PAGE, re.MULTILINE):
        found |= {f"{first[0]}{number}" for number in range(int(first[1:]), int(last or first[1:]) + 1)}
    assert found == {f"{letter}{number}" for letter, count in ROWS.items() for number in range(1, count + 1)}


def test_every_test_that_is_named_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 60
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
