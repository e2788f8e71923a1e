"""The code broken on purpose, one place at a time: for each there has to be a test that fails."""
