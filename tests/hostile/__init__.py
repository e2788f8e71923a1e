"""Files that mean harm, through the commands: one error that names the file, and nothing written."""
