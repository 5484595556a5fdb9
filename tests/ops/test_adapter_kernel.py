"""The kernel of adapters gives what the torch reference gives, row by row."""

import random

import pytest
import torch

from lfm2_cb.ops.adapters import FIELDS, DeltaShape, Move, Routing, add_deltas, lay_out, lay_out_all, reference_delta


def make_delta(shape, dtype, generator):
    memory = torch.zeros(shape.num_bytes(dtype) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    delta = shape.carve(memory, start, dtype)
    if delta.a is not None:
        delta.a.copy_(
            lay_out(torch.randn(shape.in_features, shape.rank, generator=generator) / shape.in_features**0.5)
        )
        delta.b.copy_(lay_out(torch.randn(shape.out_features, shape.rank, generator=generator)))
    for tensor in (delta.ratio, delta.addend):
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_equals_the_reference(seed, dtype, kernels):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inner, sizes = rng.choice([8, 24, 33, 100, 256]), [rng.choice([5, 32, 40, 96]) for _ in range(rng.randint(1, 3))]
    num_rows, num_places, first = rng.choice([1, 3, 20, 70]), 5, 2
    table = torch.zeros(num_places, first + len(sizes) + 1, FIELDS, dtype=torch.int64)
    deltas = {}
    for place in range(num_places):
        for part, size in enumerate(sizes):
            if rng.random() < 0.8:
                rank = rng.choice([0, 1, 3, 4, 8, 16, 19, 64])
                shape = DeltaShape(inner, size, rank, rng.random() < 0.3, rng.random() < 0.3)
                deltas[place, part] = make_delta(shape, dtype, generator)
                table[place, first + part] = torch.tensor(deltas[place, part].describe())
    edges = torch.tensor([0, *torch.tensor(sizes).cumsum(0)])
    x = torch.randn(num_rows, inner, generator=generator).to(dtype)
    y = torch.randn(num_rows, sum(sizes), generator=generator).to(dtype)
    routing = Routing([-1] * num_rows)
    for _ in range(2):  # the same tensors for other rows
        places = [rng.choice([-1, -1, *range(num_places)]) for _ in range(num_rows)]
        routing.put(places)
        expected, got = y.clone(), y.clone()
        for row, place in enumerate(places):
            for part in range(len(sizes)):
                if (place, part) in deltas:
                    begin, end = int(edges[part]), int(edges[part + 1])
                    mine = slice(row, row + 1), slice(begin, end)
                    expected[mine] = reference_delta(y[mine], x[row : row + 1], deltas[place, part])
        add_deltas(kernels, got, x, table[:, first:], edges, routing)
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(got, expected, rtol=tolerance / 3, atol=tolerance)
        unrouted = [row for row, place in enumerate(places) if place < 0]
        assert torch.equal(got[unrouted], y[unrouted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_matrices_are_laid_out_as_the_reference_does(seed, dtype, kernels):
    rng, generator, moves, expected = random.Random(seed), torch.Generator().manual_seed(seed), [], []
    for _ in range(60):
        size, rank = rng.choice([1, 5, 31, 32, 33, 100, 256]), rng.choice([1, 2, 3, 8, 16, 17, 64])
        kind = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        shape = (size, rank) if rng.random() < 0.5 else (rank, size)
        matrix = torch.randn(shape, generator=generator).to(kind)
        matrix = matrix if shape == (size, rank) else matrix.T
        if rng.random() < 0.2:  # every second of a wider one
            matrix = torch.randn(size, 2 * rank, generator=generator).to(kind)[:, ::2]
        scale = rng.choice([1.0, 0.37, 2**-0.5])
        panels = torch.full((-(-size // 32), rank, 32), torch.nan, dtype=dtype)
        moves.append(Move(panels, matrix, scale))
        expected.append(lay_out(matrix.float() * scale).to(dtype))
    lay_out_all(kernels, moves)
    for move, wanted in zip(moves, expected, strict=True):
        assert torch.equal(move.panels, wanted)


def test_routes_are_grouped_by_adapter():
    routing = Routing([2, -1, 0, 2, -1, 2])
    assert {place: rows.tolist() for place, rows in routing.groups.items()} == {0: [2], 2: [0, 3, 5]}
    assert routing.tasks[:3].tolist() == [[2, 0, 0], [0, 0, 1], [2, 1, 3]]
    routing.put([-1] * 6)
    assert not routing.groups and int(routing.tasks[0, 0]) == 0
