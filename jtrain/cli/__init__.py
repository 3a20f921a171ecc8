"""The command line: one file a verb. It knows everything and is known by nobody."""
