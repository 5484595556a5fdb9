"""The cache under any order of events, beside a shadow that remembers what every block holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.request import Request

BLOCK = 3


class CacheMachine(RuleBasedStateMachine):
    """Admits, computes, appends, forks, rolls back, frees and clears; content is checked where it is shared."""

    def __init__(self):
        super().__init__()
        self.cache = CacheManager(num_blocks=12, block_size=BLOCK, num_slots=4)
        self.running: list[Request] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block id → all tokens up to its end, once computed
        self.next_id = 0

    def pick(self, index: int) -> Request:
        return self.running[index % len(self.running)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), cached=st.booleans())
    def admit(self, tokens, cached):
        request = Request(self.next_id, tokens, 99, use_prefix_cache=cached)
        self.next_id += 1
        match = self.cache.match_prefix(request)
        assert len(match.block_ids) * BLOCK < len(tokens)  # the last token is always left to compute
        for i, block_id in enumerate(match.block_ids):
            assert self.content[block_id] == tuple(tokens[: (i + 1) * BLOCK]), "a hit on other content"
        free = self.cache.pool.num_free
        if self.cache.admit(request, match):
            assert request.num_computed_tokens == len(match.block_ids) * BLOCK
            self.running.append(request)
        else:
            assert not request.block_table and request.state_slot is None and self.cache.pool.num_free == free

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), count=st.integers(1, 9))
    def compute(self, index, count):
        request = self.pick(index)
        count = min(count, request.num_tokens - request.num_computed_tokens)
        if not count or not self.cache.append(request, count):  # as the scheduler: no token without its block
            return
        for end in range(BLOCK, request.num_computed_tokens + count + 1, BLOCK):
            block_id = request.block_table[end // BLOCK - 1]
            if end > request.num_computed_tokens:  # written now: nobody else may own it
                assert self.cache.pool.blocks[block_id].ref_count == 1
                self.content[block_id] = tuple(request.token_ids[:end])
        request.num_computed_tokens += count
        self.cache.commit(request)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), token=st.integers(0, 1))
    def decode(self, index, token):
        request = self.pick(index)
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(token)
            if not self.cache.append(request, 1):
                request.token_ids.pop()

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0, 9), drafts=st.lists(st.integers(0, 1), min_size=1, max_size=5), accepted=st.integers(0, 5)
    )
    def draft(self, index, drafts, accepted):
        """Verify drafts behind the last known token, and keep some."""
        request = self.pick(index)
        if request.num_tokens - request.num_computed_tokens != 1 or not self.cache.append(request, 1 + len(drafts)):
            return
        accepted = min(accepted, len(drafts))
        request.num_computed_tokens += 1 + len(drafts)
        for end in range(BLOCK, request.num_tokens + accepted + 1, BLOCK):
            block_id = request.block_table[end // BLOCK - 1]
            if end > request.num_tokens - 1:
                self.content[block_id] = tuple([*request.token_ids, *drafts[:accepted]][:end])
        request.token_ids += [*drafts[:accepted], 1]
        self.cache.roll_back(request, request.num_tokens - 1)
        self.cache.commit(request)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def fork(self, index):
        parent = self.pick(index)
        if parent.num_computed_tokens != parent.num_tokens:
            return
        child = Request(self.next_id, list(parent.token_ids), 99, use_prefix_cache=parent.use_prefix_cache)
        self.next_id += 1
        fork = self.cache.fork(parent, child)
        if fork is not None:
            whole = parent.num_computed_tokens // BLOCK
            assert child.block_table[:whole] == parent.block_table[:whole]
            assert not set(child.block_table[whole:]) & set(parent.block_table[whole:])
            assert (fork.block_copy is not None) == (parent.num_computed_tokens % BLOCK > 0)
            assert child.state_slot != parent.state_slot
            self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def free(self, index):
        request = self.pick(index)
        self.running.remove(request)
        self.cache.free(request)

    @rule()
    def clear(self):
        self.cache.clear()
        probe = Request(self.next_id, [0] * 9, 1)
        assert not self.cache.match_prefix(probe).block_ids

    @invariant()
    def nothing_is_lost_or_owned_twice(self):
        self.cache.check_integrity(self.running)
        owned = {block for request in self.running for block in request.block_table}
        assert len(owned) + self.cache.pool.num_free == 12
        for request in self.running:
            assert len(request.block_table) >= self.cache.blocks_for(request.num_computed_tokens)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
