"""Options are refused by name, whether or not they would be used."""

import pytest

from lfm2_cb.requests.validation import check_types

RANGES = {
    "temperature": (-1, -0.1, "hot", True, float("nan")),
    "top_p": (-0.1, 1.5),
    "min_p": (-0.1, 1.5),
    "typical_p": (0, -0.1, 1.5),
    "top_h": (0, -0.1, 1.5),
    "epsilon_cutoff": (-0.1, 1, 3),
    "eta_cutoff": (-0.1, 1, 3),
    "top_k": (-1, 1.5),
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name, value", [(name, value) for name, values in RANGES.items() for value in values])
def test_a_value_out_of_range_is_refused_by_name(name, value, do_sample):
    with pytest.raises(ValueError, match=name):
        check_types({"do_sample": do_sample, name: value})


@pytest.mark.parametrize(
    "name, value",
    [("temperature", 0), ("top_p", 1), ("min_p", 0), ("typical_p", 1), ("epsilon_cutoff", 0), ("top_k", 0)],
)
def test_what_switches_an_option_off_is_let_pass(name, value):
    check_types({name: value})
