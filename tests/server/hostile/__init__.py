"""What nobody should send, line by line of the list of hostile inputs (H01 to H86): each line has a test of its name,
`test_h01_...`, and behind each comes the check of tests/server/hostile/live.py. Lines of adapters (H77, H78) have none, those of
pictures (H55 to H64) ask of a server that takes none. Those of model files (H65 to H76) are tested where files are read: FILES."""

FILES = {
    65: "tests/checkpoint/test_gguf.py::test_damaged_files_are_refused_by_name",
    66: "tests/checkpoint/test_gguf.py::test_damaged_files_are_refused_by_name",
    68: "tests/models/test_damaged.py::test_cuts_and_no_damage",
    70: "tests/checkpoint/test_safetensors.py::test_bad_headers_name_file_and_tensor",
    72: "tests/checkpoint/test_torch.py::test_more_than_tensors_is_refused_by_name",
    74: "tests/models/test_megatron.py::test_what_is_missing_is_named",
}
LINES = [
    *(1, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 28, 30, 31, 33, 35, 36, 38, 39, 40),
    *(42, 43, 44, 45, 46, 47, 51, 52, 54, 55, 56, 59, 60, 61, 62, 64, 65, 66, 68, 70, 72, 74, 75, 76, 80, 82, 83, 84, 85, 86),
]
