"""Long runs, by `make stress`: they are too long for `make test`, which has a short form of each."""
