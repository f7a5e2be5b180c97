"""The archive of a stream: sealed segments in S3 or a directory; index, storage, jobs, the thread that fills it."""
