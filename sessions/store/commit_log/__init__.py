"""The commit log on disk: records in segment files, and write sets as records."""
