"""The soak, short by default. `LFM2_CB_SOAK_REQUESTS` sets the size of the long one (100,000)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import soak


def test_a_short_soak(capsys):
    summary = soak(400, num_samples=20)
    with capsys.disabled():
        print(f"\n{summary}")


@pytest.mark.slow
def test_a_long_soak(capsys):
    summary = soak(int(os.environ.get("LFM2_CB_SOAK_REQUESTS", 100_000)), num_samples=500)
    with capsys.disabled():
        print(f"\n{summary}")
