"""What chat models write beside plain text: thoughts and tool calls, each family in its own markup, read while it streams."""
