"""The random model that the managers' tests share: stock's, and ours with the same weights."""

import pytest
from helpers import ours, random_stock


@pytest.fixture(scope="module")
def stock():
    return random_stock(11)


@pytest.fixture(scope="module")
def model(stock):
    return ours(stock)
