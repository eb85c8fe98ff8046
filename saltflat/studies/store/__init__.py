"""The folder of a study: every file is complete, and nothing finished is lost."""
