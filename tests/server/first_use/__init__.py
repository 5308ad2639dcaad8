"""What a newcomer meets, line by line: `make first-use` prints one row for each. The number in a test's name is the line's.

1 installing, 2 starting with a path alone, 3 what the start tells, 4 little memory, 5 no chat template, 6 files that are no models,
7 odd machines, 8 names of the hub, 9 the container, 10 wrong names and keys, 11 what does not fit, 12 stopping, 13 the documents'
examples."""
