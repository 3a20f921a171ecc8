"""What counts as a reduce-scatter: texts as XLA's partitioner writes them, for 2 x 2 devices."""

import pytest

from jtrain.observe.hlo import analyze

MESH = {"data": 2, "fsdp": 2}
HEADER = "HloModule m, num_partitions=4\n\nENTRY %main (p: f32[8,4]) -> f32[4,4] {\n  %p = f32[8,4] parameter(0)\n"
OFFSET = "  %id = u32[] partition-id()\n  %table = s32[4] constant({TABLE})\n  %zero = s32[] constant(0)\n"
OFFSET += "  %entry = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}\n  %offset = s32[] reshape(%entry)\n"


def operations(table, between="", source="r", use="  ROOT %s = f32[4,4] dynamic-slice(%SOURCE, %offset, %zero)\n"):
    """The collectives of a sum over fsdp ({0,1}, {2,3}), and a slice of half of it at the table's offset."""
    text = HEADER + OFFSET.replace("TABLE", table)
    text += "  %r = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add\n"
    text += between + use.replace("SOURCE", source) + "}\n"
    return [(c.op, c.axes, c.bytes, c.wire_bytes) for c in analyze(text, MESH).collectives]


def test_a_part_that_differs_within_the_group_makes_a_reduce_scatter():
    assert operations("0, 4, 0, 4") == [("reduce-scatter", ("fsdp",), 128, 64)]


def test_a_part_that_is_the_same_within_the_group_is_a_whole_all_reduce():
    # The slice is cut over `data`: both members of a group keep the same half, and the other half is needed next door.
    assert operations("0, 0, 4, 4") == [("all-reduce", ("fsdp",), 128, 128)]


def test_a_part_that_the_loop_chooses_is_a_whole_all_reduce():
    everywhere = "  ROOT %s = f32[4,4] dynamic-slice(%r, %zero, %zero)\n"
    assert operations("0, 4, 0, 4", use=everywhere) == [("all-reduce", ("fsdp",), 128, 128)]


def test_a_change_of_layout_may_stand_between_and_arithmetic_may_not():
    moved = "  %t = f32[4,8] transpose(%r), dimensions={1,0}\n  %c = f32[4,8] copy(%t)\n"
    cut = "  ROOT %s = f32[4,4] dynamic-slice(%SOURCE, %zero, %offset)\n"
    assert operations("0, 4, 0, 4", moved, "c", cut)[0][0] == "reduce-scatter"
    added = "  %c = f32[8,4] add(%r, %p)\n"
    assert operations("0, 4, 0, 4", added, "c")[0][0] == "all-reduce"


@pytest.mark.parametrize("other", ["add(%r, %r)", "negate(%r)"])
def test_a_sum_that_is_also_needed_whole_is_an_all_reduce(other):
    assert operations("0, 4, 0, 4", f"  %o = f32[8,4] {other}\n")[0][0] == "all-reduce"


def test_all_reduces_that_were_merged_are_told_apart():
    text = HEADER + OFFSET.replace("TABLE", "0, 4, 0, 4")
    text += (
        "  %q = f32[16] constant({...})\n"
        "  %r = (f32[8,4], f32[16]) all-reduce(%p, %q), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add\n"
        "  %a = f32[8,4] get-tuple-element(%r), index=0\n"
        "  %b = f32[16] get-tuple-element(%r), index=1\n"
        "  %n = f32[16] negate(%b)\n"
        "  ROOT %s = f32[4,4] dynamic-slice(%a, %offset, %zero)\n}\n"
    )
    found = {(c.op, c.bytes) for c in analyze(text, MESH).collectives}
    assert found == {("reduce-scatter", 128), ("all-reduce", 64)}
