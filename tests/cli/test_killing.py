"""Killed at any instant and run again, a job ends with the files it would have written undisturbed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killing import kill_many


@pytest.mark.parametrize(
    "times, num_rows, most", [(2, 60, 1), pytest.param(50, 200, 4, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_killed_at_random_instants(tmp_path, capsys, times, num_rows, most):
    summary = kill_many(tmp_path, times, num_rows, most=most)
    with capsys.disabled():
        print(f"\n{summary}")
