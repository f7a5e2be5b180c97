"""The durable store: its interface, and the implementation with SQLite and the stream log.

``interface`` has the protocols that the broker uses. ``writer`` has the thread that commits to ``commit_log``, ``follower``
the one that applies commits to the tables, ``tables`` and ``statements`` the rows, ``database`` the file, ``maintenance`` the
work between transactions. ``recovery`` is the start. ``check``, ``salvage`` (with ``pages``), ``log_repair`` and
``database_copy`` are for the command line.
"""
