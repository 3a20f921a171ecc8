import pytest

from jtrain.observe.hlo import analyze


def loop_text(compare, *, counter="%n = s32[] add(%i, %one)", start="constant(0)"):
    return (
        "HloModule m\n\n"
        "%body (t: (s32[], f32[2,2])) -> (s32[], f32[2,2]) {\n"
        "  %t = (s32[], f32[2,2]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n"
        "  %x = f32[2,2]{1,0} get-tuple-element(%t), index=1\n"
        "  %y = f32[2,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  %one = s32[] constant(1)\n"
        f"  {counter}\n"
        "  ROOT %r = (s32[], f32[2,2]{1,0}) tuple(%n, %y)\n"
        "}\n\n"
        "%condition (t: (s32[], f32[2,2])) -> pred[] {\n"
        "  %t = (s32[], f32[2,2]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n"
        "  %limit = s32[] constant(6)\n"
        f"  ROOT %c = pred[] {compare}\n"
        "}\n\n"
        "ENTRY %main (p: f32[2,2], q: s32[]) -> f32[2,2] {\n"
        "  %p = f32[2,2]{1,0} parameter(0)\n"
        "  %q = s32[] parameter(1)\n"
        f"  %zero = s32[] {start}\n"
        "  %t = (s32[], f32[2,2]{1,0}) tuple(%zero, %p)\n"
        "  %w = (s32[], f32[2,2]{1,0}) while(%t), condition=%condition, body=%body\n"
        "  ROOT %o = f32[2,2]{1,0} get-tuple-element(%w), index=1\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop_text("compare(%i, %limit), direction=LT"), 6),
        (loop_text("compare(%limit, %i), direction=GT"), 6),
        (loop_text("compare(%limit, %i), direction=GE"), 7),
        (
            loop_text(
                "compare(%limit, %i), direction=LT", counter="%n = s32[] subtract(%i, %one)", start="constant(9)"
            ),
            3,
        ),
        (loop_text("compare(%i, %limit), direction=LT", start="constant(-2)"), 8),
        # A start that isn't a constant in sight: counted from 0.
        (loop_text("compare(%i, %limit), direction=LT", start="copy(%q)"), 6),
        (loop_text("compare(%i, %limit), direction=LT", counter="%n = s32[] add(%one, %i)"), 6),
    ],
)
def test_trips_follow_from_the_loop_itself(text, trips):
    cost = analyze(text)
    assert (cost.flops, cost.unknown_loops) == (trips * 16, ())


@pytest.mark.parametrize(
    "text",
    [
        loop_text("compare(%i, %limit), direction=EQ"),
        loop_text("compare(%i, %limit), direction=LT", counter="%n = s32[] multiply(%i, %one)"),
        loop_text("compare(%i, %limit), direction=LT", counter="%n = s32[] subtract(%i, %one)"),
        loop_text("is-finite(%limit)"),
    ],
)
def test_a_loop_that_can_not_be_told_is_counted_once_and_named(text):
    cost = analyze(text)
    assert (cost.flops, cost.unknown_loops) == (16, ("w",))
