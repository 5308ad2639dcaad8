"""What is trained beside a model and changes it."""
