"""The kernel of adapters gives what the torch reference gives, row by row."""

import random

import pytest
import torch
from emulated_units import AsZen4

from lfm2_cb.adapters.pool import AdaptedKernels, AdaptedLayer
from lfm2_cb.adapters.projections import Part, Projection
from lfm2_cb.ops.adapters import (
    FIELDS,
    DeltaShape,
    Move,
    Routing,
    adapted_linear,
    add_deltas,
    lay_out,
    lay_out_all,
    reference_delta,
)
from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.linear.dense import PackedLinear, in_place_tile_linear
from lfm2_cb.ops.linear.table import DENSE, products


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


class Case:
    """A layer of a random shape, and the random deltas of some adapters."""

    def __init__(self, seed, dtype):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rng, num_places, first = self.rng, 5, 2
        self.inner = rng.choice([8, 24, 33, 100, 256])
        self.sizes = [rng.choice([5, 32, 40, 96]) for _ in range(rng.randint(1, 3))]
        table = torch.zeros(num_places, first + len(self.sizes) + 1, FIELDS, dtype=torch.int64)
        self.deltas = {}
        for place in range(num_places):
            for part, size in enumerate(self.sizes):
                if rng.random() < 0.8:
                    rank = rng.choice([0, 1, 3, 4, 8, 16, 19, 64])
                    shape = DeltaShape(self.inner, size, rank, rng.random() < 0.3, rng.random() < 0.3)
                    self.deltas[place, part] = make_delta(shape, dtype, self.generator)
                    table[place, first + part] = torch.tensor(self.deltas[place, part].describe())
        self.table, self.edges = table[:, first:], torch.tensor([0, *torch.tensor(self.sizes).cumsum(0)])
        self.places = [-1, -1, *range(num_places)]

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def reference(self, y, x, places):
        """`reference_delta` of each row."""
        expected = y.clone()
        for row, place in enumerate(places):
            for part in range(len(self.sizes)):
                if (place, part) in self.deltas:
                    mine = slice(row, row + 1), slice(int(self.edges[part]), int(self.edges[part + 1]))
                    expected[mine] = reference_delta(y[mine], x[row : row + 1], self.deltas[place, part])
        return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_equals_the_reference(seed, dtype, kernels):
    case = Case(seed, dtype)
    num_rows = case.rng.choice([1, 3, 20, 70])
    x, y = case.random(num_rows, case.inner).to(dtype), case.random(num_rows, sum(case.sizes)).to(dtype)
    routing = Routing([-1] * num_rows)
    for _ in range(2):  # the same tensors for other rows
        places = case.rng.choices(case.places, k=num_rows)
        routing.put(places)
        got = y.clone()
        add_deltas(kernels, got, x, case.table, case.edges, routing)
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(got, case.reference(y, x, places), rtol=tolerance / 3, atol=tolerance)
        unrouted = [row for row, place in enumerate(places) if place < 0]
        assert torch.equal(got[unrouted], y[unrouted])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_product_with_deltas_is_that_of_one_after_the_other(seed, threads, bf16_kernels):
    torch.set_num_threads(threads)
    case = Case(seed, torch.bfloat16)
    num_rows = case.rng.choice([1, 15, 33, 64, 100])
    x, weight = case.random(num_rows, case.inner).bfloat16(), case.random(sum(case.sizes), case.inner).bfloat16()
    bias = case.random(sum(case.sizes)).bfloat16() if seed % 2 else None
    routing = Routing([-1] * num_rows)
    for choice in (case.places, case.places, [-1], [case.places[-1]]):
        places = case.rng.choices(choice, k=num_rows)
        routing.put(places)
        got = adapted_linear(bf16_kernels, x, weight, bias, case.table, case.edges, routing)
        y = in_place_tile_linear(bf16_kernels, x, weight, bias)
        torch.testing.assert_close(got, case.reference(y, x, places), rtol=0.02, atol=0.05)
        if not isinstance(bf16_kernels, AsZen4):  # whose deltas are added by another instruction set
            add_deltas(bf16_kernels, y, x, case.table, case.edges, routing)
            assert torch.equal(got, y)


def test_inputs_in_chunks(bf16_kernels):
    """More than the second-level cache holds beside the weights."""
    inner, outputs, rank, rows = 4640, 70, 16, 250
    generator = torch.Generator().manual_seed(0)
    delta = make_delta(DeltaShape(inner, outputs, rank, False, False), torch.bfloat16, generator)
    table, places = torch.tensor([[delta.describe()]]), [0, -1] * (rows // 2)
    x, weight = (torch.randn(n, inner, generator=generator).bfloat16() for n in (rows, outputs))
    y = in_place_tile_linear(bf16_kernels, x, weight, None)
    got = adapted_linear(bf16_kernels, x, weight, None, table, torch.tensor([0, outputs]), Routing(places))
    assert torch.equal(got[1::2], y[1::2])
    torch.testing.assert_close(got[::2], reference_delta(y[::2], x[::2], delta), rtol=0.02, atol=0.05)


def test_a_layer_is_multiplied_with_its_deltas_where_that_is_faster(zen4_emulation):
    called = []

    class Heard(AsZen4):
        def call(self, name, *args):
            called.append(name)
            super().call(name, *args)

    kernels, few = KernelSet(Heard(zen4_emulation)), int(products(DENSE, torch.bfloat16, "zen4")[0][0])
    layer, generator = PackedLinear(70, 34).to(torch.bfloat16), torch.Generator().manual_seed(0)
    delta = make_delta(DeltaShape(70, 34, 8, False, False), torch.bfloat16, generator)
    adapted = AdaptedLayer(
        Projection("layer", (Part("layer", 0, 70, 0, 34),)), torch.tensor([[delta.describe()]]), is_head=False
    )
    apart = ["few_rows_linear_bf16", "add_deltas"]
    with torch.no_grad():
        for rows, expected in (few, apart), (few + 1, ["tile_adapted_linear_bf16"]):
            routing, x = Routing([0] * rows), torch.randn(rows, 70).bfloat16()
            y = AdaptedKernels(kernels, {layer: adapted}, {}, routing, Routing([-1] * rows)).linear(layer, x)
            product = (x @ layer.weight.T + layer.bias).bfloat16()
            torch.testing.assert_close(y, reference_delta(product, x, delta), rtol=0.02, atol=0.05)
            assert called == expected
            called.clear()


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
