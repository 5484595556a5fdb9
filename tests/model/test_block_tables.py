"""Block ids of decode steps: written once, and anew where a state slot has come to another sequence."""

from lfm2_cb.model.decode_batch import BlockTables


def test_a_sequence_that_grows_has_its_new_blocks_written():
    tables, block_ids = BlockTables(3, 4), [7, 9]
    tables.write(1, block_ids, 2)
    block_ids.append(4)
    tables.write(1, block_ids, 2)
    assert tables.block_ids.tolist() == [[0] * 4, [7, 9, 0, 0], [0] * 4]
    tables.write(1, block_ids, 3)
    assert tables.block_ids[1].tolist() == [7, 9, 4, 0]


def test_a_slot_that_comes_to_another_sequence_has_its_blocks():
    tables = BlockTables(2, 3)
    tables.write(0, [1, 2, 3], 3)
    other = [5, 6]
    tables.write(0, other, 1)
    assert tables.block_ids[0, 0] == 5
    tables.write(0, other, 2)
    assert tables.block_ids[0, :2].tolist() == [5, 6]
