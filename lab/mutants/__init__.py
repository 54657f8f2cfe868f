"""Change single lines of the code and see whether a test notices: `make mutants`."""
