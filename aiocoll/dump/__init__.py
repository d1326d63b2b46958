"""What flight recorders leave behind: the files, the signal that asks for them, and their form as a timeline."""
