"""What `make run` and `make bench` do; also what the end-to-end tests drive. Not part of the wheel."""
