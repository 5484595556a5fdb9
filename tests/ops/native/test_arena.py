"""Memory lent for the intermediates of a step: large tensors lie in it while it is lent, in that thread."""

import threading

import pytest
import torch

from lfm2_cb.ops.native import Arena, empty, lend
from lfm2_cb.ops.native.arena import LARGE

LARGE_SHAPE, SMALL_SHAPE = (LARGE // 4, 2), (LARGE // 4 - 1,)


def test_large_tensors_lie_in_the_arena_that_is_lent():
    arena = Arena()
    assert empty(LARGE_SHAPE, torch.bfloat16) not in arena and arena.num_bytes == 0
    with lend(arena):
        large, small = empty(LARGE_SHAPE, torch.bfloat16), empty(SMALL_SHAPE, torch.float32)
        assert large.shape == LARGE_SHAPE and large.dtype == torch.bfloat16 and large.is_contiguous()
        assert large in arena and small not in arena
        address = large.data_ptr()
        assert empty(LARGE_SHAPE, torch.bfloat16).data_ptr() != address
        del large
        assert empty(LARGE_SHAPE, torch.bfloat16).data_ptr() == address
    assert empty(LARGE_SHAPE, torch.bfloat16) not in arena


def test_arenas_are_lent_one_within_the_other_to_one_thread():
    outer, inner, others = Arena(), Arena(), []
    with lend(outer):
        with pytest.raises(KeyError), lend(inner):
            assert empty(LARGE_SHAPE, torch.float32) in inner
            raise KeyError
        assert empty(LARGE_SHAPE, torch.float32) in outer
        thread = threading.Thread(target=lambda: others.append(empty(LARGE_SHAPE, torch.float32)))
        thread.start()
        thread.join()
    assert others[0] not in outer
