from jtrain.observe.hlo_text import dimensions, parse_module, shapes, size_bytes


def test_types_have_sizes_whatever_their_layout():
    assert size_bytes("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == 8 * 128 * 2
    assert size_bytes("(f32[2,3]{1,0}, /*index=1*/(s8[5], pred[]))") == 24 + 5 + 1
    assert size_bytes("s4[3]") == 2
    assert size_bytes("token[]") == 0
    assert shapes("f32[<=4,2]") == [("f32", (4, 2))]
    assert dimensions("f32[]") == ()


def test_text_without_percent_signs_and_with_types_of_operands_reads_the_same():
    with_signs = (
        "ENTRY %e (a: f32[2]) -> f32[2] {\n"
        "  %a = f32[2]{0} parameter(0)\n"
        "  ROOT %b = f32[2]{0} add(f32[2]{0} %a, f32[2]{0} %a)\n"
        "}\n"
    )
    for text in (with_signs, with_signs.replace("%", "")):
        module = parse_module("HloModule m, replica_count=2, num_partitions=4\n" + text)
        root = module.computations[module.entry].root
        assert (root.opcode, root.operands) == ("add", ("a", "a"))
        assert module.devices == 8


def test_a_brace_in_a_string_does_not_swallow_the_next_instruction():
    text = (
        "HloModule m\n\nENTRY %e (a: f32[2]) -> f32[2] {\n"
        '  %a = f32[2]{0} parameter(0), metadata={op_name="x{"}\n'
        "  ROOT %b = f32[2]{0} negate(%a)\n"
        "}\n"
    )
    assert list(parse_module(text).computations["e"].instructions) == ["a", "b"]


def test_the_innermost_stack_frame_gives_the_source():
    text = (
        'HloModule m\n\nFileNames\n1 "/a/train.py"\n2 "/a/model.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}\n"
        "2 {file_name_id=2 function_name_id=1 line=44 end_line=44 column=1 end_column=2}\n\nStackFrames\n"
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n\n\n"
        "ENTRY %e (a: f32[2]) -> f32[2] {\n"
        '  ROOT %a = f32[2]{0} parameter(0), metadata={op_name="x" stack_frame_id=2}\n'
        "}\n"
    )
    module = parse_module(text)
    assert module.source(module.computations["e"].root) == "/a/model.py:44"


def test_an_element_of_a_tuple_may_be_written_in_short():
    text = (
        "HloModule m\n\n"
        "ENTRY %main (t: (s32[], (f32[2,3], /*index=1*/bf16[5]))) -> f32[2,3] {\n"
        "  %t = (s32[], (f32[2,3]{1,0}, /*index=1*/bf16[5]{0})) parameter(0)\n"
        "  %n = bf16[5]{0} negate(%t#1#1)\n"
        "  ROOT %r = f32[2,3]{1,0} negate(%t#1#0)\n"
        "}\n"
    )
    main = parse_module(text).computations["main"]
    assert main.type_of("t#1#0") == "f32[2,3]{1,0}" and main.type_of("t#1#1") == "bf16[5]{0}"
    assert main.instructions["t#1"].operands == ("t",)
    assert [user.name for user in main.users("t#1#1")] == ["n"]


def test_a_line_of_a_library_gives_way_to_the_line_that_called_it():
    text = (
        "HloModule m\n\nFileNames\n"
        '1 "/home/me/model.py"\n2 "/venv/lib/python3.12/site-packages/optax/tree.py"\n'
        '3 "/venv/lib/python3.12/site-packages/jtrain/ops.py"\n\n'
        'FunctionNames\n1 "f"\n\n'
        "FileLocations\n"
        "1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}\n"
        "2 {file_name_id=2 function_name_id=1 line=8 end_line=8 column=1 end_column=2}\n"
        "3 {file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=2}\n\n"
        # A parent is written as the number after its own: 1 is none.
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=2 parent_frame_id=3}\n4 {file_location_id=3 parent_frame_id=4}\n"
        "5 {file_location_id=2 parent_frame_id=1}\n\n\n"
        "ENTRY %main () -> f32[] {\n  ROOT %r = f32[] constant(1)\n}\n"
    )
    mine, library = "/home/me/model.py:7", "/venv/lib/python3.12/site-packages/optax/tree.py:8"
    ops = "/venv/lib/python3.12/site-packages/jtrain/ops.py:9"
    assert parse_module(text).sources == {1: mine, 2: mine, 3: mine, 4: ops, 5: library}
