"""The durable store: its interface, and the implementation with SQLite and the stream log.

``interface`` has the protocols that the broker uses. ``writer`` has the thread, ``committer`` the commit, ``tables``
and ``statements`` the rows, ``database`` the file, ``maintenance`` the work between commits. ``check``, ``salvage``
(with ``pages``) and ``database_copy`` are for the command line.
"""
