"""The output folder: staging and publishing, the journal of a run, the index and the side files."""
